"""One tensor of two checkpoints compared, region by region and on several threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from bridge.checkpoints.compare.diff_report import TensorDiff
from bridge.checkpoints.compare.noise import Noise
from bridge.checkpoints.compare.spread import Spread
from bridge.checkpoints.compare.ulp import Difference, Tolerance, compare, squared_distance, sum_of_squares
from bridge.checkpoints.ground.borrowed import MEMORY, borrow
from bridge.checkpoints.ground.outputs import common_dtype
from bridge.checkpoints.ground.workers import batches, each, ordered
from bridge.core.formats.tensors.base import Box, CheckpointReader, TensorInfo, is_whole, name_of
from bridge.core.formats.tensors.boxes import group_boxes, split_box
from bridge.core.mapping.language.operations import as_dtype
from bridge.core.mapping.language.relation import whole_source
from bridge.core.mapping.plan.plan import PlannedTensor

_SMALL = 8 << 20
"""Largest tensor, in bytes, that one worker compares alone; workers share a larger one."""

_Region: TypeAlias = tuple[Difference, float | None, Spread]
"""The difference within a box; if there is any, the sum of squares of ``a`` there, and the difference's spread."""


@dataclass(frozen=True)
class Pair:
    """A tensor of ``b``, and the tensor of ``a`` to compare it with."""

    reader_a: CheckpointReader
    planned: PlannedTensor
    reader_b: CheckpointReader
    info: TensorInfo
    tolerance: Tolerance
    noise: Noise | None

    def compare(self, workers: int) -> TensorDiff:
        """Compare the two with that many threads, which share the regions."""
        dtype = common_dtype(self.planned.dtype, self.info.dtype)
        assert dtype is not None
        boxes = list(self._boxes())
        if len(boxes) == 1:
            # Small tensors are many: no sums and loops over several regions.
            difference, norm, spread = self._region(boxes[0], dtype)
            norms, due = [] if norm is None else [norm], list[Box]()
        else:
            difference, spread, norms, due = self._joined(boxes, dtype, workers)
        relative, noise = 0.0, None
        if difference.squares:
            # Equal regions needed no arithmetic; their norm is needed only now.
            norms += ordered(lambda box: sum_of_squares(self._read_a(box, dtype)), due, workers)
            relative = _ratio(difference.squares, math.fsum(norms))
        floating = not is_whole(dtype)
        if self.noise is not None and floating:
            noise = 0.0
            if difference.squares:
                squares = ordered(self._noise, boxes, workers)
                noise = _ratio(difference.squares, math.fsum(squares))
        compared = difference.elements - difference.nan
        return TensorDiff(
            self.info.name,
            self.info.shape,
            name_of(dtype),
            difference,
            name_of(self.planned.dtype),
            name_of(self.info.dtype),
            relative,
            not difference.beyond or (floating and not difference.nan and self._tolerated(relative, noise)),
            noise,
            spread.percentiles(compared),
            spread.histogram(compared),
        )

    def _joined(
        self, boxes: list[Box], dtype: np.dtype, workers: int
    ) -> tuple[Difference, Spread, list[float], list[Box]]:
        """The regions together: difference, spread, norms of differing regions, and the boxes of all others."""
        difference, spread = Difference(), Spread()
        norms: list[float] = []
        due: list[Box] = []
        regions = ordered(lambda box: self._region(box, dtype), boxes, workers)
        for box, (part, norm, its_spread) in zip(boxes, regions, strict=True):
            difference += part
            if norm is None:
                due.append(box)
            else:
                norms.append(norm)
                spread.join(its_spread)
        return difference, spread, norms, due

    def _tolerated(self, relative: float, noise: float | None) -> bool:
        """Whether the tensor passes whatever its elements are."""
        by_error = self.tolerance.max_error is not None and relative <= self.tolerance.max_error
        return by_error or (noise is not None and noise <= self.tolerance.noise_factor)

    def _boxes(self) -> Iterator[Box]:
        # Along b's stored chunks, as compressed chunks are decoded whole.
        itemsize = max(self.info.dtype.itemsize, self.planned.dtype.itemsize)
        if self.noise is not None:
            itemsize = max(itemsize, self.noise.itemsize(self.info.name))
        chunks = self.info.chunks
        joined = chunks if len(chunks) == 1 else (joint for joint, _ in group_boxes(chunks, itemsize))
        for joint in joined:
            yield from (box for box in split_box(joint, itemsize) if box.numel)

    def _region(self, box: Box, dtype: np.dtype) -> _Region:
        source = whole_source(self.planned.content)
        loan_a = None if source is None else borrow(self.reader_a, source, box, MEMORY.first)
        left = self._read_a(box, dtype) if loan_a is None else _in(dtype, loan_a.array)
        loan_b = borrow(self.reader_b, self.info.name, box, MEMORY.second)
        right = _in(dtype, loan_b.array)
        # A cast does not keep a NaN's payload.
        any_nan = self.planned.dtype != self.info.dtype
        spread = Spread()
        difference = compare(left, right, self.tolerance, any_nan=any_nan, spread=spread)
        norm = sum_of_squares(left) if difference.differing else None
        if loan_a is not None:
            loan_a.give_back()
        loan_b.give_back()
        return difference.shifted(box.offsets), norm, spread

    def _noise(self, box: Box) -> float:
        assert self.noise is not None
        return squared_distance(self.reader_b.read(self.info.name, box), self.noise.read(self.info.name, box))

    def _read_a(self, box: Box, dtype: np.dtype) -> np.ndarray:
        return _in(dtype, self.planned.read(self.reader_a, box))


def compared(pairs: Iterable[Pair], workers: int) -> Iterator[TensorDiff]:
    """The differences, in order."""
    for small, group in itertools.groupby(pairs, lambda pair: pair.info.nbytes <= _SMALL):
        if small:
            together = batches((pair.info.nbytes, pair) for pair in group)
            for differences in ordered(partial(each, lambda pair: pair.compare(1)), together, workers):
                yield from differences
        else:
            for pair in group:
                yield pair.compare(workers)


def _in(dtype: np.dtype, array: np.ndarray) -> np.ndarray:
    return array if array.dtype == dtype else as_dtype(array, dtype)


def _ratio(error: float, reference: float) -> float:
    """The ratio of two norms, from their squares."""
    # Relative to an infinite norm, which one infinite element causes, every error would be 0.
    if math.isinf(error) or math.isinf(reference) or not reference:
        return math.inf
    return math.sqrt(error) / math.sqrt(reference)
