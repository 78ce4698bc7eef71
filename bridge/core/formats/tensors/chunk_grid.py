"""Blocks that cover a tensor: the chunks that a writer makes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import le

from bridge.core.formats.tensors.base import Box, CheckpointError

MAX_CHUNKS = 1 << 20
"""Chunks of one tensor that a writer makes: each is a Box in memory, and a hostile shape may claim any number."""


def grid_of_chunks(shape: Sequence[int], block: Sequence[int]) -> tuple[Box, ...]:
    """Blocks covering the shape, in row-major order; those at the upper ends are smaller. None without elements.

    CheckpointError for more than MAX_CHUNKS.
    """
    if len(shape) == len(block) and all(map(le, shape, block)):
        return () if 0 in shape else (Box.whole(shape),)
    count = math.prod(-(-n // b) for n, b in zip(shape, block, strict=True))
    if count == 0:
        return ()
    if count > MAX_CHUNKS:
        raise CheckpointError(
            f"expected at most {MAX_CHUNKS} chunks, got {count} of shape {tuple(block)} for shape {tuple(shape)}"
        )
    starts = [range(0, n, b) for n, b in zip(shape, block, strict=True)]
    return tuple(
        Box(offsets, tuple(min(b, n - o) for o, b, n in zip(offsets, block, shape, strict=True)))
        for offsets in itertools.product(*starts)
    )
