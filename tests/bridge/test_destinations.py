"""A full disk, an unwritable place: the destination is absent or complete, the previous one intact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.destinations import FORMATS

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--mount", "--map-root-user"]

Found = dict[str, Any]


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Found]]:
    folder = tmp_path_factory.mktemp("destinations")
    mount, outside = folder / "mount", folder / "outside"
    mount.mkdir()
    outside.mkdir()
    try:
        possible = subprocess.run(
            [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(mount)], capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("mounting a small disk needs Linux's unshare")
    if possible.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {possible.stderr.decode().strip()}")
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.bridge.destinations", str(mount), str(outside)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return mount, json.loads(done.stdout)


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    happened: tuple[Path, dict[str, Found]], format: str
) -> None:
    mount, found = happened
    case = found[format]["too small"]
    assert (case["status"], case["there"], case["crashed"]) == (2, ["ballast"], None)
    (line,) = case["said"]
    assert f"bytes of free space for {mount}/out, found" in line


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_fills_up_leaves_nothing_and_the_old_checkpoint_as_it_was(
    happened: tuple[Path, dict[str, Found]], format: str
) -> None:
    mount, found = happened
    for name, there in (("vanished", ["ballast"]), ("replace", ["ballast", "out"])):
        case = found[format][name]
        assert (case["status"], case["there"], case["crashed"]) == (2, there, None)
        (line,) = case["said"]
        assert line.startswith("error: ")
        assert f"{mount}/out" in line
        assert "No space left on device" in line
    assert found[format]["old"] is not None
    assert found[format]["replace"]["digest"] == found[format]["old"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_resumed_conversion_takes_over_what_there_was_space_for(
    happened: tuple[Path, dict[str, Found]], format: str
) -> None:
    _, found = happened
    interrupted, resumed = found[format]["interrupted"], found[format]["resumed"]
    assert interrupted["status"] == 2
    assert interrupted["digest"] == found[format]["old"]
    assert [name.partition(".tmp-")[0] for name in interrupted["there"]] == ["ballast", "out", "out"]
    assert (resumed["status"], resumed["there"]) == (0, ["out"])
    assert json.loads(resumed["printed"])["resumed_bytes"] > 0
    assert resumed["digest"] == found[format]["new"] != found[format]["old"]


@pytest.mark.parametrize("format", FORMATS)
def test_places_that_cannot_be_written_to_are_named(
    happened: tuple[Path, dict[str, Found]], format: str
) -> None:
    mount, found = happened
    cases = found[format]["refused"]
    for name, line in (
        ("protected", f"error: '{mount}/private/out': Permission denied"),
        ("a file", f"error: expected a directory at {mount}/file, to hold {mount}/file/out, found a file"),
        ("read-only", f"error: '{mount}/out': Read-only file system"),
    ):
        assert (cases[name]["status"], cases[name]["said"]) == (2, [line])
    assert cases["protected"]["there"] == cases["there"] == []
