"""Arrays in memory as a checkpoint, so that mappings can translate weights without a file, and lazy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from bridge.core.formats.tensors.base import Box, TensorInfo, TreePath
from bridge.core.formats.tensors.wrapping import ComputedReader

Source = TypeVar("Source")


class LazyLeaves(Mapping[str, np.ndarray], Generic[Source]):
    """Arrays by name; ``make`` builds an array from its source at each access."""

    def __init__(self, sources: Mapping[str, Source], make: Callable[[Source], np.ndarray]) -> None:
        self._sources, self._make = sources, make

    def __getitem__(self, name: str) -> np.ndarray:
        return self._make(self._sources[name])

    def __contains__(self, name: object) -> bool:
        # ``Mapping`` would build the array to answer.
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def renamed(self, names: Mapping[str, str]) -> LazyLeaves[Source]:
        """The arrays of ``names``, under their new names."""
        sources = {names[name]: source for name, source in self._sources.items() if name in names}
        return LazyLeaves(sources, self._make)


class ArrayReader(ComputedReader):
    """A ``CheckpointReader`` over ``arrays`` by name. ``where`` replaces the path in errors."""

    def __init__(self, arrays: Mapping[str, np.ndarray], separator: str, where: str) -> None:
        self.format = "orbax" if separator == "/" else "dcp"
        self.path: Path | str = where
        self._arrays = arrays
        self.tensors = {}
        for name, array in arrays.items():
            path = tuple(name.split("/")) if separator == "/" else (name,)
            self.tensors[name] = TensorInfo(name, path, array.shape, array.dtype, (Box.whole(array.shape),))
        self.objects: Mapping[str, object] = {}
        self.object_paths: Mapping[str, TreePath] = {}

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        box = Box.whole(self.tensors[name].shape) if box is None else box
        return np.array(self._arrays[name][box.slices()], order="C")
