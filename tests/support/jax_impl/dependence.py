"""The order of operations that a traced program requires, as XLA sees it.

The program is flattened: calls, including calls with custom derivatives, are replaced by their bodies. Loops stay,
because their bodies are separate programs (``loops``). A program with a loop around the requested operation is refused.
XLA drops the unused results of a barrier together with their operands, and so does this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_impl.modules.seal import inner_program, jaxpr_of

COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "psum_scatter",
    "psum",
    "all_gather_invariant",
    "psum_invariant",
)

# An equation with its scope, and the names of its inputs and results in the whole program.
Equation = tuple[Any, list[Any], list[Any], str]


@dataclass(frozen=True)
class Step:
    """An equation that is asked for. ``before``: numbers of the asked-for steps that must be done before it.

    ``inputs``: places of the program's inputs that it waits for.
    """

    number: int
    primitive: str
    scope: str
    before: frozenset[int]
    inputs: frozenset[int] = frozenset()


def steps(jaxpr: Any, primitives: tuple[str, ...] = ("dot_general", *COLLECTIVES)) -> list[Step]:
    """The live equations of ``primitives`` in ``jaxpr``, in the order of the program."""
    return steps_and_outputs(jaxpr, primitives)[0]


def steps_and_outputs(
    jaxpr: Any, primitives: tuple[str, ...] = ("dot_general", *COLLECTIVES)
) -> tuple[list[Step], list[frozenset[int]]]:
    """``steps``, and for each output of the program the numbers of those that must be done before it."""
    names: dict[Any, Any] = {}
    flat: list[Equation] = []
    outputs = _flatten(jaxpr, names, flat, [0])
    live = set(outputs)
    needed = []
    for equation, inputs, results, scope in reversed(flat):
        if equation.primitive.name == "optimization_barrier":
            used = [name in live for name in results]
            inputs = [name for name, use in zip(inputs, used, strict=True) if use]
            if not any(used):
                continue
        elif not any(name in live for name in results):
            continue
        live.update(inputs)
        needed.append((equation, inputs, results, scope))
    # Of inputs, negative numbers.
    before = {names[v]: frozenset([-1 - i]) for i, v in enumerate(jaxpr.invars) if v in names}
    chosen_steps: list[Step] = []
    for equation, inputs, results, scope in reversed(needed):
        known = frozenset().union(*(before.get(name, frozenset()) for name in inputs))
        primitive = equation.primitive.name
        if primitive in primitives:
            earlier = frozenset(number for number in known if number >= 0)
            step = Step(
                len(chosen_steps),
                primitive,
                scope,
                earlier,
                frozenset(-1 - number for number in known if number < 0),
            )
            chosen_steps.append(step)
            known = known | {step.number}
        before.update((name, known) for name in results)
    return chosen_steps, [
        frozenset(n for n in before.get(name, frozenset()) if n >= 0 and name is not None) for name in outputs
    ]


def loops(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Each loop over a known number of passes: its equation, and how often its body runs. Outer ones come first."""
    for equation in jaxpr.eqns:
        passes = times * equation.params["length"] if equation.primitive.name == "scan" else times
        if equation.primitive.name == "scan":
            yield equation, passes
        for value in equation.params.values():
            if jaxpr_of(value) is not None:
                yield from loops(jaxpr_of(value), passes)


def runs(jaxpr: Any, primitive: str, times: int = 1, around: str = "") -> Iterator[tuple[Any, str, int]]:
    """Equations of a primitive, with their scope, and how often each runs; ``around``: the scope of ``jaxpr``."""
    for equation in jaxpr.eqns:
        scope = "/".join(filter(None, (around, str(equation.source_info.name_stack))))
        if equation.primitive.name == primitive:
            yield equation, scope, times
        passes = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for value in equation.params.values():
            if jaxpr_of(value) is not None:
                yield from runs(jaxpr_of(value), primitive, passes, scope)


def flattened(jaxpr: Any) -> list[Equation]:
    """The program without calls; a literal has the name None."""
    flat: list[Equation] = []
    _flatten(jaxpr, {}, flat, [0])
    return flat


def _flatten(
    jaxpr: Any, names: dict[Any, Any], flat: list[Any], count: list[int], around: str = ""
) -> list[Any]:
    """Append ``(equation, inputs, results)`` with names that are one in all of the program; returns the outputs'."""

    def name(variable: Any) -> Any:
        if hasattr(variable, "val"):
            return None
        if variable not in names:
            count[0] += 1
            names[variable] = count[0]
        return names[variable]

    for equation in jaxpr.eqns:
        inputs = [name(variable) for variable in equation.invars]
        inner = inner_program(equation)
        scope = "/".join(filter(None, (around, str(equation.source_info.name_stack))))
        if inner is not None:
            results = _flatten(inner, dict(zip(inner.invars, inputs, strict=True)), flat, count, scope)
            names.update(zip(equation.outvars, results, strict=True))
            continue
        if any(jaxpr_of(value) is not None for value in equation.params.values()):
            inside = str(equation.params)
            assert not any(primitive in inside for primitive in COLLECTIVES), (
                f"{equation.primitive} holds collectives"
            )
        flat.append((equation, inputs, [name(variable) for variable in equation.outvars], scope))
    return [name(variable) for variable in jaxpr.outvars]
