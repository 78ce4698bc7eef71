"""Whether both sides lose as much to a low compute dtype: a float32 island that one of them lacks shows here.

A softmax, a norm or a router that one side computes in float32 and the other in bfloat16 is the same in float64. In
bfloat16 the module alone then rounds elsewhere, and may have a larger error on one side::

    torch  bfloat16 -> [ norm in float32  ] -> bfloat16      |low - high| = 3.1e-3
    JAX    bfloat16 -> [ norm in bfloat16 ] -> bfloat16      |low - high| = 3.3e-3      |torch - JAX| = 3.3e-3, else 0

Two right programs may cast in another order, so rounding elsewhere counts only where the other modules of the kind
round alike. A softmax in bfloat16 inside of an attention that casts in another order anyway is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge.parity.partners.rows import Row
from bridge.parity.recorded.distance import distance, epsilon, noise

COARSER = 2.0
"""How much more one side may lose to the compute dtype: right pairs differ by up to 1.4, by the order of casts."""
_FEW = 256
"""Elements below which a norm of rounding errors is chance."""
_APART, _ALIKE = 0.5, 0.1
"""Of the rounding error: how far a module's sides are apart that round elsewhere, and how far at most if alike."""


@dataclass(frozen=True)
class Rounding:
    """What the compute dtype does to torch's and to JAX's values, and how far the two are apart in it; absolute."""

    torch: float
    jax: float
    between: float

    @property
    def floor(self) -> float:
        return max(self.torch, self.jax)


def rounding(
    dtype: str, torch: tuple[np.ndarray | None, np.ndarray], jax: tuple[np.ndarray | None, np.ndarray]
) -> Rounding:
    """``torch``, ``jax``: values in the compute dtype, None where they are not known, and in float64."""
    low, other = torch[0], jax[0]
    between = math.nan
    if low is not None and other is not None and low.shape == other.shape:
        between = distance(low, other, dtype).absolute
    return Rounding(noise(*torch, dtype), noise(*jax, dtype), between)


def precision_rows(
    row: Row, outputs: Collection[str], coarse: Mapping[str, Rounding], dtype: str
) -> Iterator[Row]:
    """A row for a module, from its forward row: nothing in float32.

    ``coarse``: by output leaf and by what the module gives to modules inside of it; ``outputs`` says which of them are
    outputs. The row's ``ratio`` is that of the two errors, its ``local`` the distance in the dtype over their mean.
    """
    if epsilon(dtype) <= epsilon("float32") or math.prod(row.shape) < _FEW:
        return
    ratios = {
        where: one.floor / min(one.torch, one.jax)
        for where, one in coarse.items()
        if min(one.torch, one.jax) > 0
    }
    if not ratios:
        return
    where = max(ratios, key=lambda one: ratios[one])
    ratio, worst = ratios[where], coarse[where]
    apart = max(2 * one.between / (one.torch + one.jax) for one in coarse.values() if one.floor > 0)
    found = replace(
        row, stage="precision", error=worst.floor, floor=min(worst.torch, worst.jax), ratio=ratio, local=apart
    )
    if not ratio > COARSER:
        yield replace(found, verdict="same", cause="", note="")
        return
    side, other = ("JAX", "torch") if worst.jax > worst.torch else ("torch", "JAX")
    yield replace(
        found,
        verdict="introduced",
        cause=f"{side} loses {ratio:.2g} times as much to {dtype} as {other}: a part that one side keeps in float32",
        note="" if where in outputs else f"in what it gives as {where}",
    )


def odd_ones(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows, with verdicts by what the other modules of a kind do.

    A module that rounds elsewhere although all others of its kind round alike is odd. One that loses more, as others of
    its kind do that round elsewhere, too, shows what the two frameworks' kernels are like (BatchNorm), and is not.
    """
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        if row.stage == "precision":
            by_kind.setdefault(row.kind, []).append(row.local)
    for row in rows:
        if row.stage == "precision":
            others = list(by_kind[row.kind])
            others.remove(row.local)
            row = _among(row, others)
        yield row


def _among(row: Row, others: Sequence[float]) -> Row:
    if not others:
        return row
    alike = max(others) < _ALIKE
    if row.verdict == "introduced" and not alike:
        return replace(row, verdict="same", note=f"so do others of {row.kind}: {row.cause}", cause="")
    if row.verdict == "same" and alike and row.local > _APART:
        cause = f"the two sides round elsewhere, which no other {row.kind} does: a part that one of them keeps in "
        return replace(row, verdict="introduced", cause=f"{cause}float32")
    return row
