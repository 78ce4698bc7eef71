"""What one comparison says: a row of the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bridge.parity.recorded.distance import FACTOR, Distance, distance

Stage = Literal[
    "weights", "forward", "precision", "buffers", "loss", "backward", "gradients", "update", "steps"
]
STAGES: tuple[Stage, ...] = (
    *("weights", "forward", "precision", "buffers", "loss"),
    *("backward", "gradients", "update", "steps"),
)
BUFFER = "buffer"
"""``Row.kind`` of a buffer, which stands among parameters before and after training."""
Verdict = Literal["same", "introduced", "inherited", "differs", "unknown"]


@dataclass(frozen=True)
class Row:
    """Two values that should be the same.

    ``name``, ``partner``: the torch and the JAX module or parameter; ``leaf``: which of a module's outputs, ``call``:
    which of its calls. ``shape``: of the JAX side. ``error``: distance of the float64 runs over the larger norm;
    ``floor``: what rounding explains, over the same norm; ``ratio``: of the two. ``max_ulp``: in the compute dtype.
    ``where``: index in the JAX array of the largest difference, ``values``: torch's and JAX's there.

    ``local``: the ratio when the JAX module runs on torch's inputs and on torch's values of the modules inside; NaN
    where it was not run. ``verdict``: "introduced" by this module, "inherited" from another one, "differs" where that
    was not asked, "unknown" where nothing could be compared (``note`` says why). ``layout``: how the arrays lie to each
    other. ``cause``: a known one that explains the difference.
    """

    stage: Stage
    name: str
    partner: str
    leaf: str
    call: int
    kind: str
    shape: tuple[int, ...]
    error: float
    floor: float
    ratio: float
    max_ulp: int
    cosine: float
    where: tuple[int, ...]
    values: tuple[float, float]
    verdict: Verdict
    local: float = math.nan
    layout: str = ""
    cause: str = ""
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether the difference is more than rounding."""
        return self.verdict not in ("same", "unknown")


def ratio_of(apart: Distance, floor: float) -> float:
    """Distance over floor; 0 for equal arrays."""
    if apart.absolute == 0:
        return 0.0
    return apart.absolute / floor if floor > 0 else math.inf


def row_of(
    stage: Stage,
    names: tuple[str, str],
    torch: np.ndarray,
    jax: np.ndarray,
    floor: float,
    *,
    dtype: str = "float32",
    kind: str = "",
    local: float = math.nan,
) -> Row:
    """Compare ``torch``, already in the layout of ``jax``, with ``jax``; ``floor``: absolute.

    With ``local`` the row says whether the difference was introduced here. The row is of the first call, without leaf,
    layout, cause and note.
    """
    apart = distance(torch, jax, dtype)
    ratio = ratio_of(apart, floor)
    verdict: Verdict = "same"
    if local > FACTOR:
        verdict = "introduced"
    elif ratio > FACTOR:
        verdict = "differs" if math.isnan(local) else "inherited"
    return Row(
        stage,
        *names,
        "",
        0,
        kind,
        tuple(jax.shape),
        apart.relative,
        floor / apart.norm if apart.norm > 0 else 0.0,
        ratio,
        apart.max_ulp,
        apart.cosine,
        apart.where,
        apart.values,
        verdict,
        local,
    )
