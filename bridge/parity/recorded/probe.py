"""Fixed numbers for the loss of a model that has none: the sum of each output leaf times its numbers.

Two models may name their outputs and order their axes differently, so the numbers are made for torch's leaves and laid
out like the arrays that they multiply.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.parity.recorded.align import match_leaves
from bridge.parity.recorded.recording import Side


def probe_values(place: str, shape: Sequence[int]) -> np.ndarray:
    """Standard normal float64 numbers of ``shape`` for the output leaf at ``place``."""
    return np.random.default_rng(zlib.crc32(place.encode())).standard_normal(tuple(shape))


def in_rows(numbers: np.ndarray, rows: Sequence[int] | None) -> np.ndarray:
    """Numbers for the outputs of a batch whose rows are in the order ``rows``; None for the order that it has.

    The axis of rows is the first one that is as long; numbers without one stay as they are.
    """
    axes = [] if rows is None else [axis for axis, size in enumerate(numbers.shape) if size == len(rows)]
    return np.take(numbers, np.asarray(rows), axes[0]) if axes else numbers


def matched_probes(torch: Side, jax: Side, batch: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Numbers for both models' output leaves, by the leaves' places.

    Raises ``ValueError`` where no floating output of the one fits one of the other.
    """
    ours, theirs = (side.record(batch, "float64", backward=False).calls[0].outputs for side in (torch, jax))
    first: dict[str, np.ndarray] = {}
    second: dict[str, np.ndarray] = {}
    for name, other, way in match_leaves(ours, theirs):
        if ours[name].dtype.kind not in "iub":
            first[name] = probe_values(str(len(first)), ours[name].shape)
            second[other] = way.to_jax(first[name])
    if not first:
        shapes = [{name or "output": leaf.shape for name, leaf in one.items()} for one in (ours, theirs)]
        raise ValueError(
            f"loss: expected a floating output of the torch model, {shapes[0]}, that fits one of the JAX model, "
            f"{shapes[1]}; give a loss"
        )
    return first, second
