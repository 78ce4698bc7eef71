"""Boxes of a tensor: whether chunks cover it, which chunks a box touches, and boxes that fit a memory budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import le

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo

Progress = Callable[[int, int, str], None]
"""Called as ``progress(bytes done, bytes in all, name of the tensor just done)``."""

REGION_BYTES = 32 << 20
"""Bytes of a tensor that are processed at a time. With the source region, twice as much is in memory."""


CHUNK_BYTES = 32 << 20
"""Largest chunk that DCP and safetensors writers make by default."""


def default_chunk_shape(shape: Sequence[int], dtype: np.dtype) -> tuple[int, ...]:
    """The largest block of whole rows within 32 MiB; a larger row is cut along the next axis."""
    block = [max(n, 1) for n in shape]
    nbytes = math.prod(block) * dtype.itemsize
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
    """Neighbouring boxes joined up to ``budget`` bytes: each joint box with its boxes.

    Boxes join in the given order as long as together they fill a box. Processing several small chunks at once matters
    if they cut across the source's layout, as in a transpose, where each chunk alone would touch the whole source.
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


def check_coverage(shape: Sequence[int], chunks: Iterable[Box], what: str) -> None:
    """Raise CheckpointError unless the chunks hold every element of a tensor of this shape exactly once.

    Empty chunks are ignored. `what` names tensor and file in the message. Linear in chunks for the usual grids.

    How: let g(x) = (number of chunks holding element x) - 1. Its difference along every axis is nonzero only at corners
    of chunks, and vanishes everywhere exactly if g does; so corners, with sign, must cancel. The lexicographically
    first remaining corner is itself an element with g != 0, and is reported.
    """
    chunks = [c for c in chunks if c.numel]
    whole = Box.whole(shape)
    for chunk in chunks:
        if not chunk.inside(shape):
            raise CheckpointError(f"{what}: expected chunks inside shape {whole.sizes}, got {chunk}")
    if not whole.numel or (len(chunks) == 1 and chunks[0] == whole):
        return
    # Axis by axis, so that neighbours cancel before the next axis doubles the corners. A key holds, per axis,
    # a corner coordinate (axes done) or an interval (axes to do).
    corners: dict[tuple[int | tuple[int, int], ...], int] = {_intervals(whole): -1}
    for chunk in chunks:
        key = _intervals(chunk)
        corners[key] = corners.get(key, 0) + 1
    limit = 64 * (len(chunks) + 1024)
    for axis in range(len(shape)):
        split: dict[tuple[int | tuple[int, int], ...], int] = {}
        for key, count in corners.items():
            interval = key[axis]
            assert isinstance(interval, tuple)
            for corner, sign in zip(interval, (1, -1), strict=True):
                part = (*key[:axis], corner, *key[axis + 1 :])
                total = split.get(part, 0) + sign * count
                if total:
                    split[part] = total
                else:
                    split.pop(part, None)
            if len(split) > limit:
                raise CheckpointError(
                    f"{what}: {len(chunks)} chunks of {whole.sizes} are cut too irregularly to check"
                )
        corners = split
    corners = {key: count for key, count in corners.items() if count}
    if corners:
        first = min(corners, key=lambda key: tuple(c for c in key if isinstance(c, int)))
        held = sum(c.numel for c in chunks)
        raise CheckpointError(
            f"{what}: expected every element of shape {whole.sizes} in exactly one chunk, but element {first} is in "
            f"{corners[first] + 1} ({len(chunks)} chunks hold {held} elements, the tensor has {whole.numel})"
        )


def _intervals(box: Box) -> tuple[int | tuple[int, int], ...]:
    return tuple(zip(box.offsets, box.stops, strict=True))


MAX_CHUNKS = 1 << 20
"""The most chunks of a tensor that a writer makes: each is a Box in memory, and a hostile shape may claim any
number."""


def grid_of_chunks(shape: Sequence[int], block: Sequence[int]) -> tuple[Box, ...]:
    """Blocks covering the shape, in row-major order; blocks at the upper ends are smaller. None without elements.

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


class ChunkIndex:
    """Which chunks of a tensor a box touches, by array arithmetic: there may be 100,000 of them."""

    def __init__(self) -> None:
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def touching(self, info: TensorInfo, box: Box) -> list[int]:
        """Positions in `info.chunks` of the chunks that share elements with the box."""
        if not box.numel or len(info.chunks) == 1:
            return list(range(len(info.chunks))) if box.numel else []
        if info.name not in self._bounds:
            starts = np.array([c.offsets for c in info.chunks], np.int64).T.copy()
            sizes = np.array([c.sizes for c in info.chunks], np.int64).T
            self._bounds[info.name] = (starts, starts + sizes)
        hits = np.ones(len(info.chunks), np.bool_)
        for start, stop, low, high in zip(*self._bounds[info.name], box.offsets, box.stops, strict=True):
            hits &= (start < high) & (stop > low)
        return [int(index) for index in np.flatnonzero(hits)]


def box_of(info: TensorInfo, box: Box | None) -> Box:
    """The box to read, the whole tensor if None. ValueError if it is not inside."""
    if box is None:
        return Box.whole(info.shape)
    if not box.inside(info.shape):
        raise ValueError(f"tensor {info.name!r}: expected a box inside shape {info.shape}, got {box}")
    return box
