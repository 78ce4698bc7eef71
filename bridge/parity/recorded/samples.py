"""Which elements of activations a trace keeps if it does not keep all: the same elements on both sides.

Two sides may lay out an array differently: transposed, NHWC, with split heads. So positions are chosen by the size of
an axis, wherever the axis is. With ``{8: 2, 512: 16}``, for a batch of 8 rows of 512 tokens::

    torch [8, 512, D]      ->  [2, 16, D]           2 rows, 16 tokens, all features
    torch [8, h, 512, d]   ->  [2, h, 16, d]
    JAX   [8, 512, h, d]   ->  [2, 16, h, d]        the same elements
    torch [4096, D]        ->  [32, D]              rows and tokens in one axis, of the size of their product

Parameters, their gradients and updates stay whole: mappings fuse, split and stack them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bridge.parity.recorded.recording import Leaves


@dataclass(frozen=True)
class Sampling:
    """``kept``: the positions to keep on an axis, by the axis's size. Empty: all arrays stay whole."""

    kept: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, samples: Mapping[int, int] | None, weights: Leaves) -> Sampling:
        """Choose positions, always the same for a size and a number; they include the first and the last.

        ``samples``: how many positions to keep, by the size of an axis. With two sizes, the first belongs to the outer
        axis if both are merged into one. ``ValueError`` for numbers out of range, for more than two sizes, and for a
        size that an axis of a parameter also has, since it would be taken for the batch's.
        """
        samples = samples or {}
        if len(samples) > 2:
            raise ValueError(
                f"samples: expected one size of an axis or two (rows, tokens), got {sorted(samples)}"
            )
        for size, number in samples.items():
            if not 0 < number < size:
                raise ValueError(
                    f"samples: expected between 1 and {size - 1} positions of an axis of {size}, got {number}"
                )
        kept = {size: _positions(size, number) for size, number in samples.items()}
        if len(kept) == 2:
            (size, outer), (inner_size, inner) = kept.items()
            kept[size * inner_size] = tuple(
                outer_position * inner_size + inner_position
                for outer_position in outer
                for inner_position in inner
            )
        for name, leaf in weights.items():
            taken = sorted(kept.keys() & set(leaf.shape))
            if taken:
                raise ValueError(
                    f"samples: {name} {list(leaf.shape)} has an axis of {taken[0]}, too, so features would be taken "
                    f"for {'rows or tokens' if taken[0] in samples else 'rows times tokens'}; capture with a batch of "
                    "other sizes"
                )
        return cls(kept)

    def cut(self, array: np.ndarray) -> np.ndarray:
        """The part of an activation that is kept."""
        for axis, size in enumerate(array.shape):
            if size in self.kept:
                array = array.take(self.kept[size], axis)
        return array


def _positions(size: int, number: int) -> tuple[int, ...]:
    """Irregular positions, so that no pattern of the model can hide between them."""
    ends = [size - 1, 0][:number]
    # Seeded by the size: both captures choose the same positions without communication.
    middle = random.Random(size).sample(range(1, size - 1), number - len(ends))
    return tuple(sorted((*ends, *middle)))


def statistics(array: np.ndarray) -> dict[str, object]:
    """Statistics of the whole array, for a reader without it; mean to largest use only finite elements."""
    numbers: dict[str, object] = {"shape": list(array.shape), "dtype": array.dtype.name}
    if array.size:
        values = array.astype(np.float64).reshape(-1)
        finite = values[np.isfinite(values)]
        numbers["nonfinite"] = values.size - finite.size
        if finite.size:
            with np.errstate(over="ignore"):
                norm, mean = float(np.linalg.norm(finite)), float(finite.mean())
            numbers |= {"norm": norm, "mean": mean, "rms": norm / math.sqrt(finite.size)}
            numbers |= {"least": float(finite.min()), "largest": float(finite.max())}
    return numbers
