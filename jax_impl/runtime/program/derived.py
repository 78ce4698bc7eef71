"""What a function saves for its backward, without what elementwise operations make of the rest of it.

JAX saves a softmax's exponentials besides its quotients, and of a gated layer gate, sigmoid and product. Alone, XLA
fuses elementwise operations into what uses their results, also in backward, and keeps no such array. Behind a barrier
each is an array. So of what elementwise operations make only the origins are saved, and backward makes the rest anew::

    saved by JAX      exp(scores - max)    sum    exp(scores - max) / sum
    saved             exp(scores - max)    sum
    made anew         exp(scores - max) / sum
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_impl.modules.seal import WITNESSED
from jax_impl.runtime.program.traced import inlined, operands

# In all versions of JAX: later ones have primitives of their own for what earlier ones write out, as 1 - x * x.
ELEMENTWISE = frozenset([
    "abs", "add", "and", "atan2", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "cos", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "log2", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "polynomial", "pow",
    "reduce_precision", "reshape", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "cosh", "sqrt",
    "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose", "xor",
])  # fmt: skip
# Of the bytes of an array: how many may be saved instead, with such as the maxima of its rows, and how many may be read
# to make it anew. Without a limit all layers' outputs would be read for a sum over them.
_SAVED, _READ = 1.1, 2.5


@dataclass(frozen=True)
class Derived:
    """``program`` returns results, and then what it saves; ``recipe`` makes what was to be saved.

    ``recipe`` takes what ``program`` saves, and after that the arguments that backward has.
    """

    program: ClosedJaxpr
    recipe: ClosedJaxpr


def derive(program: ClosedJaxpr, results: int, given: int) -> Derived:
    """``program`` returns so many results, and then what it saves. Backward has its first ``given`` arguments."""
    program = inlined(program)
    jaxpr = program.jaxpr
    wanted = jaxpr.outvars[results:]
    free = jaxpr.invars[:given]
    origins = _Origins.of(jaxpr)
    saved: dict[Any, None] = {}
    for variable in sorted(dict.fromkeys(operands(wanted)), key=origins.place):
        found = origins.find([variable], {*free, *saved})
        new = [v for v in found.read if v not in saved and v not in free]
        cheap = _bytes(new) <= _SAVED * _bytes([variable]) and _bytes(found.read) <= _READ * _bytes(
            [variable]
        )
        saved.update(dict.fromkeys(new if cheap else [variable]))
    equations = [jaxpr.eqns[i] for i in origins.find(operands(wanted), {*free, *saved}).equations]
    whole = Jaxpr(
        jaxpr.constvars,
        jaxpr.invars,
        [*jaxpr.outvars[:results], *saved],
        jaxpr.eqns,
        jaxpr.effects,
        jaxpr.debug_info,
    )
    recipe = Jaxpr((), [*saved, *free], wanted, equations, frozenset(), jaxpr.debug_info)
    return Derived(ClosedJaxpr(whole, program.consts), ClosedJaxpr(recipe, ()))


class _Found(NamedTuple):
    """``read``: the origins; ``equations``: the numbers of those between."""

    read: list[Any]
    equations: list[int]


@dataclass(frozen=True)
class _Origins:
    """``made``: the number of the equation that makes a variable."""

    jaxpr: Jaxpr
    made: dict[Any, int]

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> _Origins:
        return cls(jaxpr, {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars})

    def place(self, variable: Any) -> int:
        """Its place in the order of the program."""
        return self.made.get(variable, -1)

    def find(self, wanted: Iterable[Any], known: Container[Any]) -> _Found:
        """What elementwise operations make ``wanted`` of: what is ``known``, and what no such operation makes."""
        read: dict[Any, None] = {}
        equations: set[int] = set()
        left = list(wanted)
        while left:
            variable = left.pop()
            number = self.made.get(variable)
            if number is None or variable in known or not _is_elementwise(self.jaxpr.eqns[number]):
                read[variable] = None
            elif number not in equations:
                equations.add(number)
                left += operands(self.jaxpr.eqns[number].invars)
        return _Found(list(read), sorted(equations))


def _is_elementwise(equation: Any) -> bool:
    if equation.primitive.name in ("custom_jvp_call", WITNESSED.name):
        # From JAX 0.12 on exact GELU's derivative has one.
        return all(map(_is_elementwise, equation.params["call_jaxpr"].jaxpr.eqns))
    return equation.primitive.name in ELEMENTWISE


def _bytes(variables: Iterable[Any]) -> int:
    # A key of random numbers has a dtype of its own, and few bytes.
    return sum(v.aval.size * getattr(v.aval.dtype, "itemsize", 4) for v in variables)
