"""Temporary directories are locked by their process, and those of killed processes are removed by the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bridge.checkpoints.convert import convert
from bridge.checkpoints.verify import verify
from bridge.formats import open_checkpoint
from bridge.formats.stores.mirror import Mirror
from bridge.formats.stores.temporary import LOCK_FILE, TemporaryPlace
from bridge.formats.stores.upload import Upload
from tests.formats.stores.test_stores import ROOT, local_source

HOLD = """
import sys, time
from fsspec.implementations.local import LocalFileSystem
from bridge.checkpoints.convert import convert
src, dst, method, format = sys.argv[1:]
original = getattr(LocalFileSystem, method)
def held(self, *args, **kwargs):
    if not str(args[0]).endswith((".json", "METADATA", ".metadata", "_sharding", "manifest.ocdbt", ".txt")):
        print("there", flush=True)
        time.sleep(600)
    return original(self, *args, **kwargs)
setattr(LocalFileSystem, method, held)
convert(src, dst, to=format)
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def held(source: str, out: str, method: str, temporary: Path, format: str = "dcp") -> subprocess.Popen[str]:
    """A conversion that stands still at its first data: it reads them (cat_file) or sends them (put_file)."""
    command = [sys.executable, "-c", HOLD, source, out, method, format]
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


@pytest.mark.parametrize("method", ["cat_file", "put_file"])
def test_what_a_killed_conversion_leaves_is_removed_by_the_next(
    tmp_path: Path, temporary: Path, method: str
) -> None:
    local = local_source(tmp_path, "orbax")
    url, out = f"file://{local}", f"file://{tmp_path}/there/out"
    process = held(url if method == "cat_file" else str(local), out, method, temporary)
    try:
        left = set(temporary.iterdir())
        assert left
        # It lives: nothing of it may be touched.
        with open_checkpoint(url):
            assert set(temporary.iterdir()) > left
        assert set(temporary.iterdir()) == left
    finally:
        process.kill()
        process.wait()
    assert set(temporary.iterdir()) == left
    if method == "cat_file":
        with open_checkpoint(url):
            assert left.isdisjoint(temporary.iterdir())
    else:
        convert(local, f"file://{tmp_path}/elsewhere/out", to="dcp")
    assert not any(temporary.iterdir())


def test_only_what_is_ours_and_abandoned_is_removed(tmp_path: Path, temporary: Path) -> None:
    local = local_source(tmp_path, "dcp")
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
    with Mirror(f"file://{local}"):
        pass
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


def test_a_mirror_of_a_checkpoint_is_whole_beside_its_lock(tmp_path: Path) -> None:
    local = local_source(tmp_path, "safetensors")
    with Mirror(f"file://{local}") as mirror:
        mirror.fetch_all()
        assert verify(mirror.path).good
