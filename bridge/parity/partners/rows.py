"""A row of the report: the result of one comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from bridge.parity.recorded.distance import FACTOR, Distance, distance

Stage = Literal[
    "weights", "forward", "precision", "buffers", "loss", "backward", "gradients", "update", "steps"
]
STAGES: tuple[Stage, ...] = get_args(Stage)
BUFFER = "buffer"
"""``Row.kind`` of a buffer; buffers appear among the parameters before and after training."""
Verdict = Literal["same", "introduced", "inherited", "differs", "unknown"]


@dataclass(frozen=True)
class Row:
    """Two values that should be the same.

    ``name``, ``partner``: the torch and the JAX module or parameter; ``leaf``: which output of a module, ``call``:
    which call of it. ``shape``: of the JAX side. ``error``: distance of the float64 runs over the larger norm;
    ``floor``: the error that rounding explains, over the same norm; ``ratio``: error over floor. ``max_ulp``: in the
    compute dtype. ``where``: index in the JAX array of the largest difference, ``values``: torch's and JAX's there.

    ``local``: the ratio when the JAX module runs on torch's inputs and on torch's values for the modules inside; NaN
    if it did not run. ``verdict``: "introduced" by this module, "inherited" from another one, "differs" if the origin
    was not tested, "unknown" if nothing could be compared (``note`` says why). ``layout``: the relation between the
    two arrays' layouts. ``cause``: a known cause that explains the difference.
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

    With ``local`` the row says whether the difference was introduced here. The row belongs to the first call and has no
    leaf, layout, cause or note.
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
