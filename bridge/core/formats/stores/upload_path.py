"""Paths of a checkpoint that is uploaded to a store, for writers that use `pathlib.Path`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any, Protocol, Self

from bridge.core.formats.stores.remote_path import RemotePath
from bridge.core.formats.stores.upload import UploadFile


class Folder(Protocol):
    """The files behind the paths. small: files in memory, by name; data: files that are sent while they are written."""

    url: str
    small: dict[str, bytes]
    data: dict[str, UploadFile]
    recalled: dict[tuple[str, int], int]
    earlier_names: list[str]

    def open_data(self, name: str) -> UploadFile:
        """A data file, by its path in the checkpoint."""


class UploadPath(RemotePath[Folder]):
    """A file or directory of an uploaded checkpoint; has only the parts of `pathlib.Path` that writers use."""

    def __truediv__(self, other: str | os.PathLike[str]) -> Self:
        names = str(other).split("/") if str(other) else []
        return type(self)(self.store, (*self._path, *names))

    def __str__(self) -> str:
        return "/".join((self.store.url, *self._path))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UploadPath) and str(self) == str(other)

    @property
    def relative(self) -> str:
        """The path relative to the checkpoint."""
        return "/".join(self._path)

    @property
    def name(self) -> str:
        return self._path[-1] if self._path else self.store.url.rpartition("/")[2]

    def relative_to(self, *_: Any, **__: Any) -> UploadPath:
        return _Relative(self.store, self._path)

    def open_data(self) -> UploadFile:
        """The data file of this name."""
        return self.store.open_data(self.relative)

    def exists(self, **_: object) -> bool:
        return self.is_file()

    def is_file(self, **_: object) -> bool:
        return self.relative in self.store.small or self.relative in self.store.data

    def is_dir(self, **_: object) -> bool:
        return not self.is_file()

    def mkdir(self, *_: object, **__: object) -> None:
        """Does nothing: a store has no directories."""

    def stat(self, **_: object) -> os.stat_result:
        data = self.store.data.get(self.relative)
        size = len(self.store.small[self.relative]) if data is None else data.size
        return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, size, 0, 0, 0))

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes written around chunks; see `UploadFile.read`."""
        return self.store.data[self.relative].read(start, stop - start)

    def read_bytes(self) -> bytes:
        return self.store.small[self.relative]

    def write_bytes(self, data: Any) -> int:
        self.store.small[self.relative] = bytes(data)
        return len(data)

    def write_text(self, data: str, *_: object, **__: object) -> int:
        return self.write_bytes(data.encode())

    def touch(self, *_: object, **__: object) -> None:
        self.write_bytes(b"")

    def unlink(self, missing_ok: bool = False) -> None:
        self.store.small.pop(self.relative, None)

    def iterdir(self) -> Iterator[Self]:  # type: ignore[override] # an iterator, as pathlib's before Python 3.13
        """Files directly in a directory, including files of a resumed attempt."""
        names = dict.fromkeys((*self.store.small, *self.store.data, *self.store.earlier_names))
        start = f"{self.relative}/" if self._path else ""
        below = [name.removeprefix(start) for name in names if name.startswith(start)]
        return (self / name for name in below if "/" not in name)

    def rglob(self, *_: object, **__: object) -> Iterator[Self]:  # type: ignore[override] # as iterdir
        """All files."""
        return (
            type(self)(self.store, tuple(name.split("/"))) for name in (*self.store.small, *self.store.data)
        )


class _Relative(UploadPath):
    def __str__(self) -> str:
        return self.relative

    @property
    def parts(self) -> tuple[str, ...]:
        return self._path
