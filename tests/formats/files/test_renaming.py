"""Renames at once, where the system has renameat2, and one after the other where it has not."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.core.formats.files import atomic


def fails(code: int) -> SimpleNamespace:
    """A C library whose renameat2 sets this errno."""

    def renameat2(*arguments: object) -> int:
        ctypes.set_errno(code)
        return -1

    return SimpleNamespace(renameat2=renameat2)


@pytest.fixture(
    params=[None, SimpleNamespace(), fails(errno.ENOSYS), fails(errno.EINVAL), fails(errno.ENOTSUP)],
    ids=["has it", "has not", "kernel has not", "file system has not", "not supported"],
)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: request.param)


@pytest.mark.usefixtures("system")
def test_a_new_name_is_given_and_an_old_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    atomic.rename_new(tmp_path / "a", tmp_path / "b")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "a"}
    (tmp_path / "c").write_text("c")
    with pytest.raises(FileExistsError):
        atomic.rename_new(tmp_path / "c", tmp_path / "b")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b": "a", "c": "c"}


@pytest.mark.usefixtures("system")
def test_names_are_exchanged(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").mkdir()
    atomic.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "a"
    assert (tmp_path / "a").is_dir()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_rename_that_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: fails(errno.EACCES))
    (tmp_path / "a").write_text("a")
    with pytest.raises(PermissionError, match="b"):
        atomic.rename_new(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").exists()
