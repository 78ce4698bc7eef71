"""A checkpoint reader over arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bridge.core.formats.tensors.base import Box, TensorInfo, TreePath, Wanted


class MemoryReader:
    """A ``CheckpointReader``. ``largest_read`` is the number of elements of the largest region read so far."""

    def __init__(
        self,
        format: str,
        arrays: Mapping[str, np.ndarray],
        objects: Mapping[TreePath, object] | None = None,
    ) -> None:
        self.format = format
        self.path = Path("memory")
        self.arrays = dict(arrays)
        separator = "." if format == "dcp" else "/"
        self.tensors = {
            name: TensorInfo(name, _path(name, format), array.shape, array.dtype, (Box.whole(array.shape),))
            for name, array in arrays.items()
        }
        self.object_paths = {separator.join(map(str, path)): path for path in objects or {}}
        self.objects = {separator.join(map(str, path)): value for path, value in (objects or {}).items()}
        self.largest_read = 0
        self.reads = 0

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        box = Box.whole(self.tensors[name].shape) if box is None else box
        assert box.inside(self.tensors[name].shape)
        self.largest_read = max(self.largest_read, box.numel)
        self.reads += 1
        return np.array(self.arrays[name][box.slices()], order="C")

    def lend(self, name: str, box: Box, offset: int = 0) -> None:
        return None

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[None]:
        return [None] * len(wanted)

    def files(self) -> list[Path]:
        return []

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _path(name: str, format: str) -> TreePath:
    if format == "orbax":
        return tuple(name.split("/"))
    if name.startswith("model."):
        return ("model", name.removeprefix("model."))
    if name.startswith("optimizer.state."):
        weight, entry = name.removeprefix("optimizer.state.").rsplit(".", 1)
        return ("optimizer", "state", weight, entry)
    return tuple(name.split("."))
