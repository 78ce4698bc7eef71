"""Index arithmetic between two tensors that contain the same data under different axes, region by region.

A `Block` says where one set of elements is in a source tensor and in the target: two affine index functions of the same
elementary axes. To fill any box of the target, the box is pulled back to ranges of the elementary axes,
the ranges are pushed forward to a source region, and one strided copy moves the elements::

        target box                 ranges of (h, d, m)                source region
    kernel[0:64, 3:5, 0:40]  ->  m 0:64, h 3:5, d 0:40   ->   weight[3*40 : 5*40, 0:64]   (h d) m

A range of a composite target axis can start or end inside an outer index (rows 50:130 of `(h d)` with d=40 are
d 10:40 of h 1, all d of h 2, d 0:10 of h 3): up to three pieces per nesting level, each copied on its own. A source
region that would be large, or mostly unwanted elements between wanted ones, is split into several reads, so memory
stays near the size of the target box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointReader
from bridge.core.mapping.language.expression import Affine, Alternative

READ_BYTES = 32 << 20
"""Largest source region in memory in addition to the target box, in bytes."""

SMALL_READ_BYTES = 256 << 10
"""A region of at most this size is read at once, however few of its elements are needed."""

Ranges = dict[str, tuple[int, int]]
"""For each elementary axis, the wanted indices [start, stop)."""


@dataclass(frozen=True)
class Block:
    """Elements of ``source`` and their place in the target; both functions name the same axes of ``sizes``."""

    source: str
    source_index: Alternative
    target_index: Alternative
    sizes: Mapping[str, int]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes.values())

    def pieces(self, box: Box, itemsize: int) -> Iterator[Ranges]:
        """Ranges that together name every element of this block inside the target ``box``, each once."""
        if self.numel == 0:
            return
        per_dim = [
            _cover(affine.terms, self.sizes, low - affine.offset, low + size - affine.offset)
            for affine, low, size in zip(self.target_index, box.offsets, box.sizes, strict=True)
        ]
        for parts in itertools.product(*per_dim):
            yield from self._split({axis: span for part in parts for axis, span in part.items()}, itemsize)

    def source_box(self, ranges: Ranges) -> Box:
        """The smallest source region that contains all elements named by ``ranges``."""
        bounds = [_extent(affine, ranges) for affine in self.source_index]
        return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))

    def target_box(self, ranges: Ranges) -> Box:
        """The smallest target region that contains all elements named by ``ranges``."""
        return self._flipped.source_box(ranges)

    @cached_property
    def _flipped(self) -> Block:
        return Block(self.source, self.target_index, self.source_index, self.sizes)

    def _split(self, ranges: Ranges, itemsize: int) -> Iterator[Ranges]:
        wanted = math.prod(stop - start for start, stop in ranges.values())
        enclosing = math.prod(self.source_box(ranges).sizes)
        small = enclosing * itemsize <= SMALL_READ_BYTES
        if wanted == 1 or small or (enclosing <= 2 * wanted and enclosing * itemsize <= READ_BYTES):
            yield ranges
            return
        axis = self._split_axis(ranges)
        start, stop = ranges[axis]
        for half in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
            yield from self._split({**ranges, axis: half}, itemsize)

    def _split_axis(self, ranges: Ranges) -> str:
        """The slowest axis of the first source dimension with holes; without holes, the slowest axis of all."""

        def length(axis: str) -> int:
            return ranges[axis][1] - ranges[axis][0]

        def holes(affine: Affine) -> bool:
            low, high = _extent(affine, ranges)
            return high - low > math.prod(length(axis) for axis, _ in affine.terms)

        splittable = [
            affine for affine in self.source_index if any(length(axis) > 1 for axis, _ in affine.terms)
        ]
        affine = next((affine for affine in splittable if holes(affine)), splittable[0])
        return next(axis for axis, _ in affine.terms if length(axis) > 1)


@dataclass(frozen=True)
class TensorView:
    """A virtual tensor: its elements are in ``blocks`` of other tensors.

    Raises ValueError unless the blocks contain exactly as many elements as ``shape``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        covered = sum([block.numel for block in self.blocks])
        if covered != math.prod(self.shape):
            raise ValueError(
                f"expected {math.prod(self.shape)} elements for shape {self.shape}, got {covered}"
            )

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The elements of ``box``: C-contiguous, of ``dtype``, bit for bit as in the sources."""
        if len(self.blocks) == 1 and self.blocks[0].source_index == self.blocks[0].target_index:
            return reader.read(self.blocks[0].source, box)
        target = np.empty(box.sizes, self.dtype)
        for block in self.blocks:
            for ranges in block.pieces(box, self.dtype.itemsize):
                region = block.source_box(ranges)
                source = reader.read(block.source, region)
                elements(target, box, block.target_index, ranges)[...] = elements(
                    source, region, block.source_index, ranges
                )
        return target


def identity(source: str, shape: tuple[int, ...], dtype: np.dtype) -> TensorView:
    """A view of all of tensor ``source``, unchanged."""
    index, sizes = _identity(shape)
    # Without counting the elements, which would take as long as everything else here.
    view = object.__new__(TensorView)
    put = object.__setattr__
    put(view, "shape", shape)
    put(view, "dtype", dtype)
    put(view, "blocks", (Block(source, index, index, sizes),))
    return view


def whole_source(view: object) -> str | None:
    """The tensor that this view shows whole, as made by `identity`; None for other views, even for some equal ones."""
    if not isinstance(view, TensorView) or len(view.blocks) != 1:
        return None
    (block,) = view.blocks
    index, sizes = _identity(view.shape)
    return (
        block.source
        if (block.source_index, block.target_index, block.sizes) == (index, index, sizes)
        else None
    )


@lru_cache(maxsize=4096)
def _identity(shape: tuple[int, ...]) -> tuple[Alternative, Mapping[str, int]]:
    index = tuple(Affine(0, ((str(axis), 1),)) for axis in range(len(shape)))
    return index, {str(axis): size for axis, size in enumerate(shape)}


def dense_pieces(block: Block, box: Box) -> Iterator[Ranges]:
    """Ranges that together name every element of the block inside ``box`` of its source, each once.

    Each piece fills a box of the target completely: `Block.target_box`.
    """
    if block.numel == 0:
        return
    per_dim = [
        _cover(affine.terms, block.sizes, low - affine.offset, low + size - affine.offset)
        for affine, low, size in zip(block.source_index, box.offsets, box.sizes, strict=True)
    ]
    everything: Ranges = {axis: (0, size) for axis, size in block.sizes.items()}
    for parts in itertools.product(*per_dim):
        ranges = {axis: span for part in parts for axis, span in part.items()}
        yield from _dense(block, everything | ranges)


def _dense(block: Block, ranges: Ranges) -> Iterator[Ranges]:
    if math.prod(stop - start for start, stop in ranges.values()) == block.target_box(ranges).numel:
        yield ranges
        return
    axis = block._flipped._split_axis(ranges)
    start, stop = ranges[axis]
    for half in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
        yield from _dense(block, {**ranges, axis: half})


def _cover(terms: tuple[tuple[str, int], ...], sizes: Mapping[str, int], low: int, high: int) -> list[Ranges]:
    """Ranges of the axes in ``terms`` whose positions ``sum(stride * index)`` are in [low, high).

    ``terms`` goes from the slowest axis to the fastest, so the positions under one index of the first axis end before
    those under the next begin: a run of whole indices in the middle, and at most one cut index at either end.
    """
    if high <= low:
        return []
    if not terms:
        return [{}] if low <= 0 < high else []
    (axis, stride), rest = terms[0], terms[1:]
    span = sum(s * (sizes[a] - 1) for a, s in rest)
    touched = range(max(0, -((span - low) // stride)), min(sizes[axis] - 1, (high - 1) // stride) + 1)
    whole = range(max(0, -(-low // stride)), min(sizes[axis] - 1, (high - 1 - span) // stride) + 1)
    result = []
    if whole:
        result.append({axis: (whole.start, whole.stop), **{a: (0, sizes[a]) for a, _ in rest}})
    for index in sorted({*touched[:1], *touched[-1:]}):
        if index not in whole:
            cut = _cover(rest, sizes, low - index * stride, high - index * stride)
            result += [{axis: (index, index + 1), **ranges} for ranges in cut]
    return result


def _extent(affine: Affine, ranges: Ranges) -> tuple[int, int]:
    low = affine.offset + sum(stride * ranges[axis][0] for axis, stride in affine.terms)
    return low, affine.offset + sum(stride * (ranges[axis][1] - 1) for axis, stride in affine.terms) + 1


def elements(array: np.ndarray, box: Box, index: Alternative, ranges: Ranges) -> np.ndarray:
    """A view of ``array``, which contains ``box`` in C order, with one axis per elementary axis, as in ``ranges``."""
    offset, strides = 0, dict.fromkeys(ranges, 0)
    for affine, low, step in zip(index, box.offsets, array.strides, strict=True):
        offset += step * (_extent(affine, ranges)[0] - low)
        for axis, stride in affine.terms:
            strides[axis] = stride * step
    lengths = [stop - start for start, stop in ranges.values()]
    # Made from bytes, since not every dtype can export a buffer; this constructor checks the bounds.
    memory = array.reshape(-1).view(np.uint8)
    return np.ndarray(lengths, array.dtype, memory, offset, [strides[axis] for axis in ranges])
