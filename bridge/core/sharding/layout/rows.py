"""The rows of a tensor, and a range of rows as boxes in the tensor's own coordinates.

A row is the smallest unit that sharding keeps together:

    ========  ====================  =================
    ndim      elements of a row     number of rows
    ========  ====================  =================
    0         1                     1
    1         1                     shape[0]
    2         shape[1]              shape[0]
    >= 3      shape[-1]             prod(shape[:-1])
    ========  ====================  =================

Rows ``[2, 9)`` of a ``(3, 4, 5)`` stack (each line a row, ``#`` owned) are three boxes::

    [0]  .....      [1]  #####      [2]  #####
         .....           #####           .....
         #####           #####           .....
         #####           #####           .....
      (0,2,0)+(1,2,5)  (1,0,0)+(1,4,5)  (2,0,0)+(1,1,5)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular region of a tensor: ``tensor[o0:o0+s0, o1:o1+s1, ...]``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """``(row_size, num_rows)`` of a tensor of this shape; ``(0, 0)`` if it has no elements."""
    numel = math.prod(shape)
    if numel == 0:
        return 0, 0
    row_size = shape[-1] if len(shape) >= 2 else 1
    return row_size, numel // row_size


def rows_together(shape: Sequence[int], block: int | None) -> int:
    """Rows that no boundary separates, if ``block`` rows are requested, or None: all; at least 1.

    A tensor of three or more dimensions is a stack of matrices ``shape[-2:]``, and blocks are counted within each
    matrix. If ``block`` does not divide a matrix's rows, whole matrices stay together: boundaries of equal shards are
    equidistant, and cannot cut several such matrices between their blocks.
    """
    _, num_rows = rows_of(shape)
    if block is None or not num_rows:
        return max(1, num_rows)
    matrix = shape[-2] if len(shape) > 2 else num_rows
    return block if block < matrix and (matrix == num_rows or matrix % block == 0) else matrix


def local_shape(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """Shape of a local tensor with ``rows`` rows of a parameter of this global shape."""
    return (rows,) if len(shape) <= 1 else (rows, shape[-1])


def row_boxes(shape: Sequence[int], r0: int, r1: int) -> tuple[Box, ...]:
    """Rows ``[r0, r1)`` of a tensor of this shape as boxes in its own coordinates, in row order.

    No box for an empty range, one box for tensors of up to two dimensions; a range of rows of a stack may begin and end
    inside a slice, and then needs several boxes. Raises ValueError if the range leaves the tensor.
    """
    _, num_rows = rows_of(shape)
    if not 0 <= r0 <= r1 <= num_rows:
        raise ValueError(
            f"row range of a tensor of shape {tuple(shape)}: expected 0 <= r0 <= r1 <= {num_rows}, "
            f"got r0={r0}, r1={r1}"
        )
    if r0 == r1:
        return ()
    if len(shape) <= 1:
        return (Box((r0,), (r1 - r0,)) if shape else Box((), ()),)
    return tuple(_stack_boxes((), tuple(shape), r0, r1))


def _stack_boxes(index: tuple[int, ...], shape: tuple[int, ...], r0: int, r1: int) -> Iterator[Box]:
    """Boxes of the non-empty rows ``[r0, r1)`` of ``tensor[index]``, of this shape (two dims or more)."""
    per_slice = math.prod(shape[1:-1])
    first, head = divmod(r0, per_slice)
    last, tail = divmod(r1, per_slice)
    if first == last:
        yield from _stack_boxes((*index, first), shape[1:], head, tail)
        return
    if head:
        yield from _stack_boxes((*index, first), shape[1:], head, per_slice)
        first += 1
    if first < last:
        rest = shape[1:]
        yield Box((*index, first, *(0 for _ in rest)), (*(1 for _ in index), last - first, *rest))
    if tail:
        yield from _stack_boxes((*index, last), shape[1:], 0, tail)
