"""How a tensor is walked through: in boxes that fit a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from bridge.core.formats.tensors.base import Box

Progress = Callable[[int, int, str], None]
"""Called as ``progress(bytes done, bytes in all, name of the tensor just done)``."""

REGION_BYTES = 32 << 20
"""Elements of a tensor handled at a time, in bytes. With the source region behind it, twice that is in memory."""


CHUNK_BYTES = 32 << 20
"""Largest chunk that DCP and safetensors writers make by themselves."""


def default_chunk_shape(shape: Sequence[int], dtype: np.dtype) -> tuple[int, ...]:
    """The largest block of whole rows within 32 MiB; a row above that is cut along the next axis in turn."""
    block = [max(n, 1) for n in shape]
    nbytes = dtype.itemsize
    for n in block:
        nbytes *= n
    for axis, n in enumerate(block):
        if nbytes <= CHUNK_BYTES:
            break
        per_index = nbytes // n
        block[axis] = max(1, CHUNK_BYTES // per_index)
        nbytes = per_index * block[axis]
    return tuple(block)


def group_boxes(
    boxes: Iterable[Box], itemsize: int, budget: int = REGION_BYTES
) -> Iterator[tuple[Box, list[Box]]]:
    """Neighbouring boxes joined up to ``budget`` bytes: each joint box with the boxes it consists of.

    Boxes join in the order given while together they fill a box. Handling several small chunks at once matters when
    they lie across the grain of the source, as in a transpose, where each one alone would touch the whole source.
    """
    joint: Box | None = None
    members: list[Box] = []
    for box in boxes:
        if joint is not None:
            larger = _hull(joint, box)
            if larger.numel == joint.numel + box.numel and larger.numel * itemsize <= budget:
                joint = larger
                members.append(box)
                continue
            yield joint, members
        joint, members = box, [box]
    if joint is not None:
        yield joint, members


def split_box(box: Box, itemsize: int, budget: int = REGION_BYTES) -> Iterator[Box]:
    """``box`` in pieces of at most ``budget`` bytes (or one element), cut along its slowest axes first."""
    if box.numel * itemsize <= budget or box.numel <= 1:
        yield box
        return
    axis = next(a for a, size in enumerate(box.sizes) if size > 1)
    inner = box.numel // box.sizes[axis] * itemsize
    step = max(1, budget // inner)
    for low in range(0, box.sizes[axis], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += low
        sizes[axis] = min(step, sizes[axis] - low)
        yield from split_box(Box(tuple(offsets), tuple(sizes)), itemsize, budget)


def _hull(a: Box, b: Box) -> Box:
    low = tuple(map(min, a.offsets, b.offsets))
    return Box(low, tuple(stop - start for start, stop in zip(low, map(max, a.stops, b.stops), strict=True)))
