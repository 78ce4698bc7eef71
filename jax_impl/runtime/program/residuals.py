"""A function's residuals for backward, without constants and without arrays that elementwise operations can recompute.

A saved constant, such as the zeros of ``jnp.where``, costs nothing as long as XLA may create it at its use. Behind a
barrier the constant is an array with all of an activation's elements, on every device.

JAX saves both the exponentials and the quotients of a softmax, and the gate, sigmoid and product of a gated layer.
Without a barrier, XLA fuses elementwise operations into their users, also in backward, and keeps no such array. Behind
a barrier each of them is an array. So for results of elementwise operations only the origins are saved, and backward
recomputes the rest::

    saved by JAX      exp(scores - max)    sum    exp(scores - max) / sum
    saved             exp(scores - max)    sum
    recomputed        exp(scores - max) / sum
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from jax_impl.modules.seal import WITNESSED, inner_program, outputs_of
from jax_impl.runtime.program.traced import inline_calls, operands

# For all versions of JAX: later ones have primitives for expressions that earlier ones write out (1 - x * x).
ELEMENTWISE = frozenset([
    "abs", "add", "and", "atan2", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "cos", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "log2", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "polynomial", "pow",
    "reduce_precision", "reshape", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "cosh", "sqrt",
    "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose", "xor",
])  # fmt: skip
# Limits in multiples of an array's bytes: how much may be saved instead (including small arrays such as maxima of its
# rows), and how much may be read to recompute it. Without limits, a sum over all layers' outputs would read all.
_SAVED, _READ = 1.1, 2.5


@dataclass(frozen=True)
class Derived:
    """``program`` returns results, then the arrays that it saves; ``recipe`` computes the original residuals.

    ``recipe`` takes the saved arrays of ``program``, then the arguments that backward has.
    """

    program: ClosedJaxpr
    recipe: ClosedJaxpr


def derive(program: ClosedJaxpr, results: int, inputs: int) -> Derived:
    """``program`` returns ``results`` results, then its residuals. Backward has its first ``inputs`` arguments."""
    program = inline_calls(program)
    jaxpr = program.jaxpr
    wanted = jaxpr.outvars[results:]
    free = jaxpr.invars[:inputs]
    origins = _Origins.of(jaxpr)
    saved: dict[Any, None] = {}
    for variable in sorted(dict.fromkeys(operands(wanted)), key=origins.place):
        origin = origins.find([variable], {*free, *saved})
        new = [v for v in origin.read if v not in saved and v not in free]
        cheap = _bytes(new) <= _SAVED * _bytes([variable]) and _bytes(origin.read) <= _READ * _bytes(
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
    """``read``: the origins; ``equations``: the indices of the equations between."""

    read: list[Any]
    equations: list[int]


@dataclass(frozen=True)
class _Origins:
    """``made``: the index of the equation that computes a variable."""

    jaxpr: Jaxpr
    made: dict[Any, int]

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> _Origins:
        return cls(jaxpr, {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars})

    def place(self, variable: Any) -> int:
        """The variable's position in the order of the program."""
        return self.made.get(variable, -1)

    def find(self, wanted: Iterable[Any], known: Container[Any]) -> _Found:
        """The origins of ``wanted``: ``known`` variables, and variables that no elementwise operation computes."""
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
        # From JAX 0.12 on, the derivative of exact GELU contains one.
        return all(map(_is_elementwise, equation.params["call_jaxpr"].jaxpr.eqns))
    return equation.primitive.name in ELEMENTWISE


def _bytes(variables: Iterable[Any]) -> int:
    # A random key has a special dtype, and few bytes.
    return sum(v.aval.size * getattr(v.aval.dtype, "itemsize", 4) for v in variables)


def with_dependence(function: Callable[..., Any], *args: Any) -> tuple[Any, list[bool]]:
    """``function(*args)``, and for each leaf of the result whether the leaf depends on ``args``."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves, depends = _run(program, args)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), depends


def with_derived(function: Callable[..., Any], inputs: int, *args: Any) -> tuple[Any, Saved, list[bool]]:
    """The result of ``function(*args)``, its residuals, and which leaves of the result depend on ``args``.

    Backward has the first ``inputs`` arguments.
    """
    program, (result, saved) = jax.make_jaxpr(function, return_shape=True)(*args)
    results = len(jax.tree.leaves(result))
    derived = derive(program, results, len(jax.tree.leaves(args[:inputs])))
    leaves, depends = _run(derived.program, args)
    return (
        jax.tree.unflatten(jax.tree.structure(result), leaves[:results]),
        Saved.of_leaves(leaves[results:], jax.tree.structure(saved), depends[results:], derived.recipe),
        depends[:results],
    )


def constants_of(program: ClosedJaxpr) -> list[Any]:
    """Variables that depend on no input but are operands of operations that do. JAX moves these out of loops."""
    jaxpr = inline_calls(program).jaxpr
    known = dict.fromkeys(jaxpr.invars, True)
    constants: dict[Any, None] = {}
    for equation in jaxpr.eqns:
        used = operands(equation.invars)
        depends = any(known.get(variable, False) for variable in used)
        known.update(dict.fromkeys(equation.outvars, depends))
        if depends:
            constants.update(dict.fromkeys(variable for variable in used if not known.get(variable, True)))
    return list(constants)


def _run(program: ClosedJaxpr, args: Any) -> tuple[list[Any], list[bool]]:
    # Run the same program whose dependences are read: a second trace of the function could differ.
    leaves = jaxpr_as_fun(program)(*jax.tree.leaves(args))
    return leaves, _outputs(program.jaxpr, [True] * len(program.jaxpr.invars))


def _outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    def results(equation: Any, varies: list[bool]) -> list[bool]:
        inner = inner_program(equation) if any(varies) else None
        return [any(varies)] * len(equation.outvars) if inner is None else _outputs(inner, varies)

    return outputs_of(jaxpr, inputs, False, results)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Saved:
    """A function's residuals, with constants separate. ``varying``: the leaves that depend on its arguments.

    ``recipe``: computes the leaves of ``tree`` from the saved arrays; None if they are the leaves.
    """

    varying: list[Any]
    constants: list[Any]
    tree: Any = field(metadata={"static": True})
    where: tuple[bool, ...] = field(metadata={"static": True})
    recipe: ClosedJaxpr | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, tree: Any, depends: Sequence[bool]) -> Saved:
        leaves, structure = jax.tree.flatten(tree)
        return cls.of_leaves(leaves, structure, depends)

    @classmethod
    def of_leaves(
        cls, leaves: Sequence[Any], structure: Any, depends: Sequence[bool], recipe: ClosedJaxpr | None = None
    ) -> Saved:
        varying = [leaf for leaf, varies in zip(leaves, depends, strict=True) if varies]
        constants = [leaf for leaf, varies in zip(leaves, depends, strict=True) if not varies]
        return cls(varying, constants, structure, tuple(depends), recipe)

    def whole(self, *arguments: Any) -> Any:
        """The original tree. ``arguments``: the arguments that backward has."""
        varying, constants = iter(self.varying), iter(self.constants)
        leaves = [next(varying if varies else constants) for varies in self.where]
        if self.recipe is not None:
            leaves = jaxpr_as_fun(self.recipe)(*leaves, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(self.tree, leaves)
