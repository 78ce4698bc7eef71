"""One level of a traced program: transfers and loops in order, each with a gate for its start.

``pipeline.py`` explains the purpose. A level is a program without the bodies of its loops, or one iteration (pass) of a
loop. The first gather and the last reduction of a loop's body move. The body's equations are evaluated in four parts::

    early     slices and casts of the loop's inputs        for the next pass, before its gather
    gather    the first gather                             for the next pass
    middle    everything except gather and late            for this pass
    late      the last reduction and its uses              for the previous pass
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_impl.comm.collectives import fence
from jax_impl.runtime.program.traced import (
    Env,
    Split,
    Values,
    evaluate,
    holds,
    is_gate,
    mark_of,
    operands,
    program_of,
    read,
    variables,
    whole,
)

# A unit's gather waits for its own input, or, if ahead, for the input of the previous unit; a reduction waits for the
# previous reduction. One operand, the gate, is then True.
GATHER, GATHER_AHEAD, REDUCE = "twinshard_gather", "twinshard_gather_ahead", "twinshard_reduce"
# Replaces a gather of weights that are already present.
KEPT = "twinshard_kept"
GATHERS = (GATHER, GATHER_AHEAD, KEPT)
TRANSFERS = (*GATHERS, REDUCE)


@dataclass(frozen=True)
class Parts:
    """``gather``: None if no gather moves; ``late`` is empty if no reduction moves.

    waiting: variables that ``late`` needs. stacked: positions of late results among the loop's stacked results.
    """

    early: Sequence[Any]
    gather: Any
    middle: Sequence[Any]
    late: Sequence[Any]
    waiting: Sequence[Any]
    stacked: frozenset[int]

    @staticmethod
    def of(jaxpr: Any, constants: int, carries: int, *, reductions: bool) -> Parts:
        """Split a body whose inputs are constants, then carries, then slices. ``reductions``: whether these move."""
        equations = list(jaxpr.eqns)
        # The next pass's gather must not start before the last unit of this pass, which is in a nested loop. And this
        # file cannot stack random keys as scan does.
        nested = any(e.primitive.name == "scan" and holds(e, TRANSFERS) for e in equations)
        keys = any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in jaxpr.outvars)
        if nested or keys:
            return Parts((), None, equations, (), (), frozenset())
        early, gather = _first_gather(equations, set(jaxpr.invars[constants : constants + carries]))
        late = _last_reduction(equations, jaxpr.outvars[:carries]) if reductions else []
        moved = {id(equation) for equation in (gather, *late)}
        middle = [equation for equation in equations if id(equation) not in moved]
        made = _made(late)
        stacked = (i for i, v in enumerate(jaxpr.outvars[carries:]) if not made.isdisjoint(operands([v])))
        return Parts(early, gather, middle, late, _needed(late), frozenset(stacked))


def sources_of(gather: Any) -> list[Any]:
    """The inputs that a gather gathers."""
    return operands(v for v in gather.invars if not is_gate(v))


def with_gate(transfer: Any, values: Sequence[Any], gate: Any) -> list[Any]:
    """The values of a transfer's operands with another gate."""
    return [gate if is_gate(v) else value for v, value in zip(transfer.invars, values, strict=True)]


def _first_gather(equations: Sequence[Any], carried: set[Any]) -> tuple[list[Any], Any]:
    """The first gather and the equations for its weights; None if the gather depends on carried values."""
    gather = next((e for e in equations if mark_of(e) in GATHERS), None)
    # Kept weights and gathers ahead need an earlier unit in the same pass.
    if gather is None or mark_of(gather) != GATHER:
        return [], None
    wanted, early = set(sources_of(gather)), []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            wanted.update(operands(equation.invars))
            early.append(equation)
    # Equations that are evaluated twice must have no effects: a callback would run twice per pass.
    if not wanted.isdisjoint(carried) or any(equation.effects for equation in early):
        return [], None
    return early[::-1], gather


def _last_reduction(equations: Sequence[Any], carried: Sequence[Any]) -> list[Any]:
    """The last reduction and everything that needs it; empty if the next pass needs it."""
    number = max((i for i, e in enumerate(equations) if mark_of(e) == REDUCE), default=None)
    if number is None:
        return []
    late = [equations[number]]
    made = _made(late)
    for equation in equations[number + 1 :]:
        if not made.isdisjoint(operands(equation.invars)):
            made.update(equation.outvars)
            late.append(equation)
    return late if made.isdisjoint(operands(carried)) else []


def _made(equations: Iterable[Any]) -> set[Any]:
    return {v for equation in equations for v in equation.outvars}


def _needed(equations: Sequence[Any]) -> list[Any]:
    made = _made(equations)
    needed = (v for equation in equations for v in operands(equation.invars))
    return list(dict.fromkeys(v for v in needed if v not in made))


# Runs a scan: takes its equation, operands, and the level's ``gate`` and ``reduced``; returns results and the new two.
Gate = jax.Array | None
Scan = Callable[[Any, Values, Gate, Gate], tuple[Values, Gate, Gate]]


@dataclass(frozen=True)
class Ways:
    """How a program is written.

    chained: see ``Order``.
    forward: the function has no backward, so each gather may wait for the input of the previous unit.
    reductions: move reductions, too. Reductions that XLA derives from a sharding do not move: they run where the
        gradient is computed.
    row_major: a loop's stacked results have the row-major memory layout. XLA:GPU would choose different layouts for a
        loop and its backward loop, and copy everything from one to the other. Not for TPUs, which use tiles, nor for
        sharded programs, in which arrays with a layout lose their sharding.
    """

    chained: bool = False
    forward: bool = False
    reductions: bool = True
    row_major: bool = False


class Level:
    """A program without the bodies of its loops.

    gate: a scalar, True when the next gather may start. reduced: a scalar, True when the last reduction is done.
    stale: transfers whose traced gates do not know the previous loop, so they wait for these two instead.
    """

    def __init__(self, ways: Ways, scan: Scan) -> None:
        self.ways = ways
        self._scan = scan
        self.gate: jax.Array | None = None
        self.reduced: jax.Array | None = None
        self.stale: frozenset[str | None] = frozenset()
        self._gathered: Sequence[Any] = ()
        self._reduced: Sequence[Any] = ()

    def run(self, program: ClosedJaxpr, args: Sequence[Any]) -> Values:
        env = variables(program, args)
        self.evaluate(program.jaxpr, program.jaxpr.eqns, env, program.jaxpr.outvars)
        return whole(read(env, program.jaxpr.outvars))

    def evaluate(self, jaxpr: Any, equations: Sequence[Any], env: Env, wanted: Sequence[Any]) -> None:
        evaluate(jaxpr, equations, env, wanted, self._is_special, self._run_special)

    def _is_special(self, equation: Any, env: Env) -> bool:
        primitive, mark = equation.primitive.name, mark_of(equation)
        if primitive == "optimization_barrier":
            known = (*self._gathered, *self._reduced)
            return any(v in known or isinstance(env.get(v), Split) for v in operands(equation.invars))
        return mark in TRANSFERS or (primitive == "scan" and holds(equation, TRANSFERS))

    def _run_special(self, equation: Any, values: Values) -> Values:
        primitive, mark = equation.primitive.name, mark_of(equation)
        if primitive == "optimization_barrier":
            # The barrier is rebuilt, not evaluated with its neighbours: at this barrier the program waits for a moved
            # transfer, and the barrier gets its own gate.
            return self._barrier(operands(equation.invars), list(lax.optimization_barrier(values)))
        if primitive == "scan":
            results, self.gate, self.reduced = self._scan(equation, values, self.gate, self.reduced)
            # A loop that stays unchanged ends with unknown transfers, during which nothing runs.
            moved = [(GATHERS, self.gate), ((REDUCE,), self.reduced)]
            self.stale = frozenset(name for names, last in moved if last is not None for name in names)
            return results
        if mark == REDUCE:
            self._reduced = equation.outvars
        else:
            self._gathered = equation.outvars
        if not self.ways.chained and (mark in self.stale or self.ways.forward):
            # The traced gate does not know the previous loop, whose transfers have moved.
            last = self.reduced if mark == REDUCE else self.gate
            values = values if last is None else with_gate(equation, values, last)
        self.stale -= {REDUCE} if mark == REDUCE else set(GATHERS)
        return list(jaxpr_as_fun(program_of(equation))(*whole(values)))

    def _barrier(self, taken: Sequence[Any], values: Values) -> Values:
        if any(v in self._reduced for v in taken):
            # True when the values that pass this barrier, including the reduction, are present.
            *values, self.reduced = fence([*values, jnp.array(True)])
            self._reduced = ()
        if any(v in self._gathered for v in taken):
            values = self._open_gate(values)
            self._gathered = ()
        return values

    def _open_gate(self, values: Values) -> Values:
        """The values that pass a barrier when a gather is done and its unit's input is present."""
        *values, self.gate = fence([*values, jnp.array(True)])
        return values


class Pass(Level):
    """A loop's body without the moved gather and the moved reduction.

    done: True when the reductions of earlier passes, for which this pass waits, are done. issue: starts the next pass's
    gather, after the last gather of this pass. ahead: the result of ``issue``.
    """

    def __init__(
        self,
        ways: Ways,
        scan: Scan,
        parts: Parts,
        done: jax.Array,
        issue: Callable[[jax.Array], Values] | None,
    ) -> None:
        super().__init__(ways, scan)
        self.ahead: Values = []
        self._done = done
        self._issue = issue
        self._left = sum(mark_of(equation) in GATHERS for equation in parts.middle)
        self._gathered = parts.gather.outvars if parts.gather else ()

    def _run_special(self, equation: Any, values: Values) -> Values:
        self._left -= mark_of(equation) in GATHERS
        return super()._run_special(equation, values)

    def _open_gate(self, values: Values) -> Values:
        if self._left:
            return super()._open_gate(values)
        # The fence includes ``done``, so that a pass waits for the reductions of earlier passes: whole gradients of
        # only two layers exist at once, not of every layer.
        *values, self.gate = fence([*values, self._done])
        if self._issue is not None:
            self.ahead = self._issue(self.gate)
            if self.ways.chained:
                # Simulated devices support one collective at a time, so this gather must not overlap later ones.
                values, self.ahead = fence((values, self.ahead))
        return values
