"""Training by MaxText goes on after a way through Hugging Face's and torchtitan's names, as from its own checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from tests.support.bridge import maxtext_training
from tests.support.bridge.maxtext_trees import ENVIRONMENT


def train(folder: Path, run: str, steps: int) -> list[float]:
    """The losses."""
    command = [ENVIRONMENT, maxtext_training.__file__, folder, run, steps]
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / f"{run}.jsonl").read_text().splitlines()
    return [json.loads(line)["learning/loss"] for line in lines]


@pytest.mark.slow  # three processes with MaxText, of 20 s each
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not ENVIRONMENT.exists(), reason="make maxtext installs MaxText, in an environment of its own"
)
def test_training_goes_on_with_equal_losses(tmp_path: Path) -> None:
    first = train(tmp_path, "stock", 3)
    saved, names = tmp_path / "stock" / "checkpoints" / "2", {"d": maxtext_training.HEAD, "llama3_rope": 0}
    back = tmp_path / "bridge" / "checkpoints" / "2"
    convert(saved, tmp_path / "hf", to="dcp", mapping="llama", into="hf", axes=names)
    convert(tmp_path / "hf", tmp_path / "titan", to="dcp", mapping="llama", into="torchtitan", axes=names)
    back.parent.mkdir(parents=True)
    convert(tmp_path / "titan", back, mapping="llama", into="maxtext", axes=names, like=saved)
    with open_checkpoint(tmp_path / "titan") as reader:
        assert "optimizer.state.layers.1.attention.qkv_linear.wqkv.weight.exp_avg_sq" in reader.tensors
    own, through = (train(tmp_path, run, 5)[-2:] for run in ("stock", "bridge"))
    assert own == through
    # The first step's learning rate is 0.
    assert len({*first[1:], *own}) == 4
    assert (tmp_path / "bridge.jsonl").read_text().count("\n") == 2
    with (
        open_checkpoint(tmp_path / "stock" / "checkpoints" / "4") as theirs,
        open_checkpoint(tmp_path / "bridge" / "checkpoints" / "4") as ours,
    ):
        assert theirs.tensors.keys() == ours.tensors.keys()
        assert [n for n in theirs.tensors if not np.array_equal(theirs.read(n), ours.read(n))] == []
