"""What a function saves for its backward, without what elementwise operations make of the rest of it.

JAX saves the exponentials of a softmax beside its quotients, and gate, sigmoid and product of a gated layer. Alone, XLA
fuses elementwise operations into what uses their results, also in backward, and keeps no such array. Behind a barrier
each is an array. So of what is computed in this way only the beginnings are saved, and backward makes the rest anew::

    saved by JAX     exp(scores - max)    sum    exp(...) / sum
    kept             scores    max    sum
    made anew        exp(scores - max), exp(...) / sum
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from jax_impl.runtime.traced import inlined, operands

_ELEMENTWISE = frozenset(
    """
    abs add and atan2 broadcast_in_dim cbrt ceil clamp convert_element_type copy cos div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pow
    reduce_precision reshape round rsqrt select_n sign sin sinh cosh sqrt square squeeze stop_gradient sub tan tanh
    transpose xor
    """.split()
)
# What is kept instead of an array may need so much more than the array, for such as the maximum of a row.
_MORE = 1.1


@dataclass(frozen=True)
class Derived:
    """``program``: a function that returns results, and then what it keeps. ``recipe``: what that is for.

    ``recipe`` takes what is kept, and the function's first arguments, and returns what the function saved before.
    """

    program: ClosedJaxpr
    recipe: ClosedJaxpr


def derive(program: ClosedJaxpr, results: int, given: int) -> Derived:
    """``program`` returns so many results, and behind them what it saves; backward has its first ``given`` arguments."""
    program = inlined(program)
    jaxpr = program.jaxpr
    made = {v: number for number, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
    saved = list(dict.fromkeys(operands(jaxpr.outvars[results:])))
    known = dict.fromkeys(jaxpr.invars[:given])
    kept: dict[Any, None] = {}
    for variable in sorted(saved, key=lambda v: made.get(v, -1)):
        beginnings, _ = _origins(jaxpr, made, [variable], {**known, **kept})
        alone = _bytes(beginnings) > _MORE * _bytes([variable])
        kept.update(dict.fromkeys([variable] if alone else beginnings))
    _, equations = _origins(jaxpr, made, saved, {**known, **kept})
    taken = [*kept, *jaxpr.invars[:given]]
    whole = Jaxpr(
        jaxpr.constvars, jaxpr.invars, [*jaxpr.outvars[:results], *kept], jaxpr.eqns, jaxpr.effects, jaxpr.debug_info
    )
    recipe = Jaxpr((), taken, jaxpr.outvars[results:], equations, frozenset(), jaxpr.debug_info)
    return Derived(ClosedJaxpr(whole, program.consts), ClosedJaxpr(recipe, ()))


def _origins(
    jaxpr: Jaxpr, made: dict[Any, int], wanted: Sequence[Any], known: dict[Any, None]
) -> tuple[list[Any], list[Any]]:
    """From what no elementwise operation makes ``wanted`` comes, beside what is ``known``, and by which equations."""
    found: dict[Any, None] = {}
    numbers: set[int] = set()
    left = list(wanted)
    while left:
        variable = left.pop()
        if variable in known or variable in found:
            continue
        number = made.get(variable)
        if number is None or jaxpr.eqns[number].primitive.name not in _ELEMENTWISE:
            found[variable] = None
        elif number not in numbers:
            numbers.add(number)
            left += operands(jaxpr.eqns[number].invars)
    return list(found), [jaxpr.eqns[number] for number in sorted(numbers)]


def _bytes(variables: Iterable[Any]) -> int:
    return sum(v.aval.size * getattr(v.aval.dtype, "itemsize", 4) for v in variables)
