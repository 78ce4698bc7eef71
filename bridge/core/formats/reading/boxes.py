"""Which chunks and how much memory a box of a tensor needs."""

from __future__ import annotations

import numpy as np

from bridge.core.formats.reading.read_memory import memory_for
from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo


class ChunkIndex:
    """Which chunks of a tensor a box touches, by array arithmetic: there may be 100,000 of them."""

    def __init__(self) -> None:
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def touching(self, info: TensorInfo, box: Box) -> list[int]:
        """Positions in `info.chunks` of those that share elements with the box."""
        if not box.numel or len(info.chunks) == 1:
            return list(range(len(info.chunks))) if box.numel else []
        if info.name not in self._bounds:
            starts = np.array([c.offsets for c in info.chunks], np.int64).T.copy()
            sizes = np.array([c.sizes for c in info.chunks], np.int64).T
            self._bounds[info.name] = (starts, starts + sizes)
        hits = np.ones(len(info.chunks), np.bool_)
        for start, stop, low, high in zip(*self._bounds[info.name], box.offsets, box.stops, strict=True):
            hits &= (start < high) & (stop > low)
        return [int(index) for index in np.flatnonzero(hits)]


def box_of(info: TensorInfo, box: Box | None) -> Box:
    """The box to be read, all of the tensor if None. ValueError when it is not inside."""
    if box is None:
        return Box.whole(info.shape)
    if not box.inside(info.shape):
        raise ValueError(f"tensor {info.name!r}: expected a box inside shape {info.shape}, got {box}")
    return box


def array_for(info: TensorInfo, box: Box, what: object) -> np.ndarray:
    """Memory for a box of a tensor. CheckpointError, beginning with `what`, when there is not enough."""
    try:
        nbytes = box.numel * info.dtype.itemsize
        return memory_for(nbytes).view(info.dtype).reshape(box.sizes)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(
            f"{what}: no memory for {box.numel} elements of tensor {info.name!r}, shape {info.shape}: {error}"
        ) from error
