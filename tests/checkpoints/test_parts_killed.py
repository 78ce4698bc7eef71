"""Parts killed before any of their operations on files: nothing is half there, and the part run again mends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sweep(folder: Path, format: str, first: int, step: int, *flags: str) -> tuple[int, int]:
    """How many kills there were, and how many of the runs again took over bytes; the program asserts the rest."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.bridge.parts_killed"),
            *(str(folder), format, str(first), str(step), *flags),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills, taken_over = map(int, done.stdout.split())
    return kills, taken_over


@pytest.mark.slow
def test_some_kills(tmp_path: Path) -> None:
    kills, taken_over = sweep(tmp_path, "dcp", 3, 17, "--resume")
    assert kills >= 5
    assert taken_over >= 2


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--resume",), ("--replace",), ()], ids=" ".join)
@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_all_kills(format: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    kills, taken_over = sweep(tmp_path, format, 1, 1, *flags)
    assert kills > 80
    assert (taken_over > 20) == ("--resume" in flags)
