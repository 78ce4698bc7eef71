"""Count the collectives that a traced function performs, from its jaxpr: no compiler has merged or widened them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


class Collective(NamedTuple):
    """``kind``: JAX's primitive name (``all_gather``, ``reduce_scatter``, ``psum``); ``size``: full elements."""

    kind: str
    dtype: str
    size: int


_KINDS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum": "psum",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
    "all_gather_invariant": "all_gather",
    "psum_invariant": "psum",
}


def count_collectives(function: Any, *args: Any) -> Counter[Collective]:
    """How often each collective runs in one call of ``function``; loops with a fixed length are multiplied out.

    ``args`` may be ``jax.ShapeDtypeStruct``s. Code that XLA later removes as unused is counted. Raises ``ValueError``
    for a collective in a loop of unknown length.
    """
    found: Counter[Collective] = Counter()
    _count(jax.make_jaxpr(function)(*args).jaxpr, 1, found)
    return found


def _count(jaxpr: Any, times: int, found: Counter[Collective]) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _KINDS:
            for operand, result in zip(equation.invars, equation.outvars, strict=True):
                size = max(operand.aval.size, result.aval.size)
                found[Collective(_KINDS[name], result.aval.dtype.name, size)] += times
        inside: Counter[Collective] = Counter()
        for inner in _inner_jaxprs(equation.params):
            _count(inner, times * (equation.params["length"] if name == "scan" else 1), inside)
        if inside and name == "while":
            raise ValueError(
                "expected collectives outside while loops, whose length is unknown before they run"
            )
        found.update(inside)


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in jax.tree.leaves(list(params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value
