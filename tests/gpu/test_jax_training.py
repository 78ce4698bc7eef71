"""``jax_impl`` on one GPU beside plain optax programs there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu import jax_jobs as jobs
from tests.gpu.devices import ON_GPU, needs_jax_device
from tests.gpu.jax_process import JaxProcess

pytestmark = needs_jax_device


def test_the_process_has_the_gpu(jax_process: JaxProcess) -> None:
    platform, _ = jax_process.run(jobs.platform)
    assert platform == ("gpu" if ON_GPU else "cpu")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "pjit"},
        {"strategy": "no_shard"},
        {"recompute": True},
    ],
    ids=str,
)
def test_a_sharded_run_is_a_plain_optax_program(jax_process: JaxProcess, options: dict[str, Any]) -> None:
    losses, weights = jax_process.run(jobs.plain_optax, 4)
    sharded_losses, own = jax_process.run(jobs.sharded, 4, options)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)
    assert own.keys() == weights.keys()
    for path, value in own.items():
        np.testing.assert_allclose(value, weights[path], rtol=0, atol=2e-5, err_msg=path)


def test_scanned_layers_train_as_unrolled_ones(jax_process: JaxProcess) -> None:
    losses, _ = jax_process.run(jobs.plain_optax, 4)
    sharded_losses, _ = jax_process.run(jobs.sharded, 4, {"stacked": ["layers"]})
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)


def test_a_forward_has_the_loss_of_the_step(jax_process: JaxProcess) -> None:
    forward, step = jax_process.run(jobs.evaluated)
    assert forward == pytest.approx(step, rel=1e-6)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn")])
def test_moments_of_few_bits_train_beside_float32_ones(
    jax_process: JaxProcess, dtypes: tuple[str, str]
) -> None:
    losses, expected, stored = jax_process.run(jobs.low_precision_moments, dtypes)
    assert set(dtypes) <= set(stored)
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    assert losses != expected
