"""Temporary directories are locked by their process, and those of killed processes are removed by the next one."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from bridge.formats.stores.temporary import LOCK_FILE, TemporaryPlace
from bridge.formats.stores.upload import Upload


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_only_what_is_ours_and_abandoned_is_removed(tmp_path: Path, temporary: Path) -> None:
    old, recent = temporary / "twinshard-mirror-aaaaaaaa", temporary / "twinshard-upload-bbbbbbbb"
    others = [
        temporary / "twinshard-mirror-other",
        temporary / f"twinshard-upload-{os.getuid()}-0123456789abcdef",
        temporary / "twinshard-parity-cccccccc",
    ]
    for directory in (old, recent, *others):
        (directory / "step_1").mkdir(parents=True)
    (temporary / "twinshard-mirror-dddddddd").symlink_to(others[0])
    (others[0] / LOCK_FILE).touch()
    hour = time.time() - 3700
    for directory in (old, *others):
        os.utime(directory, (hour, hour))
    TemporaryPlace("upload").close()
    kept = {path.name for path in (recent, *others)} | {"twinshard-mirror-dddddddd"}
    assert {path.name for path in temporary.iterdir()} == kept
    with Upload(f"file://{tmp_path}/there/out"):
        pass
    assert {path.name for path in temporary.iterdir()} == kept


def test_a_place_that_is_swept_while_it_is_made_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making the lock and taking it, another process may take it."""
    from bridge.formats.stores import temporary as module

    lock, rivals = module.locked, []

    def contended(descriptor: int) -> bool:
        if not rivals:
            (directory,) = temporary.iterdir()
            rivals.append(os.open(directory / LOCK_FILE, os.O_RDWR))
            assert lock(rivals[0])
        return lock(descriptor)

    monkeypatch.setattr(module, "locked", contended)
    place = TemporaryPlace("mirror")
    assert (place.path / LOCK_FILE).exists()
    os.close(rivals[0])
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # The first one is abandoned now.
    TemporaryPlace("mirror").close()
    assert [path.name for path in temporary.iterdir()] == [place.path.name]
    place.close()
    assert not any(temporary.iterdir())
