"""What drawings of tensors share: letters for what is drawn, lines to scale, and which ranks of many are shown."""

from __future__ import annotations

import math
import string
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.core.sharding.layout.slot import Part, Slot

MAX_RANKS = 16
MAX_TENSORS = 40


def letter(number: int) -> str:
    """What stands for the tensor, or the stored chunk, of this number; letters recur after 52."""
    return string.ascii_letters[number % 52]


def drawn_ranks(num_shards: int, most: int = MAX_RANKS) -> list[int | None]:
    """All ranks when they are at most ``most``; else the first and the last half of that with None between."""
    if num_shards <= most:
        return list(range(num_shards))
    half = most // 2
    return [*range(half), None, *range(num_shards - half, num_shards)]


def shard_line(parts: Iterable[Part], size: int, columns: int) -> str:
    """A shard of ``size`` elements in ``columns`` characters; what several parts share shows the last of them."""
    line = ["."] * columns
    for part in parts:
        first, last = part.start * columns // size, (part.stop - 1) * columns // size
        line[first : last + 1] = letter(part.number) * (last + 1 - first)
    return "".join(line)


def slot_line(number: int, slot: Slot, ranges: Sequence[tuple[int, int] | None]) -> str:
    """A parameter's letter, shape and the rows of the drawn ranks."""
    if not slot.numel:
        return f"-  {slot.name} {slot.shape}: no elements"
    rows = " ".join("..." if range_ is None else "{}:{}".format(*range_) for range_ in ranges)
    block = f" by {slot.block}" if slot.block > 1 else ""
    return f"{letter(number)}  {slot.name} {slot.shape}: rows{block} {rows}"


def slices_text(box: Any) -> str:
    """A box as one would index it: ``[0:2, 3:7]``."""
    stops = (offset + size for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(box.offsets, stops, strict=True))}]"


def more_tensors(tensors: int) -> list[str]:
    """The line that says how many of all tensors a drawing leaves out, if any."""
    return [f"... and {tensors - MAX_TENSORS} more tensors"] if tensors > MAX_TENSORS else []


@dataclass(frozen=True)
class RowBar:
    """The rows of a tensor, first to last, to scale: each cell is the number of the box that holds its middle row.

    ``columns``: the range of the last axis that these boxes hold, None when no box cuts it. A cell is None when
    boxes with other ranges of columns hold its row.
    """

    columns: tuple[int, int] | None
    cells: tuple[int | None, ...]


def row_bars(shape: Sequence[int], boxes: Sequence[Any], width: int) -> tuple[RowBar, ...]:
    """A bar of at most ``width`` cells for each range of columns that boxes hold; none without elements.

    boxes: with ``offsets`` and ``sizes``, such as the chunks of a checkpoint; they count from 0, empty ones, too. A row
    is the last axis, from two axes on, and one element of a vector or scalar.
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


def _held(rows: list[tuple[int, ...]], box: Any, axes: int) -> list[int]:
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
