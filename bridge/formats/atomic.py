"""A directory that appears complete under its name, or not at all.

    runs/step_10.tmp-3f9c0a1e/   written here     --commit: fsync all, rename, fsync runs/-->   runs/step_10/

A process killed half-way leaves the `.tmp-` directory, which `bridge.formats.open_checkpoint` refuses to open.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}$")


def is_temporary(path: Path) -> bool:
    """Whether `path` is named like the working directory of an AtomicDirectory."""
    return _TEMPORARY.search(path.name) is not None


class CommitOrAbort(ABC):
    """What appears whole on `commit()`, and never after `abort()`.

    As a context manager: commits on a clean exit unless it has ended already, aborts on an exception.
    """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it was committed or aborted."""

    @abstractmethod
    def commit(self) -> None:
        """Let it appear; on failure nothing is left behind."""

    @abstractmethod
    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or abort."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
        elif not self.ended:
            self.commit()


class AtomicDirectory(CommitOrAbort):
    """Write into `temporary`, then `commit()` to make it `path`, or `abort()` to leave no trace.

    Missing parents of `path` are created (and removed again by abort). FileExistsError when `path` exists, at
    construction and again at commit.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._refuse_existing()
        self._new_parents = [p for p in self.path.parents if not p.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = self.path.with_name(f"{self.path.name}.tmp-{secrets.token_hex(4)}")
        self.temporary.mkdir()
        self._open = True

    @property
    def ended(self) -> bool:
        return not self._open

    def commit(self) -> None:
        """Sync every file and directory to disk and rename. On failure nothing is left behind."""
        if not self._open:
            raise ValueError(f"{self.path} was already committed or aborted")
        try:
            for directory, _, files in os.walk(self.temporary):
                for name in files:
                    _fsync(os.path.join(directory, name))
                _fsync(directory)
            self._refuse_existing()
            os.rename(self.temporary, self.path)
        except BaseException:
            self.abort()
            raise
        self._open = False
        _fsync(self.path.parent)
        for parent in self._new_parents:
            _fsync(parent.parent)

    def abort(self) -> None:
        """Remove the temporary directory. Does nothing after commit or abort."""
        if self._open:
            self._open = False
            shutil.rmtree(self.temporary, ignore_errors=True)
            for parent in self._new_parents:
                if parent.exists() and not any(parent.iterdir()):
                    parent.rmdir()

    def _refuse_existing(self) -> None:
        # lexists: a dangling symlink is something, too.
        if os.path.lexists(self.path):
            raise FileExistsError(
                f"expected no file or directory at {self.path}, found one: remove it first or choose another name"
            )


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
