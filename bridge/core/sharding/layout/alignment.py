"""The alignment of shards: a number of elements, or "auto", which lets the planner choose.

XLA:TPU turns an all-gather of flat shards into an all-reduce, which sends twice as much, unless the shard is a multiple
of 128 elements. NCCL and vector loads need multiples of 16 bytes; 128 elements of any dtype are such a multiple.
"""

from __future__ import annotations

from typing import Final, Literal

from bridge.core.sharding.layout.slot import is_size

Align = int | Literal["auto"]

AUTO: Final = "auto"
MOST_AUTO_ALIGN = 128
DEFAULT_ALIGN: Align = AUTO


def check_align(align: object) -> None:
    """ValueError unless it is an int of at least 1, or "auto"."""
    if not is_align(align):
        raise ValueError(f'align: expected an int >= 1 or "auto", got {align!r}')


def is_align(value: object) -> bool:
    """An int of at least 1, or "auto"."""
    return value == AUTO if isinstance(value, str) else is_size(value) and value != 0
