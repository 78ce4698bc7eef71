"""A checkpoint reader over arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bridge.core.formats.tensors.base import Box, TreePath
from bridge.parity.partners.lazy_arrays import ArrayReader


class MemoryReader(ArrayReader):
    """A reader of ``format``. ``largest_read`` is the number of elements of the largest region read so far."""

    def __init__(
        self,
        format: str,
        arrays: Mapping[str, np.ndarray],
        objects: Mapping[TreePath, object] | None = None,
    ) -> None:
        separator = "." if format == "dcp" else "/"
        self.arrays = dict(arrays)
        super().__init__(self.arrays, separator, "memory")
        self.format = format
        self.tensors = {name: replace(info, path=_path(name, format)) for name, info in self.tensors.items()}
        self.object_paths = {separator.join(map(str, path)): path for path in objects or {}}
        self.objects = {separator.join(map(str, path)): value for path, value in (objects or {}).items()}
        self.largest_read = 0
        self.reads = 0

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        box = Box.whole(self.tensors[name].shape) if box is None else box
        assert box.inside(self.tensors[name].shape)
        self.largest_read = max(self.largest_read, box.numel)
        self.reads += 1
        return super().read(name, box)


def _path(name: str, format: str) -> TreePath:
    if format == "orbax":
        return tuple(name.split("/"))
    if name.startswith("model."):
        return ("model", name.removeprefix("model."))
    if name.startswith("optimizer.state."):
        weight, entry = name.removeprefix("optimizer.state.").rsplit(".", 1)
        return ("optimizer", "state", weight, entry)
    return tuple(name.split("."))
