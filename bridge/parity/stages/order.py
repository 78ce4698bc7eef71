"""One more run of each side in the compute dtype, with the rows of the batch in another order.

Sums over the batch are then rounded otherwise. So the distance of the two runs' gradients is a second estimate of what
rounding does, besides the distance from float64, and the floor is the larger of both. A loss that is a sum or a mean
over rows has the same gradients in any order; where they change by more than rounding can explain, something takes a
row's place for its content, and the run is no estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bridge.parity.partners.runs import Runs
from bridge.parity.partners.weight_map import WeightMap
from bridge.parity.recorded.distance import epsilon, gap, noise
from bridge.parity.recorded.recording import Leaves
from bridge.parity.recorded.store import trim_heap

_FAR = 64.0
"""Times the rounding from float64: two samples of rounding are never that far from each other."""


@dataclass(frozen=True)
class Reordered:
    """How far the two orders are apart, the larger one of both sides.

    ``loss``: absolute; ``gradients``: Euclidean norms by JAX parameter. Zero and empty where the run says nothing;
    ``remark`` says why, if a reader should know.
    """

    loss: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict)
    remark: str = ""


def reordered(runs: Runs, batch: Any, weights: WeightMap) -> Reordered:
    """Run both sides once more. Nothing is run for a batch of one row, or for that of a trace (None)."""
    rows = _rows(batch)
    if rows < 2:
        return Reordered()
    order = _order(rows)
    given = _mapped(batch, lambda array: array[order] if _leading(array) == rows else array)
    loss, gradients, far = 0.0, dict[str, float](), dict[str, str]()
    for name, side, low, high in (
        ("torch", runs.torch, runs.torch_low, runs.torch_high),
        ("JAX", runs.jax, runs.jax_low, runs.jax_high),
    ):
        try:
            found = side.in_order(given, order.tolist(), runs.dtype)
            trim_heap()
        except Exception as error:
            return Reordered(remark=f"rows in another order: not run: {type(error).__name__}: {error!s:.200}")
        three = found, low, high
        own: list[Leaves] = [
            run.gradients if name == "JAX" else weights.to_jax(run.gradients, gradients=True) for run in three
        ]
        worst = 0.0
        # One at a time: together the gradients are as large as the model.
        for key in (None, *own[2]):
            one, two, values = (
                [np.asarray(run.loss, np.float64) for run in three]
                if key is None
                else [leaves[key] for leaves in own]
            )
            apart, norm = gap(one, two), float(np.linalg.norm(values))
            if not math.isfinite(apart):
                continue
            if key is None:
                loss = max(loss, apart)
            else:
                gradients[key] = max(gradients.get(key, 0.0), apart)
            least = max(_FAR * noise(two, values, runs.dtype), math.sqrt(epsilon(runs.dtype)) * norm)
            if apart > least and apart / norm > worst:
                worst = apart / norm
                far[name] = (
                    f"{'the loss' if key is None else f'the gradient of {key}'} changes by {worst:.2g}"
                )
    if not far:
        return Reordered(loss, gradients)
    what = "; ".join(f"in {name} {text} of its size" for name, text in far.items())
    if len(far) == 2:
        return Reordered(remark=f"both models depend on the order of the batch's rows: {what}")
    (name,) = far
    return Reordered(
        remark=f"the {name} model depends on the order of the batch's rows, the other one does not: {what}; does it "
        "take another axis for that of the batch?"
    )


def _order(rows: int) -> np.ndarray:
    order = np.random.default_rng(0).permutation(rows)
    return order[::-1] if np.array_equal(order, np.arange(rows)) else order


def _rows(batch: Any) -> int:
    """The length of the first array's leading axis; 0 without an array."""
    found: list[int] = []
    _mapped(batch, lambda array: found.append(_leading(array)))
    return next((rows for rows in found if rows), 0)


def _leading(array: Any) -> int:
    shape = getattr(array, "shape", ())
    return int(shape[0]) if shape else 0


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with all that is no mapping, tuple or list changed."""
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        items = [_mapped(value, change) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return change(tree)
