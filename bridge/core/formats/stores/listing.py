"""The files of a checkpoint in an object store, as paths: names and sizes from one listing, bytes from ranged reads.

    s3://bucket/runs/step_40         StorePath, a directory of the listing
    s3://bucket/runs/step_40/d/3f2a  StorePath, a file of it

Format readers use such a path like a path on this machine: they use its name, parent, children and size, and the bytes
of small files. `StoredReader` is the checkpoint, opened by its format's reader. Only `FileRanges` sends requests.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import stat_result
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from bridge.core.formats.stores.ranges import FileRanges
from bridge.core.formats.stores.store import FileSystem, open_store, store_errors, without_end
from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader
from bridge.core.formats.tensors.wrapping import WrappingReader

_INDEX_SUFFIX: Final = ".index.json"
_MAX_METADATA: Final = 1 << 30
_OF_EACH: Final = ("zarr.json", ".zarray", ".metadata", "process_0")
"""Suffixes of files that a checkpoint may have many of, one for each array or process."""

Store = TypeVar("Store")

if TYPE_CHECKING:
    # Readers and writers accept either; at run time, a call that would access this machine's files must find nothing.
    _Path = Path
else:
    _Path = object


class RemotePath(Generic[Store], _Path):
    """The common part of paths that are read and paths that are written. store: has the files behind the paths."""

    def __new__(cls, store: Store, parts: tuple[str, ...]) -> Self:
        return object.__new__(cls)

    def __init__(self, store: Store, parts: tuple[str, ...]) -> None:
        self.store, self._path = store, parts

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in an object store: expected a path on this machine")

    def __hash__(self) -> int:
        return hash(self._path)

    def __lt__(self, other: RemotePath[Store]) -> bool:  # type: ignore[override] # sorted among its siblings only
        return self._path < other._path

    @property
    def parent(self) -> Self:
        return type(self)(self.store, self._path[:-1])

    def open(self, *_: object, **__: object) -> Any:
        """The whole file for reading."""
        return io.BytesIO(self.read_bytes())


class Listing:
    """The files at a URL, by name and size. `root` is the checkpoint; `ranges` gives bytes of files.

    FileNotFoundError if nothing is there; CheckpointError for names that lead out of the directory, or that cannot
    exist next to each other; OSError if the store refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = without_end(url)
        system, root = open_store(url)
        infos, home = self._list(system, root)
        self.fingerprint = hashlib.sha256(
            repr(sorted((name, _version(info)) for name, info in infos.items())).encode()
        ).hexdigest()[:16]
        # The root's own name is a part of all paths, so that files next to a single file are its siblings.
        name = root.rpartition("/")[2]
        above = () if root in infos else (name,)
        self._above_url = self.url.rpartition("/")[0] if name else self.url
        self.files: dict[tuple[str, ...], str] = {}
        self.sizes: dict[tuple[str, ...], int] = {}
        self.children: dict[tuple[str, ...], set[str]] = {(): set()}
        for stored, info in infos.items():
            parts = (*above, *self._parts(stored, home))
            self.files[parts], self.sizes[parts] = stored, info["size"]
            for end in range(len(parts)):
                self.children.setdefault(parts[:end], set()).add(parts[end])
        for parts in self.files:
            if parts in self.children:
                raise CheckpointError(
                    f"{self.url}: expected files and directories of different names, found {parts[-1][:200]!r} as both"
                )
        self.ranges = FileRanges(system, {self.files[p]: self.sizes[p] for p in self.files}, self._named())
        self.root = StorePath(self, (name,))

    def close(self) -> None:
        """Drop the fetched data."""
        self.ranges.close()

    def text(self, parts: tuple[str, ...]) -> str:
        """The URL of a path."""
        return "/".join((self._above_url, *parts))

    def small_beside(self, parts: tuple[str, ...]) -> list[str]:
        """Store names of the small files that will be read together with this one, so that all are fetched at once."""
        end = next((end for end in _OF_EACH if parts[-1].endswith(end)), None)
        alike = () if end is None else (p for p in self.files if p[-1].endswith(end))
        return [self.files[p] for p in alike if self.sizes[p] <= self.ranges.block]

    def _named(self) -> Mapping[str, str]:
        return {stored: self.text(parts) for parts, stored in self.files.items()}

    def _list(self, system: FileSystem, root: str) -> tuple[Mapping[str, Mapping[str, Any]], str]:
        """Files by their name in the store, and the store directory above them."""
        parent = root.rpartition("/")[0]
        infos: dict[str, Mapping[str, Any]] = {}
        refused = ""
        with store_errors(f"cannot list {self.url}"):
            # The file system's cached listing lacks what another process has written meanwhile.
            system.invalidate_cache()
            try:
                infos = dict(system.find(root, detail=True))
            except FileNotFoundError as error:
                # The bucket or repository does not exist: a missing directory gives an empty listing.
                refused = str(error).partition("\n")[0].rstrip(".")
            if root.endswith(_INDEX_SUFFIX):
                # An index lists files next to it.
                infos |= system.find(parent, maxdepth=1, detail=True)
            elif set(infos) == {root}:
                for beside in (f"{root}.manifest.json", f"{parent}/config.json"):
                    with suppress(FileNotFoundError):
                        infos[beside] = system.info(beside)
        files = {n: i for n, i in infos.items() if i["type"] == "file" and not n.endswith("/")}
        if not files:
            raise FileNotFoundError(
                f"{self.url} does not exist: expected a checkpoint there{f'; {refused}' if refused else ''}"
            )
        for name, info in files.items():
            size = info.get("size")
            if not isinstance(size, int) or not 0 <= size < 1 << 46:
                raise CheckpointError(
                    f"{self.url}: expected a store that tells the size of {name!r:.200}, got {size!r:.40}"
                )
        return files, parent if root in files else root

    def _parts(self, name: str, home: str) -> tuple[str, ...]:
        parts = tuple(name[len(home) :].removeprefix("/").split("/"))
        if any(part in ("", ".", "..") for part in parts) or "\0" in name:
            raise CheckpointError(f"{self.url}: expected names of files below it, got {name[:200]!r}")
        return parts


def _version(info: Mapping[str, Any]) -> str:
    return repr([(key, str(info[key])) for key in sorted(info) if key not in ("atime", "name")])


class StorePath(RemotePath[Listing]):
    """A file or directory of a listing; has only the parts of `pathlib.Path` that readers use."""

    def __truediv__(self, other: str | os.PathLike[str]) -> Self:
        return type(self)(self.store, (*self._path, *str(other).split("/")))

    def __str__(self) -> str:
        return self.store.text(self._path)

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and (self.store, self._path) == (other.store, other._path)

    @property
    def name(self) -> str:
        return self._path[-1] if self._path else ""

    @property
    def parents(self) -> tuple[Self, ...]:
        return tuple(type(self)(self.store, self._path[:end]) for end in reversed(range(len(self._path))))

    def with_name(self, name: str) -> Self:
        return type(self)(self.store, (*self._path[:-1], name))

    def is_relative_to(self, other: object, *_: object) -> bool:
        return isinstance(other, StorePath) and self._path[: len(other._path)] == other._path

    def is_file(self, **_: object) -> bool:
        return self._path in self.store.sizes

    def is_dir(self, **_: object) -> bool:
        return self._path in self.store.children

    def exists(self, **_: object) -> bool:
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def resolve(self, strict: bool = False) -> Self:
        if strict:
            self.stat()
        return self

    def stat(self, **_: object) -> stat_result:
        """Kind and size, and a number that identifies the file."""
        if not self.exists():
            raise FileNotFoundError(f"{self} does not exist")
        mode = stat.S_IFREG if self.is_file() else stat.S_IFDIR
        return stat_result((mode, hash(self._path), 0, 1, 0, 0, self.store.sizes.get(self._path, 0), 0, 0, 0))

    def iterdir(self) -> Iterator[Self]:  # type: ignore[override] # an iterator, as pathlib's before Python 3.13
        if not self.is_dir():
            raise NotADirectoryError(f"{self} is not a directory")
        return (self / name for name in sorted(self.store.children[self._path]))

    def glob(self, pattern: str, **options: object) -> Iterator[Self]:  # type: ignore[override] # as iterdir
        """Paths below this one that match a pattern of names, directory by directory."""
        first, _, rest = pattern.partition("/")
        for child in self.iterdir() if self.is_dir() else ():
            if fnmatch.fnmatchcase(child.name, first):
                if rest:
                    yield from child.glob(rest)
                else:
                    yield child

    def files(self) -> list[Self]:
        """All files below, at any depth."""
        below = (parts for parts in self.store.files if parts[: len(self._path)] == self._path)
        return [type(self)(self.store, parts) for parts in below]

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop). OSError if the store does not provide them."""
        target = bytearray(stop - start)
        self.store.ranges.read_into(self._stored(), start, memoryview(target))
        return bytes(target)

    def fill(self, start: int, target: memoryview) -> None:
        """Write the bytes from `start` on into memory. OSError if the store does not provide them."""
        self.store.ranges.read_into(self._stored(), start, target)

    def read_bytes(self) -> bytes:
        """The whole content of a small file, which is cached, together with other files of its kind."""
        stored = self._stored()
        size = self.store.sizes[self._path]
        if size > _MAX_METADATA:
            raise CheckpointError(f"{self}: expected metadata of at most {_MAX_METADATA} bytes, got {size}")
        return self.store.ranges.small(stored, self.store.small_beside(self._path))

    def _stored(self) -> str:
        if not self.is_file():
            raise FileNotFoundError(f"{self} does not exist: expected a file of the checkpoint")
        return self.store.files[self._path]


class StoredReader(WrappingReader):
    """The checkpoint at `url`; see `CheckpointReader`. `open_path` opens it. OSError when the store fails."""

    def __init__(self, url: str, open_path: Callable[[StorePath], CheckpointReader]) -> None:
        self._listing = Listing(url)
        try:
            super().__init__(open_path(self._listing.root))
        except BaseException:
            self._listing.close()
            raise
        self.path: str = self._listing.url

    @property
    def fingerprint(self) -> str:
        """A digest of the files' names, sizes and versions in the store."""
        return self._listing.fingerprint

    @property
    def opened(self) -> CheckpointReader:
        """The format's reader, with a path in the store; for one item or folder, the place of that."""
        return self._reader

    def files(self) -> Sequence[Path]:
        """None: they are in the store."""
        return ()

    def close(self) -> None:
        """Drop the fetched data. Arrays already read stay valid."""
        super().close()
        self._listing.close()
