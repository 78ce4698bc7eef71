"""Parts of a traced program, found by the names of calls and evaluated separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from jax_impl.modules.seal import inner_program, jaxpr_of, jaxprs_of

T = TypeVar("T")
Values = list[Any]
# Values by variable.
Env = dict[Any, Any]

# Primitives that run a program but are not calls, or that run a program again in backward, by special rules.
_NO_CALLS = ("scan", "while", "cond", "remat2", "checkpoint", "shard_map")


def mark(name: str, function: Callable[..., T]) -> Callable[..., T]:
    """``function``, whose calls appear as ``name`` in a traced program. Its first argument is a boolean scalar."""

    def call(gate: jax.Array, *args: Any) -> T:
        return function(gate, *args)

    # A call of jit keeps its name when JAX differentiates or batches, and XLA inlines its program.
    call.__name__ = name
    return jax.jit(call)


def mark_of(equation: Any) -> str | None:
    """The name of a call of a ``mark`` function, or of a similar call."""
    # Parts of such a call that JAX moves out of a loop have its name, too, but no gate.
    if not _is_call(equation) or not any(map(is_gate, equation.invars)):
        return None
    name = equation.params.get("name")
    return name if isinstance(name, str) else None


def is_gate(operand: Any) -> bool:
    """Whether an operand is a boolean scalar."""
    # Its position is unknown: JAX moves operands that are the same in each iteration of a loop behind the others.
    aval = operand.aval
    return bool(getattr(aval, "shape", None) == () and aval.dtype == bool)


def holds(equation: Any, marks: Sequence[str]) -> bool:
    """Whether ``equation``, or a program that it runs, is or contains a call with one of these names."""
    return mark_of(equation) in marks or any(
        holds(below, marks) for inner in jaxprs_of(equation) for below in inner.eqns
    )


def runs_any(equation: Any, names: frozenset[str]) -> bool:
    """Whether ``equation``, or a program that it runs, is or contains an operation with one of these names."""
    return equation.primitive.name in names or any(
        runs_any(below, names) for inner in jaxprs_of(equation) for below in inner.eqns
    )


def inline_around(program: ClosedJaxpr, marks: Sequence[str]) -> ClosedJaxpr:
    """The program with calls of these names at its top level: enclosing calls are inlined."""
    return _without_calls(program, lambda e: _is_call(e) and mark_of(e) not in marks and holds(e, marks))


def inline_calls(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program with calls of jitted functions inlined, except ``mark`` calls and calls with shardings."""

    def is_plain(equation: Any) -> bool:
        shardings = (*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ()))
        return (
            # A call with shardings constrains its operands; inlining would lose the constraint.
            equation.primitive.name == "jit"
            and mark_of(equation) is None
            and not any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
        )

    return _without_calls(program, is_plain)


def _without_calls(program: ClosedJaxpr, chosen: Callable[[Any], bool]) -> ClosedJaxpr:
    if not any(chosen(equation) for equation in program.jaxpr.eqns):
        return program

    def flat(program: ClosedJaxpr, args: Sequence[Any]) -> Values:
        env = variables(program, args)
        evaluate(
            program.jaxpr,
            program.jaxpr.eqns,
            env,
            program.jaxpr.outvars,
            special=lambda equation, env: chosen(equation),
            run=lambda equation, values: flat(program_of(equation), values),
        )
        return read(env, program.jaxpr.outvars)

    shapes = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.invars)
    return jax.make_jaxpr(lambda *args: flat(program, args))(*shapes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Split:
    """A loop's stacked results with the last pass separate: ``[L - 1, ...]`` and ``[...]``, layer 0 if ``reverse``.

    XLA would copy a single array, and give it another memory layout than in the loop.
    """

    looped: Any
    last: Any
    reverse: bool = field(metadata={"static": True})

    @property
    def whole(self) -> jax.Array:
        """``[L, ...]``, in the order of the layers."""
        parts = [self.looped, jnp.expand_dims(self.last, 0)]
        return jnp.concatenate(parts[::-1] if self.reverse else parts)


def whole(values: Iterable[Any]) -> Values:
    """The same values, with every Split joined."""
    return [value.whole if isinstance(value, Split) else value for value in values]


def variables(program: ClosedJaxpr, args: Sequence[Any]) -> Env:
    """The values of a program's constants and inputs."""
    jaxpr = program.jaxpr
    return dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))


def operands(atoms: Iterable[Any]) -> Values:
    """The variables among operands: literals have a value but no hash."""
    return [atom for atom in atoms if not hasattr(atom, "val")]


def read(env: Env, atoms: Iterable[Any]) -> Values:
    return [atom.val if hasattr(atom, "val") else env[atom] for atom in atoms]


def program_of(equation: Any) -> ClosedJaxpr:
    """The program that a call runs."""
    for value in equation.params.values():
        if jaxpr_of(value) is not None and jaxpr_of(value) is inner_program(equation):
            return value if hasattr(value, "consts") else ClosedJaxpr(value, ())
    raise ValueError(f"expected a call, got {equation.primitive}")


def evaluate(
    jaxpr: Jaxpr,
    equations: Sequence[Any],
    env: Env,
    wanted: Iterable[Any],
    special: Callable[[Any, Env], bool] = lambda equation, env: False,
    run: Callable[[Any, Values], Values] | None = None,
) -> None:
    """Evaluate some equations of ``jaxpr``, ``special`` ones by ``run``; ``env`` then contains the ``wanted`` values.

    Other equations get no ``Split``.
    """
    last = {v: number for number, equation in enumerate(equations) for v in operands(equation.invars)}
    last.update(dict.fromkeys(operands(wanted), len(equations)))
    plain: list[Any] = []
    for number, equation in enumerate(equations):
        if not special(equation, env):
            plain.append(equation)
            continue
        _segment(jaxpr, plain, env, _used(last, number))
        plain = []
        assert run is not None
        with scope_of(equation):
            values = run(equation, read(env, equation.invars))
        env.update(zip(equation.outvars, values, strict=True))
    _segment(jaxpr, plain, env, _used(last, len(equations)))


def _used(last: dict[Any, int], number: int) -> Callable[[Any], bool]:
    """Whether an equation from ``number`` on uses a variable; ``last``: the last equation that uses each variable."""
    return lambda variable: last.get(variable, -1) >= number


def scope_of(equation: Any) -> AbstractContextManager[Any]:
    """A context in which profiles attribute operations to ``equation``."""
    return jax.named_scope(str(equation.source_info.name_stack))


def _segment(jaxpr: Jaxpr, equations: Sequence[Any], env: Env, needed: Callable[[Any], bool]) -> None:
    made = [v for equation in equations for v in equation.outvars if needed(v)]
    effects = frozenset().union(*(equation.effects for equation in equations))
    # Callbacks (watch_nonfinite_outputs) have effects but no needed results.
    if not made and not effects:
        return
    inside = {v for equation in equations for v in equation.outvars}
    taken = dict.fromkeys(v for equation in equations for v in operands(equation.invars) if v not in inside)
    # One program for all equations between two special ones; it returns the values that are needed later.
    program = Jaxpr((), list(taken), made, equations, effects, jaxpr.debug_info)
    env.update(zip(made, jaxpr_as_fun(ClosedJaxpr(program, ()))(*whole(read(env, taken))), strict=True))


def _is_call(equation: Any) -> bool:
    return equation.primitive.name not in _NO_CALLS and inner_program(equation) is not None
