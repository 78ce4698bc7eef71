"""Additional arrays of an optimizer's state if moments have one scale per row.

Parameters whose rows have several elements are *scaled*; the others (vectors, scalars) keep float32 moments. A flat
group then has up to three arrays for each moment, all cut over devices like the weights::

    rank                              |------- 0 -------|------- 1 -------|
    weights                           |a0a0a0a1a1a1b.b.b|b.b.c0c0c0c1c1c1.|      a, c: scaled, b: a vector
    "layers/0 (scaled)"   low prec.   |q q q q q q . . .|. . q q q q q q .|      like the weights, without b
    "layers/0 (scales)"   float32     |s0 s1|s0 s1|                              one per row
    "layers/0 (unscaled)" float32     |b b b|b b .|                              elements of b

In the latter two, a rank has its own rows in order, in one part per buffer of the layout; the rank with the most rows
determines the length of a part. In the pjit engine, only the scales are separate arrays: ``"layers/0/kernel
(scales)"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from bridge.core.sharding.layout.rows import rows_of
from bridge.core.sharding.layout.slot import Slot
from jax_impl.runtime.groups.flat_group import FlatGroup, Index
from jax_impl.runtime.groups.logical_group import Group, LogicalArray, LogicalGroup
from jax_impl.runtime.groups.precision import update_dtype
from jax_impl.runtime.groups.stored import BufferSlice, Read, Stored, read_box

SCALED, SCALES, UNSCALED = " (scaled)", " (scales)", " (unscaled)"
_SCALE = np.dtype(np.float32)


def is_scaled(group: Group, path: str) -> bool:
    """Whether the rows of a parameter (in a stack, of one layer) have several elements."""
    return rows_of(group.layer_shape(path))[0] > 1


def row_arrays(group: Group) -> Mapping[str, Stored]:
    """By key, arrays of a group's scaled moments, in addition to or instead of arrays like the weights."""
    scaled = [path for path in group.paths if is_scaled(group, path)]
    if isinstance(group, LogicalGroup):
        return {path + SCALES: scales_of(group.stored[path]) for path in scaled}
    assert isinstance(group, FlatGroup)
    if not scaled:
        return {}
    arrays: dict[str, Stored] = {group.key + SCALED: ScaledPart(group)}
    for key, part in ((SCALES, RowArray(group, scaled=True)), (UNSCALED, RowArray(group, scaled=False))):
        if part.rows:
            arrays[group.key + key] = part
    return arrays


def scales_of(array: LogicalArray) -> LogicalArray:
    """The scales of a parameter that is a separate array."""
    last = len(array.shape) - 1
    return replace(
        array,
        shape=(*array.shape[:-1], 1),
        dtype=_SCALE,
        dimension=None if array.dimension == last else array.dimension,
        cuts=tuple(cut for cut in array.cuts if cut.dimension != last),
    )


@dataclass(frozen=True)
class _BesideGroup:
    """An array that is cut over devices like the weights of a flat group."""

    group: FlatGroup

    @property
    def layers(self) -> int | None:
        return self.group.layers

    @property
    def spec(self) -> PartitionSpec:
        return self.group.spec


@dataclass(frozen=True)
class ScaledPart(_BesideGroup):
    """The scaled parameters of a flat group, at the positions of their weights, with zeros for other parameters."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.group.shape

    @property
    def dtype(self) -> np.dtype:
        return self.group.dtype

    def tensor_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return shape if path in self._own else None

    def numel(self, index: Index) -> int:
        return sum(int(np.prod(sizes)) for path, _, sizes, _ in self.group.boxes(index) if path in self._own)

    def pieces(self, index: Index, values: np.ndarray) -> Iterator[BufferSlice]:
        return (piece for piece in self.group.pieces(index, values) if piece.path in self._own)

    def shard(self, index: Index, dtype: np.dtype, read: Read) -> np.ndarray:
        def scaled(path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
            return read(path, offsets, sizes) if path in self._own else np.zeros(sizes, dtype)

        return self.group.shard(index, dtype, scaled)

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset(path for path in self.group.paths if is_scaled(self.group, path))


@dataclass(frozen=True)
class RowArray(_BesideGroup):
    """One number per row for the scaled parameters of a flat group, or values of the unscaled ones (see ``scaled``)."""

    scaled: bool

    @cached_property
    def rows(self) -> int:
        """The number of rows in a shard."""
        return sum(self._most)

    @property
    def shape(self) -> tuple[int, ...]:
        shards = self.group.shape[-1] // self.group.layout.shard_size
        return (*self.group.shape[:-1], shards * self.rows)

    @property
    def dtype(self) -> np.dtype:
        return _SCALE if self.scaled else update_dtype(self.group.dtype)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The start of each buffer's part in a shard."""
        return (0, *accumulate(self._most))[:-1]

    @cached_property
    def first_rows(self) -> Mapping[str, int]:
        """By slot, the start of its rows on the first rank that has some; on others the slot is first in its buffer."""
        layout, starts = self.group.layout, dict[str, int]()
        for buffer, start in enumerate(self.starts):
            for rank in range(layout.num_shards):
                row = start
                for slot, rows in self._held(rank, buffer):
                    starts.setdefault(slot, row)
                    row += rows
        return starts

    def tensor_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if path not in self._own:
            return None
        return (*shape[:-1], 1) if self.scaled else shape

    def numel(self, index: Index) -> int:
        return sum(int(np.prod(sizes)) for _, _, sizes, _ in self._boxes(index))

    def pieces(self, index: Index, values: np.ndarray) -> Iterator[BufferSlice]:
        for path, offsets, sizes, where in self._boxes(index):
            # If rows are cut over a model axis, each part repeats their scales.
            repeated = self.scaled and offsets[-1] > 0
            yield BufferSlice(path, self._of_scale(offsets, 0), sizes, values[where].reshape(sizes), repeated)

    def shard(self, index: Index, dtype: np.dtype, read: Read) -> np.ndarray:
        values = np.zeros((*self.group.shape[:-1], self.rows), dtype)
        for path, offsets, sizes, where in self._boxes(index):
            values[where] = read_box(read, path, self._of_scale(offsets, 0), sizes).reshape(-1)
        return values

    def _boxes(
        self, index: Index
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int | slice, ...]]]:
        """The group's boxes with the positions of the rows' numbers; for scales, with sizes of one column."""
        size = self.group.layout.shard_size
        shard = (index[-1].start or 0) // self.rows
        whole = (*index[:-1], slice(shard * size, (shard + 1) * size))
        ends: dict[tuple[Any, ...], int] = {}
        for path, offsets, sizes, (*layer, elements) in self.group.boxes(whole):
            if path not in self._own:
                continue
            assert isinstance(elements, slice)
            # The first box of a slot on a rank determines the start of its rows.
            key = (path, *layer)
            start = ends.get(key, self._start(path, elements))
            sizes = self._of_scale(sizes, 1)
            ends[key] = start + int(np.prod(sizes))
            yield path, offsets, sizes, (*layer, slice(start, ends[key]))

    def _start(self, path: str, elements: slice) -> int:
        layout = self.group.layout
        slot = self._own[path]
        buffer = layout.shard_slices[slot.buffer].start
        # On the slot's first rank the rows start at its offset; on later ranks the slot starts the shard.
        first = slot.offset % layout.shard_sizes[slot.buffer]
        return self.first_rows[slot.name] if elements.start - buffer == first else self.starts[slot.buffer]

    def _of_scale(self, numbers: tuple[int, ...], last: int) -> tuple[int, ...]:
        return (*numbers[:-1], last) if self.scaled else numbers

    @cached_property
    def _most(self) -> tuple[int, ...]:
        """For each buffer, the largest number of rows on any rank."""
        names = {slot.name for slot in self._own.values()}
        return tuple(map(int, self.group.layout.rows_by_shard(names).max(1)))

    def _held(self, rank: int, buffer: int) -> Iterator[tuple[str, int]]:
        """Slots and their numbers of rows, in the order of offsets."""
        layout = self.group.layout
        for part in layout.parts(rank, buffer):
            slot = layout.slots[part.number]
            if self.group.paths[part.number] in self._own:
                yield slot.name, (part.stop - part.start) // slot.row_size

    @cached_property
    def _own(self) -> Mapping[str, Slot]:
        """The parameters with rows in the array, and their slots."""
        pairs = zip(self.group.paths, self.group.layout.slots, strict=True)
        return {path: slot for path, slot in pairs if is_scaled(self.group, path) == self.scaled}
