"""Tensors stored in few bits with scales: which scales a box needs, and the numbers that payload and scales stand for.

::

    payload (4, 6)                scale (4, 1), a row's         (1, 6), a column's      (2, 6), of two rows each
    | p00 p01 p02 p03 p04 p05 |   | s0 |                        | s0 s1 s2 s3 s4 s5 |   | s00 s01 s02 s03 s04 s05 |
    | p10 ...                 |   | s1 |
    | p20 ...                 |   | s2 |                                                | s10 s11 ...             |
    | p30 ...                 |   | s3 |

A number is its payload times its scale, in float32. A scale has as many axes as its tensor. Each axis of the scale has
a size that divides the tensor's: ``n`` numbers that follow each other along an axis of ``n * s`` share one of ``s``
scales. Optimizers store a scale for each row. A checkpoint that was translated to another model's layout keeps payload
and scales bit for bit, so there the scales lie as its source's rows do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader


def run_lengths(shape: Sequence[int], scale_shape: Sequence[int]) -> tuple[int, ...] | None:
    """For each axis the numbers that share a scale; None where the scale is of no tensor of this shape."""
    if len(shape) != len(scale_shape):
        return None
    pairs = list(zip(shape, scale_shape, strict=True))
    if any(not s or n % s for n, s in pairs):
        return None
    return tuple(n // s for n, s in pairs)


def scale_box(box: Box, runs: Sequence[int]) -> Box:
    """The scales of the numbers in ``box``, of a tensor with these ``run_lengths``."""
    low = tuple(offset // run for offset, run in zip(box.offsets, runs, strict=True))
    high = (-(-stop // run) for stop, run in zip(box.stops, runs, strict=True))
    return Box(low, tuple(max(0, stop - start) for start, stop in zip(low, high, strict=True)))


def decode(payload: np.ndarray, box: Box, scale: np.ndarray, runs: Sequence[int]) -> np.ndarray:
    """The numbers of ``box`` in float32: ``payload`` has the box's sizes, ``scale`` those of its ``scale_box``."""
    for axis, (run, start, stop) in enumerate(zip(runs, box.offsets, box.stops, strict=True)):
        if run > 1 and scale.shape[axis] > 1:
            scale = np.take(scale, np.arange(start, stop) // run - start // run, axis)
    return payload.astype(np.float32) * scale.astype(np.float32, copy=False)


def read_decoded(reader: CheckpointReader, name: str, scale: str, box: Box | None = None) -> np.ndarray:
    """The numbers in one block (default: all) of tensor ``name`` with the scales of tensor ``scale``, in float32.

    Raises CheckpointError, with both names, where the scales are of a tensor of another shape.
    """
    info, scales = reader.tensors[name], reader.tensors[scale]
    runs = run_lengths(info.shape, scales.shape)
    if runs is None:
        raise CheckpointError(
            f"{reader.path}: {scale} has shape {scales.shape}: expected each size to divide the size of {name}, of "
            f"shape {info.shape}, along the same axis"
        )
    box = Box.whole(info.shape) if box is None else box
    return decode(reader.read(name, box), box, reader.read(scale, scale_box(box, runs)), runs)
