"""Weights that are gathered as float8 payload: which weights, in which bits, and where the bytes are.

A policy's ``[precision] gather`` names a format. Main weights stay float32; each rank quantizes the rows that it owns,
the ranks gather bytes, and dequantize them into the dtype of forward and backward::

    format           payload        scale, a power of two           bytes an element of the gather
    float8_e4m3fn    e4m3, 1 byte   one a tensor, not gathered      1
    mxfp8            e4m3, 1 byte   one E8M0 byte a block           1 + 1/32

A *block* is 32 consecutive elements of a row (``bridge.core.sharding.layout.rows``); the last block of a row may be
shorter. Shard boundaries never cut a row, so each rank's payload and scales equal those of the whole tensor, byte for
byte. The scale of a whole tensor needs the largest magnitude on all ranks: an all-reduce of a float32 per tensor.

The arithmetic, on float32 values and their magnitude ``amax`` (the largest of the block or tensor, NaN not counted)::

    amax = m * 2^k, 1 <= m < 2        e = k - 8 if m <= 1.75 else k - 7       448 = 1.75 * 2^8, the largest e4m3 number
    payload = value * 2^-e, rounded to nearest, ties to even, at most 448       scale byte = e + 127, E8M0

so e is the smallest exponent for which no finite value saturates. It is at least -127, even for amax 0. Infinity has k
= 128: its payload, 448, decodes to infinity again. NaN stays NaN. Subnormal float32 values count as zeros, as on many
devices. For finite amax and e >= -126, e is also ``exponent(x) + (mantissa(x) != 0)`` of the float32 ``x = amax *
float32(1/448)``. Every 2^-e is a normal float32.

The bytes that a rank sends for a group (``num_shards`` such pieces, in the order of the shards, make the whole)::

    | payload: the shard, an element a byte, padding is 0 | scales of slot a's rows here | of slot b's | ... | zeros |

The scales of a shard's parts are in the order of the parts (buffer by buffer, by offset), row by row, block by block.
Zeros pad to the shard with the most blocks, and to a multiple of the layout's ``align``. If all rows, offsets and
shards are multiples of 32 elements (``in_blocks``), every rank's blocks are at the same places in its shard, and each
32 elements have their scale at the same place; padding has scale 0. Shards of a coarser level (HFSDP's inner axis) are
pieces of the finest level, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bridge.core.sharding.layout.layout import Layout

FORMATS = ("mxfp8", "float8_e4m3fn")
BLOCK = 32
"""Elements of a row that share an mxfp8 scale."""


class ScalePart(NamedTuple):
    """The blocks of one slot's rows in a shard: bytes ``[start, start + rows * blocks)`` of the shard's scales.

    ``number``: of the slot in the layout. ``rows``: rows in the shard. ``blocks``: per row.
    """

    number: int
    start: int
    rows: int
    blocks: int


def is_quantized(shape: Sequence[int]) -> bool:
    """Whether a floating-point parameter of this shape is gathered as payload: matrices and stacks of them.

    Vectors and scalars of the unit form a separate parameter group, which is gathered in the compute dtype. For scanned
    layers the shape is one layer's, and for a parameter cut over model axes it is the part's.
    """
    return len(shape) >= 2


def blocks_of(row_size: int) -> int:
    """Blocks of a row of so many elements."""
    return -(-row_size // BLOCK)


def in_blocks(layout: Layout) -> bool:
    """Whether in every shard, each 32 elements are one block."""
    sizes = (*layout.shard_sizes, *(size for slot in layout.slots for size in (slot.offset, slot.row_size)))
    return not any(size % BLOCK for size in sizes)


def scale_parts(layout: Layout, rank: int) -> Iterator[ScalePart]:
    """Where the mxfp8 scales are in the shard of ``rank``, after the payload, in order."""
    start, alike = 0, in_blocks(layout)
    for buffer, held in enumerate(layout.shard_slices):
        for part in layout.parts(rank, buffer):
            row_size = layout.slots[part.number].row_size
            start = (held.start + part.start) // BLOCK if alike else start
            scales = ScalePart(part.number, start, (part.stop - part.start) // row_size, blocks_of(row_size))
            start += scales.rows * scales.blocks
            yield scales


def scale_bytes(layout: Layout, gather: str) -> int:
    """Bytes of scales that each shard sends, including the zeros at the end; 0 unless the format is "mxfp8"."""
    if gather != "mxfp8":
        return 0
    if in_blocks(layout):
        most = layout.shard_size // BLOCK
    else:
        ranks = (scale_parts(layout, rank) for rank in range(layout.num_shards))
        most = max(sum(part.rows * part.blocks for part in parts) for parts in ranks)
    return -(-most // layout.align) * layout.align


def piece_bytes(layout: Layout, gather: str) -> int:
    """Bytes that each shard sends: payload and scales. A group's gather fills ``num_shards`` times as many."""
    return layout.shard_size + scale_bytes(layout, gather)


def gather_bytes(layout: Layout, gather: str | None, itemsize: int) -> int:
    """Bytes of a group's whole gather; ``itemsize``: bytes of a compute-dtype element, used without ``gather``."""
    return (
        layout.padded_size * itemsize if gather is None else layout.num_shards * piece_bytes(layout, gather)
    )
