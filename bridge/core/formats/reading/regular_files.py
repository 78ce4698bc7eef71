"""Which files of a checkpoint may be read, small ones read whole, and whether a file changed while it was read."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.tensors.base import CheckpointError

MAX_SMALL_FILE = 256 << 20
"""The most bytes of a file that is read whole: metadata and the like, not data."""

_LFS_POINTER = b"version https://git-lfs"

_SNAPSHOTS = "snapshots"
_BLOBS = "blobs"

_STORED = re.compile(
    r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$"
    r"|/\.dvc/cache/[0-9a-f]{2}/[0-9a-f]{30}$"
    r"|/annex/objects/[0-9A-Za-z]{2,3}/[0-9A-Za-z]{2,3}/(?P<key>[A-Z0-9_]+-s\d+-[^/]+)/(?P=key)$"
)
"""Where DVC and git-annex (and so DataLad) store the files that a working tree links to. The Hub's cache stores them in
`blobs`, next to the links in `snapshots/<revision>`."""


def is_kept_by_content(target: Path) -> bool:
    """Whether this path is in a store that names files after their content; see `_STORED`."""
    return _STORED.search(str(target)) is not None


def is_plain_name(name: object) -> bool:
    """Whether this names a file directly in a directory: anything else could lead out of it."""
    return (
        isinstance(name, str)
        and 0 < len(name) < 256
        and name not in (".", "..")
        and not re.search(r"[/\\\0]", name)
    )


def regular_file(
    directory: Path, name: str, what: str, *, most: int | None = None, links: bool = False
) -> tuple[Path, int]:
    """A file of a checkpoint's directory and its size in bytes.

    CheckpointError, beginning with `what`, if it is missing, is not a regular file, or is a link out of the directory;
    and CheckpointError, beginning with its path, if it has more than `most` bytes.
    With `links`, all links are allowed. Links into stores whose files are named after their content (`_STORED`) are
    always allowed: no other file of the system has such a name.
    """
    file = directory / name
    try:
        home, target = directory.resolve(strict=True), file.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError, ValueError) as error:
        absent = file.is_symlink() and isinstance(error, FileNotFoundError)
        why = (
            "a link to a file that is missing: fetch it (dvc pull, git annex get)"
            if absent
            else "which cannot be read"
        )
        raise CheckpointError(f"{what} is stored in {file}, {why}: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{what} is stored in {file}, which is not a regular file")
    blobs = home.parent.parent / _BLOBS
    if (
        not links
        and target.parent != home
        and not (home.parent.name == _SNAPSHOTS and target.parent == blobs)
        and not is_kept_by_content(target)
    ):
        raise CheckpointError(
            f"{what} is stored in {file}, a link to {target}: expected a file in the checkpoint's directory"
        )
    if most is not None and status.st_size > most:
        raise CheckpointError(f"{file}: expected at most {most} bytes, got {status.st_size}")
    return file, status.st_size


def small_file(
    directory: Path, name: str, what: str, *, most: int = MAX_SMALL_FILE, links: bool = False
) -> bytes:
    """The content of a file that is read whole; see `regular_file`. CheckpointError for one above `most` bytes, too."""
    file, _ = regular_file(directory, name, what, most=most, links=links)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    require_content(data, file)
    return data


def once_each(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these entries, for JSON; ValueError for a key that is given twice."""
    entries = dict(items)
    if len(entries) != len(items):
        raise ValueError("expected each key once, got one twice")
    return entries


def require_content(start: bytes, file: object) -> None:
    """CheckpointError if a file is a Git LFS pointer, which a clone has in place of a file that was not fetched."""
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{file}: expected the file, found a pointer of Git LFS in place of it: fetch it (git lfs pull)"
        )


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor to read from. OSError unless it is a regular file: opening a named pipe would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def files_below(directory: Path) -> list[Path]:
    """All files in a directory and below it, without following links to directories. OSError if one cannot be read."""
    if isinstance(directory, StorePath):
        return list(directory.files())
    paths = [Path(folder, name) for folder, _, names in walk(directory) for name in names]
    return [path for path in paths if path.is_file()]


def walk(directory: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like `os.walk`, but with an OSError for folders that cannot be listed, which `os.walk` skips."""

    def fail(error: OSError) -> NoReturn:
        raise error

    return os.walk(directory, onerror=fail)


class Stamp(NamedTuple):
    """Evidence that a file has not changed: its size in bytes, and its last modification time in nanoseconds."""

    size: int
    written: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns)


def stamps(files: Iterable[Path]) -> Mapping[Path, Stamp]:
    """The stamps of the files that exist on this machine."""
    by_file = {}
    for file in files:
        with suppress(OSError):
            if not isinstance(file, StorePath):
                by_file[file] = Stamp.of(file.stat())
    return by_file


def digest_of(files: Iterable[Path]) -> str:
    """A digest of files by name, size and time, so that a changed checkpoint is not mixed with its past."""
    digest = hashlib.sha256()
    for path in sorted(files):
        status = path.stat()
        digest.update(os.fsencode(path) + f" {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def changed(before: Mapping[Path, Stamp]) -> Iterator[tuple[Path, str]]:
    """Files that do not match their stamps, with a sentence about each."""
    for file, stamp in before.items():
        try:
            now = Stamp.of(file.stat())
        except OSError as error:
            yield file, f"{file} no longer exists: {error.strerror}"
            continue
        if now != stamp:
            yield file, change(file, stamp, now)


def change(path: object, before: Stamp, now: Stamp) -> str:
    sizes = (
        f"it had {before.size} bytes, and now has {now.size}"
        if before.size != now.size
        else "it was written to"
    )
    return f"{path} was changed while it was read: {sizes}; try again when nothing writes to the checkpoint"
