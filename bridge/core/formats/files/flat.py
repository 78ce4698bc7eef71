"""Boxes of arrays whose elements arrive in order, from a stream of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bridge.core.formats.tensors.base import Box

Buffer = bytes | memoryview


def copy_flat(
    shape: Sequence[int], box: Box, out: np.ndarray, read: Callable[[int, int], Iterator[Buffer]]
) -> None:
    """Copy a box of a row-major array of this shape into `out`, which is C-contiguous and has the box's sizes.

    read: yields the array's bytes [start, stop), in consecutive parts; it may yield more bytes after these.
    """
    if not box.numel:
        return
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # Axes that the box contains whole belong to one contiguous run of elements, and so does the axis before them.
    lead = len(shape)
    while lead and (lead == len(shape) or box.sizes[lead] == shape[lead]):
        lead -= 1
    runs = out.reshape((math.prod(box.sizes[:lead]), -1))
    length, size = runs.shape[1], out.dtype.itemsize
    first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
    parts = read(first * size, (last + 1) * size)
    held: Buffer = b""
    at = first * size  # the place of the first held byte
    for number, index in enumerate(np.ndindex(box.sizes[:lead])):
        position = (first + sum(k * s for k, s in zip(index, strides, strict=False))) * size
        row, done = runs[number : number + 1].view(np.uint8)[0], 0
        while done < length * size:
            if position + done >= at + len(held):
                at, held = at + len(held), next(parts)
                continue
            start = position + done - at
            count = min(length * size - done, len(held) - start)
            row[done : done + count] = np.frombuffer(held, np.uint8, count, start)
            done += count
