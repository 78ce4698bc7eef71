"""A checkpoint that appears complete under its name, or not at all.

    runs/step_10.tmp-3f9c0a1e/   written here     --commit: fsync all, rename, fsync runs/-->   runs/step_10/

A process killed half-way leaves the `.tmp-` directory, which `bridge.core.formats.open_checkpoint` refuses to open.
With `replace`, an existing `runs/step_10` remains unchanged until the commit, which exchanges the two directories
atomically. Then the old directory, now named `.tmp-`, is removed.

A checkpoint may also be one file. Then the commit moves the file `<payload>` and its manifest out of the directory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from bridge.core.formats.reading.regular_files import walk

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}$")
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def is_temporary(path: Path) -> bool:
    """Whether `path` is named like the working directory of an AtomicDirectory."""
    return _TEMPORARY.search(path.name) is not None


def temporaries_of(path: Path) -> list[Path]:
    """Working directories, of this process or others, that are to become `path`."""
    if not path.parent.is_dir():
        return []
    own = re.compile(re.escape(path.name) + _TEMPORARY.pattern)
    return sorted(p for p in path.parent.iterdir() if own.match(p.name))


@contextmanager
def on_failure(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` if the block raises anything, and raise it again."""
    try:
        yield
    except BaseException:
        undo()
        raise


class CommitOrAbort(ABC):
    """Something that appears whole on `commit()`, and never after `abort()`.

    As a context manager: commits on a clean exit unless it has ended already, aborts on an exception.
    """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it was committed or aborted."""

    @abstractmethod
    def commit(self) -> None:
        """Make it appear; on failure, leave nothing behind."""

    @abstractmethod
    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or abort."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort()
        elif not self.ended:
            self.commit()


class AtomicDirectory(CommitOrAbort):
    """Write into `temporary`, then `commit()` to make it `path`, or `abort()` to leave no trace.

    Missing parents of `path` are created (and removed again by abort). FileExistsError when `path` exists, at
    construction and again at commit, unless `replace`: then the old checkpoint stays until the commit. `resumed`: the
    working directory of an earlier attempt, to be continued. `keep`: whether abort leaves the working directory, to be
    resumed; a resumed directory is always kept. `payload`: the name, in `temporary`, of the one file that becomes
    `path`; `sidecar`: the name of the file that goes next to it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        resumed: Path | None = None,
        payload: str | None = None,
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self._replace = replace
        self.keep = resumed is not None
        self._payload = payload
        self.sidecar: str | None = None
        self._refuse_existing()
        self._new_parents = [p for p in self.path.parents if not p.exists()]
        existing = next(p for p in self.path.parents if p.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file: expected a directory, to hold {self.path}")
        self.temporary = resumed or self.path.with_name(f"{self.path.name}.tmp-{secrets.token_hex(4)}")
        self._open = True
        with on_failure(self.abort):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resumed is None:
                self.temporary.mkdir()

    @property
    def ended(self) -> bool:
        return not self._open

    def commit(self) -> None:
        """Sync every file and directory to disk and rename. On failure nothing is left behind."""
        if not self._open:
            raise ValueError(f"{self.path} was already committed or aborted")
        with on_failure(self.abort):
            # Before the rename: if the name reached the disk before the content, a power cut would leave a checkpoint
            # of zeros. Each directory is synced after its files, since its entries are content as well.
            for directory, _, files in walk(self.temporary):
                for name in files:
                    _fsync(os.path.join(directory, name))
                fsync_directory(directory)
            self._refuse_existing()
            self._appear()
        self._open = False
        # A rename is on disk once its directory is synced. Otherwise a power cut undoes the rename, and a caller that
        # has removed older steps has no step left.
        fsync_directory(self.path.parent)
        # Directories that were made for this checkpoint are entries in their own parents.
        for parent in self._new_parents:
            fsync_directory(parent.parent)
        if self._payload is None and self.temporary.is_file():
            # The directory replaced a checkpoint in one file: the manifest next to that file must go, too.
            remove(sidecar_of(self.path))
        # The working directory still exists if one file was moved out of it, or a replaced checkpoint into it.
        remove(self.temporary)

    def abort(self) -> None:
        """Remove the temporary directory, unless it is to be resumed. Does nothing after commit or abort."""
        if self._open:
            self._open = False
            if self.keep:
                return
            shutil.rmtree(self.temporary, ignore_errors=True)
            for parent in self._new_parents:
                if parent.exists() and not any(parent.iterdir()):
                    parent.rmdir()

    def _appear(self) -> None:
        if self._payload is not None:
            self._appear_as_file(self.temporary / self._payload)
        elif self._replace and os.path.lexists(self.path):
            exchange(self.temporary, self.path)
        else:
            try:
                os.rename(self.temporary, self.path)
            except OSError as error:
                # rename replaces an empty directory, and fails if anything else has the name.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise self._exists() from None

    def _appear_as_file(self, payload: Path) -> None:
        beside, aside = sidecar_of(self.path), self.temporary / "replaced"
        replaced = self._replace and os.path.lexists(self.path)
        had = os.path.lexists(beside)
        # No reader may find the manifest of one checkpoint next to the data of the other. So the old manifest is
        # removed first, and for a moment the old checkpoint has none.
        if had:
            os.rename(beside, aside)
        try:
            if replaced:
                os.replace(payload, self.path)
            if self.sidecar is not None:
                rename_new(self.temporary / self.sidecar, beside)
            if not replaced:
                rename_new(payload, self.path)
        except BaseException as error:
            if payload.exists():
                beside.unlink(missing_ok=True)
                if had:
                    os.rename(aside, beside)
            if isinstance(error, FileExistsError):
                raise self._exists() from None
            raise

    def _refuse_existing(self) -> None:
        # lexists: a dangling link occupies the name, too.
        if not self._replace and os.path.lexists(self.path):
            raise self._exists()
        if self._payload is not None and self.path.is_dir() and not self.path.is_symlink():
            raise IsADirectoryError(
                f"{self.path} is a directory, and one file cannot replace it: remove it first, or choose another name"
            )

    def _exists(self) -> FileExistsError:
        return FileExistsError(
            f"{self.path} exists already: remove it first, choose another name, or ask for it to be replaced"
        )


def exchange(new: Path, old: Path) -> None:
    """Exchange two names, atomically if the system can; otherwise the old name is missing for a moment."""
    # At every moment the name refers to a whole checkpoint, the old or the new one.
    if _renameat2(new, old, _RENAME_EXCHANGE):
        return
    aside = old.with_name(f"{old.name}.tmp-{secrets.token_hex(4)}")
    os.rename(old, aside)
    with on_failure(lambda: os.rename(aside, old)):
        os.rename(new, old)
    os.rename(aside, new)


def rename_new(source: Path, target: Path) -> None:
    """Give the file or directory the new name, atomically. FileExistsError if something has that name."""
    # A plain rename would replace a file that somebody else has created there since the check.
    if _renameat2(source, target, _RENAME_NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Rename with these flags; False if the system or file system does not support them. OSError if renaming failed."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))


def sidecar_of(path: Path) -> Path:
    """The place of the file that goes next to a checkpoint that is one file."""
    return path.with_name(f"{path.name}.manifest.json")


def remove(path: Path) -> None:
    """Remove a file, or a directory with its contents, as far as the system allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: str | Path) -> None:
    """Sync the entries of a directory to disk, if the file system can do that for this user."""
    try:
        _fsync(path)
    except OSError as error:
        # The directory is writable but not readable, or it is on a network file system without this operation.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def is_unfinished(path: Path) -> bool:
    """Whether the directory's name says that its writer never finished."""
    return ".orbax-checkpoint-tmp" in path.name or is_temporary(path)
