"""Training by torchtitan's own models goes on after a way through JAX's names, for each family and release."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.third_party import Package, Unreachable
from tests.support.torch_impl import torchtitan_runs
from tests.support.torch_impl.frameworks import needs

pytestmark = [pytest.mark.slow, needs("torchdata", "tyro", "triton", "tensorboard")]

RELEASES = {
    "0.2": (
        Package("torchtitan", "0.2.2", "c95ccaaa89238085ed7d3d4befb20a298cc3fcc666b9573a1f5ba92ec8c3ca60"),
    ),
    "0.3": (
        Package("torchtitan", "0.3.0", "5563ccf9a295b24e00a36087149e9c2d0686cecbd3972c31e67227029293af42"),
        Package("spmd-types", "0.2.3", "0bbeb783a7e9678a125cded42e07ef17c73982e4b4de2294d435f9df8c17331c"),
    ),
}
UNFUSED = ["qwen3_unfused", "qwen3_moe_unfused"]
CASES = [
    *(("0.2", family) for family in torchtitan_runs.AXES),
    *(("0.3", family) for family in (*torchtitan_runs.AXES, *UNFUSED)),
]


@pytest.mark.parametrize(("release", "family"), CASES)
def test_training_goes_on_with_equal_losses(tmp_path: Path, release: str, family: str) -> None:
    try:
        folders = [str(package.folder()) for package in RELEASES[release]]
    except Unreachable as error:
        pytest.skip(str(error))
    path = os.pathsep.join([*folders, *(entry for entry in sys.path if entry)])
    run = subprocess.run(
        [sys.executable, torchtitan_runs.__file__, release, family, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.endswith("ok\n")
