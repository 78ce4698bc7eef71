"""Ranges of rows as rectangular regions of a parameter, which is what checkpoints are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular region of a parameter, in the parameter's own global coordinates."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """``(row_size, num_rows)``: the last dimension is a row, from two dimensions on; (0, 0) without elements."""
    numel = math.prod(shape)
    if not numel:
        return 0, 0
    row_size = 1 if len(shape) < 2 else shape[-1]
    return row_size, numel // row_size


def row_boxes(shape: tuple[int, ...], r0: int, r1: int) -> tuple[Box, ...]:
    """Rows ``[r0, r1)`` of a parameter as boxes in its global coordinates, in row order; empty when ``r0 == r1``.

    For stacks (ndim >= 3) a range of rows may start and end inside a slice and then needs several boxes.
    Raises ``ValueError`` when the range leaves the parameter.
    """
    _, num_rows = rows_of(shape)
    if not 0 <= r0 <= r1 <= num_rows:
        raise ValueError(f"expected rows within [0, {num_rows}) of shape {shape}, got [{r0}, {r1})")
    if r0 == r1:
        return ()
    if not shape:
        return (Box((), ()),)
    lead = shape[:-1] if len(shape) > 1 else shape
    tail = shape[len(lead) :]
    zeros = (0,) * len(tail)
    return tuple(Box(o + zeros, s + tail) for o, s in _lead_boxes(lead, r0, r1))


def _lead_boxes(lead: tuple[int, ...], r0: int, r1: int) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the C-order index range ``[r0, r1)`` of an array of shape ``lead`` into head, middle and tail boxes."""
    inner = math.prod(lead[1:])
    if len(lead) == 1:
        yield (r0,), (r1 - r0,)
        return
    first, last = -(-r0 // inner), r1 // inner
    if first > last:
        index = r0 // inner
        for offsets, sizes in _lead_boxes(lead[1:], r0 - index * inner, r1 - index * inner):
            yield (index, *offsets), (1, *sizes)
        return
    if r0 < first * inner:
        for offsets, sizes in _lead_boxes(lead[1:], r0 - (first - 1) * inner, inner):
            yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in lead[1:])), (last - first, *lead[1:])
    if last * inner < r1:
        for offsets, sizes in _lead_boxes(lead[1:], 0, r1 - last * inner):
            yield (last, *offsets), (1, *sizes)
