"""Chunks of tensors, assembled from boxes as the boxes arrive, on several processes if necessary.

::

    boxes of this process    [....a....|..b..]  [...c...|.d.]        e, on another process
    chunks of the file       |     a     | b + c        | d + e      |
                                                          ^ spilled

If a chunk stays incomplete on this process, or for too long, its boxes are spilled to files in the temporary directory
of the checkpoint. When all processes have finished, the process that had most of such a chunk assembles and writes it.
So memory is bounded for any order of boxes, and each chunk has one writer.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bridge.core.formats import Box, CheckpointError
from bridge.core.formats.orbax.writer import OrbaxPart
from bridge.core.formats.tensors.base import TensorInfo

# Limit in bytes for boxes that wait in memory for the rest of their chunks.
_HELD = 64 << 20
# A tensor's name, and the index of a chunk in ``TensorInfo.chunks``.
_Chunk = tuple[str, int]


class _Part(NamedTuple):
    """A box in the file of ``process``, at byte ``position``."""

    process: int
    name: str
    number: int
    offsets: Sequence[int]
    sizes: Sequence[int]
    position: int

    @property
    def box(self) -> Box:
        return Box(tuple(self.offsets), tuple(self.sizes))


class Chunks:
    """The tensors whose boxes ``process`` writes. ``directory``: for spilled boxes, created when needed."""

    def __init__(self, writer: OrbaxPart, directory: Path, process: int) -> None:
        self._writer = writer
        self._directory = directory
        self._process = process
        self._infos: dict[str, TensorInfo] = {}
        self._waiting: defaultdict[_Chunk, list[tuple[Box, np.ndarray]]] = defaultdict(list)
        self._waiting_bytes = 0
        self._spilled: list[_Part] = []

    def add_tensor(self, info: TensorInfo) -> None:
        self._infos[info.name] = info

    def add(self, name: str, box: Box, values: np.ndarray) -> None:
        """Write the chunks that the box completes. ``values`` may be changed afterwards."""
        info = self._infos[name]
        for number in _overlapping(info, box):
            chunk = info.chunks[number]
            part = chunk.intersect(box)
            if part == chunk:
                self._writer.write(name, chunk, values[part.slices(box)])
            elif part is not None:
                self._add_part((name, number), chunk, part, values[part.slices(box)])

    def _add_part(self, key: _Chunk, chunk: Box, part: Box, values: np.ndarray) -> None:
        parts = self._waiting[key]
        parts.append((part, values.copy()))
        self._waiting_bytes += values.nbytes
        if sum(box.numel for box, _ in parts) == chunk.numel:
            self._waiting_bytes -= sum(held.nbytes for _, held in parts)
            del self._waiting[key]
            self._writer.write(key[0], chunk, _together(chunk, values.dtype, _emptied(parts)))
        elif self._waiting_bytes > _HELD:
            self._spill()

    def finish(self) -> None:
        """Spill the boxes that still wait; no boxes may be added after this."""
        self._spill()
        if self._spilled:
            (self._directory / f"{self._process}.json").write_text(json.dumps(self._spilled))

    def write_spilled(self, processes: Sequence[int]) -> None:
        """After ``finish`` on all ``processes``: assemble and write the chunks that this process is responsible for.

        Raises ``CheckpointError`` for a chunk with elements that no process had.
        """
        shared: defaultdict[_Chunk, list[_Part]] = defaultdict(list)
        for process in processes:
            index = self._directory / f"{process}.json"
            for entry in json.loads(index.read_text()) if index.exists() else ():
                part = _Part(*entry)
                shared[part.name, part.number].append(part)
        for (name, number), parts in shared.items():
            if _writer_of(parts) == self._process:
                chunk = self._infos[name].chunks[number]
                elements = sum(part.box.numel for part in parts)
                if elements != chunk.numel:
                    raise CheckpointError(
                        f"tensor {name!r}: expected all {chunk.numel} elements of {chunk} on processes "
                        f"{list(processes)}, got {elements}"
                    )
                boxes = ((part.box, self._read(part)) for part in parts)
                self._writer.write(name, chunk, _together(chunk, self._infos[name].dtype, boxes))

    def _spill(self) -> None:
        if not self._waiting:
            return
        self._directory.mkdir(exist_ok=True)
        with open(self._directory / f"{self._process}.data", "ab") as file:
            for (name, number), parts in self._waiting.items():
                for box, values in parts:
                    position = file.tell()
                    self._spilled.append(_Part(self._process, name, number, box.offsets, box.sizes, position))
                    file.write(values.tobytes())
        self._waiting.clear()
        self._waiting_bytes = 0

    def _read(self, part: _Part) -> np.ndarray:
        dtype = self._infos[part.name].dtype
        with open(self._directory / f"{part.process}.data", "rb") as file:
            file.seek(part.position)
            data = file.read(part.box.numel * dtype.itemsize)
        return np.frombuffer(data, np.uint8).view(dtype).reshape(part.box.sizes)


def _together(chunk: Box, dtype: np.dtype, parts: Iterable[tuple[Box, np.ndarray]]) -> np.ndarray:
    whole = np.empty(chunk.sizes, dtype)
    for box, values in parts:
        whole[box.slices(chunk)] = values
    return whole


def _emptied(parts: list[tuple[Box, np.ndarray]]) -> Iterator[tuple[Box, np.ndarray]]:
    """Free each part after its use, so that a chunk is not in memory twice."""
    while parts:
        yield parts.pop()


def _writer_of(parts: Sequence[_Part]) -> int:
    """The process with the most elements; among equals, the first."""
    held: Counter[int] = Counter()
    for part in sorted(parts, key=lambda part: part.process):
        held[part.process] += part.box.numel
    return max(held, key=lambda process: held[process])


def _overlapping(info: TensorInfo, box: Box) -> Iterator[int]:
    """Indices of the chunks that share elements with the box."""
    if not box.numel:
        return
    grid = info.chunks[0].sizes
    counts = [-(-size // step) for size, step in zip(info.shape, grid, strict=True)]
    strides = [math.prod(counts[axis + 1 :]) for axis in range(len(counts))]
    ranges = [
        range(low // step, -(-stop // step))
        for low, stop, step in zip(box.offsets, box.stops, grid, strict=True)
    ]
    for index in itertools.product(*ranges):
        yield sum(i * stride for i, stride in zip(index, strides, strict=True))
