"""The rows of a tensor as bars to scale, each cell of which says in which of given boxes its row lies."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Boxed(Protocol):
    """A box of a tensor: ``rows.Box``, or a chunk of a checkpoint."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class RowBar:
    """The rows of a tensor, first to last, to scale: each cell is the number of the box that holds its middle row.

    ``columns``: the range of the last axis that these boxes hold, None when no box cuts it. A cell is None when
    boxes with other ranges of columns hold its row.
    """

    columns: tuple[int, int] | None
    cells: tuple[int | None, ...]


def row_bars(shape: Sequence[int], boxes: Sequence[Boxed], width: int) -> tuple[RowBar, ...]:
    """A bar of at most ``width`` cells for each range of columns that boxes hold; none without elements.

    A row is the last axis, from two axes on, and one element of a vector or scalar. Boxes count from 0, those without
    elements, too.
    """
    if not math.prod(shape):
        return ()
    lead = tuple(shape[:-1] if len(shape) > 1 else shape)
    num_rows = math.prod(lead)
    width = min(width, num_rows)
    rows = [_index((2 * cell + 1) * num_rows // (2 * width), lead) for cell in range(width)]
    by_columns: dict[tuple[int, int], list[int]] = {}
    for number, box in enumerate(boxes):
        if math.prod(box.sizes):
            columns = (box.offsets[-1], box.offsets[-1] + box.sizes[-1]) if len(shape) > 1 else (0, 1)
            by_columns.setdefault(columns, []).append(number)
    bars = []
    for columns, numbers in sorted(by_columns.items()):
        cells: list[int | None] = [None] * width
        for number in numbers:
            for cell in _held(rows, boxes[number], len(lead)):
                cells[cell] = number
        bars.append(RowBar(columns if len(by_columns) > 1 else None, tuple(cells)))
    return tuple(bars)


def _held(rows: list[tuple[int, ...]], box: Boxed, axes: int) -> list[int]:
    """Positions of those ``rows``, which are sorted, that the box holds."""
    if not axes:
        return [0]
    bounds = [(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)][:axes]
    (low, high), *inner = bounds
    candidates = range(bisect_left(rows, (low,)), bisect_left(rows, (high,)))
    return [k for k in candidates if all(a <= i < b for i, (a, b) in zip(rows[k][1:], inner, strict=True))]


def _index(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element from its position in row-major order."""
    index = []
    for size in reversed(shape):
        number, here = divmod(number, size)
        index.append(here)
    return tuple(reversed(index))
