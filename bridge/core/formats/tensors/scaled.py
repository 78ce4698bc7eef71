"""Tensors stored in few bits with scales: which scales a box needs, and the numbers that payload and scales represent.

::

    payload (4, 6)                scale (4, 1), a row's         (1, 6), a column's      (2, 6), of two rows each
    | p00 p01 p02 p03 p04 p05 |   | s0 |                        | s0 s1 s2 s3 s4 s5 |   | s00 s01 s02 s03 s04 s05 |
    | p10 ...                 |   | s1 |
    | p20 ...                 |   | s2 |                                                | s10 s11 ...             |
    | p30 ...                 |   | s3 |

A number is its payload times its scale, in float32. A scale tensor has as many axes as its tensor. The size of each of
its axes divides the tensor's size: ``n`` consecutive numbers along an axis of ``n * s`` share one of ``s`` scales.
Optimizers store one scale for each row. A checkpoint that was translated to another model's layout keeps payload and
scales bit for bit, so its scales follow the rows of the source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader


def run_lengths(shape: Sequence[int], scale_shape: Sequence[int]) -> tuple[int, ...] | None:
    """For each axis, how many numbers share a scale; None if the scale does not fit a tensor of this shape."""
    if len(shape) != len(scale_shape):
        return None
    pairs = list(zip(shape, scale_shape, strict=True))
    if any(not s or n % s for n, s in pairs):
        return None
    return tuple(n // s for n, s in pairs)


def scale_box(box: Box, runs: Sequence[int]) -> Box:
    """The box of scales for the numbers in ``box``, for a tensor with these ``run_lengths``."""
    low = tuple(offset // run for offset, run in zip(box.offsets, runs, strict=True))
    high = (-(-stop // run) for stop, run in zip(box.stops, runs, strict=True))
    return Box(low, tuple(max(0, stop - start) for start, stop in zip(low, high, strict=True)))


def decode(payload: np.ndarray, box: Box, scale: np.ndarray, runs: Sequence[int]) -> np.ndarray:
    """The numbers of ``box`` in float32: ``payload`` has the box's sizes, ``scale`` the sizes of its ``scale_box``."""
    for axis, (run, start, stop) in enumerate(zip(runs, box.offsets, box.stops, strict=True)):
        if run > 1 and scale.shape[axis] > 1:
            scale = np.take(scale, np.arange(start, stop) // run - start // run, axis)
    return payload.astype(np.float32) * scale.astype(np.float32, copy=False)


def read_decoded(reader: CheckpointReader, name: str, scale: str, box: Box | None = None) -> np.ndarray:
    """The numbers in one block (default: all) of tensor ``name`` with the scales of tensor ``scale``, in float32.

    Raises CheckpointError, with both names, if the scales belong to a tensor of another shape.
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
