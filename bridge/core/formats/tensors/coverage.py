"""Whether chunks hold every element of a tensor exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bridge.core.formats.tensors.base import Box, CheckpointError


def check_coverage(shape: Sequence[int], chunks: Iterable[Box], what: str) -> None:
    """Raise CheckpointError unless the chunks hold every element of a tensor of this shape exactly once.

    Empty chunks are ignored. `what` names tensor and file in the message. Linear in the number of chunks for the
    usual grids.

    How: let g(x) = (number of chunks holding element x) - 1. Its difference along every axis is nonzero only at
    corners of chunks, and vanishes everywhere exactly when g does; so corners, with sign, must cancel. The
    lexicographically first corner that survives is itself an element with g != 0: the one to report.
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
