"""Checkpoints of ``jax_impl`` from a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.verify.verification import verify
from tests.gpu import jax_jobs as jobs
from tests.gpu.devices import needs_jax_device
from tests.gpu.jax_process import JaxProcess

pytestmark = needs_jax_device


def test_a_save_behind_training_holds_the_state_whose_memory_steps_take(
    exact_jax_process: JaxProcess, tmp_path: Path
) -> None:
    saves = exact_jax_process.run(jobs.saved_behind_training, str(tmp_path))
    for name in ("now", "later"):
        assert verify(tmp_path / name).good
        for mine, want in zip(saves["states"][name], saves["expected"], strict=True):
            assert np.array_equal(mine, want)
    assert saves["resumed"] == saves["losses"]


@pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="needs orbax-checkpoint")
def test_stock_orbax_reads_a_checkpoint_that_a_gpu_saved(
    exact_jax_process: JaxProcess, tmp_path: Path
) -> None:
    weights, same = exact_jax_process.run(jobs.read_by_orbax, str(tmp_path))
    assert weights == same > 0
