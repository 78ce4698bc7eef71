"""Paths in an object store, with only the parts of `pathlib.Path` that readers or writers use."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

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
