"""Count the collectives of a program: as written, from its jaxpr, and as compiled, from XLA's text.

The jaxpr has the requested collectives, before a compiler merges or widens them. The compiled text has the collectives
that XLA kept, merged, duplicated or added; ``scheduled.py`` reads the text.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import jax

from bridge.core.dtype_names import full_name
from jax_impl.diagnostics.scheduled import read_collectives
from jax_impl.modules.seal import jaxprs_of


class Collective(NamedTuple):
    """``kind``: JAX's primitive name, such as ``all_gather`` or ``psum``; ``size``: elements of the full array."""

    kind: str
    dtype: str
    size: int


_KINDS = {"all_gather_invariant": "all_gather", "psum_invariant": "psum"} | {
    name: name for name in ("all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "reduce_scatter")
}


def count_collectives(function: Any, *args: Any) -> Counter[Collective]:
    """How often each collective runs in one call of ``function``; a loop of fixed length counts every iteration.

    ``args`` may be ``jax.ShapeDtypeStruct``s. Code that XLA later removes as unused is counted. Raises ``ValueError``
    for a collective in a loop of unknown length, and for branches of a ``cond`` whose collectives differ.
    """
    return _counted(jax.make_jaxpr(function)(*args).jaxpr)


def _counted(jaxpr: Any) -> Counter[Collective]:
    counter: Counter[Collective] = Counter()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _KINDS:
            for operand, result in zip(equation.invars, equation.outvars, strict=True):
                size = max(operand.aval.size, result.aval.size)
                counter[Collective(_KINDS[name], result.aval.dtype.name, size)] += 1
        inside = [_counted(inner) for inner in jaxprs_of(equation)]
        if name == "while" and any(inside):
            raise ValueError(
                "expected collectives outside while loops, whose length is unknown before they run"
            )
        if name == "cond":
            if any(branch != inside[0] for branch in inside):
                raise ValueError(
                    "expected the same collectives in every branch of a cond, since the branch that will run is "
                    f"unknown, got {[dict(branch) for branch in inside]}"
                )
            inside = inside[:1]
        times = equation.params["length"] if name == "scan" else 1
        for counts in inside:
            counter.update({collective: times * count for collective, count in counts.items()})
    return counter


def count_compiled_collectives(compiled: Any) -> Counter[Collective]:
    """How often each collective runs in one call of ``compiled``, a ``jax.stages.Compiled`` or its text.

    Sizes are elements of full arrays, as in ``count_collectives``; each array of a merged collective counts separately.
    The CPU compiler transfers bfloat16 as float32. Raises ``ValueError`` for a collective in a loop of unknown length
    or in a branch.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    counts: Counter[Collective] = Counter()
    for collective in read_collectives(text):
        for array in collective.arrays:
            counts[Collective(collective.kind, full_name(array.dtype), array.size)] += collective.times
    return counts
