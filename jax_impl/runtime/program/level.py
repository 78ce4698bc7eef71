"""One level of a traced program: transfers and loops in their order, each told when it may start.

``pipeline.py`` says what for. A level is a program without the bodies of its loops, or one pass of
a loop. The first gather and the last reduction of a loop's body move. The body's equations are
evaluated in four parts::

    early     slices and casts of what the loop is over    for the next pass, before its gather
    gather    the first one                                for the next pass
    middle    all but the gather and what is late          for this pass
    late      the last reduction and what is made of it    for the pass before
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

# A unit's gather waits for its own input, or, ahead, for that of the unit before; a reduction for
# the one before. One operand is True then, the gate.
GATHER, GATHER_AHEAD, REDUCE = "twinshard_gather", "twinshard_gather_ahead", "twinshard_reduce"
# In place of a gather, of weights that are there.
KEPT = "twinshard_kept"
GATHERS = (GATHER, GATHER_AHEAD, KEPT)
TRANSFERS = (*GATHERS, REDUCE)


@dataclass(frozen=True)
class Parts:
    """``gather``: None where none moves; ``late`` is empty where no reduction does.

    waiting: variables that ``late`` needs. stacked: places of late results among those that the loop stacks.
    """

    early: Sequence[Any]
    gather: Any
    middle: Sequence[Any]
    late: Sequence[Any]
    waiting: Sequence[Any]
    stacked: frozenset[int]

    @staticmethod
    def of(jaxpr: Any, constants: int, carries: int, *, reductions: bool) -> Parts:
        """Of a body whose first inputs are constants, and then what it carries. ``reductions``: whether they move."""
        equations = list(jaxpr.eqns)
        # The next pass's gather must not start before the last unit of this pass, which is in a
        # loop of its own; and random keys cannot be stacked here as scan does it.
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
    """What a gather gathers."""
    return operands(v for v in gather.invars if not is_gate(v))


def with_gate(transfer: Any, values: Sequence[Any], gate: Any) -> list[Any]:
    """The values of a transfer's operands, with another gate."""
    return [gate if is_gate(v) else value for v, value in zip(transfer.invars, values, strict=True)]


def _first_gather(equations: Sequence[Any], carried: set[Any]) -> tuple[list[Any], Any]:
    """The first gather and what is evaluated for its weights; None for one that depends on what is carried."""
    gather = next((e for e in equations if mark_of(e) in GATHERS), None)
    # Kept weights and gathers ahead need a unit of the same pass before them.
    if gather is None or mark_of(gather) != GATHER:
        return [], None
    wanted, early = set(sources_of(gather)), []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            wanted.update(operands(equation.invars))
            early.append(equation)
    # Equations that are evaluated twice must have no effects: a callback would run twice a pass.
    if not wanted.isdisjoint(carried) or any(equation.effects for equation in early):
        return [], None
    return early[::-1], gather


def _last_reduction(equations: Sequence[Any], carried: Sequence[Any]) -> list[Any]:
    """The last reduction and all that needs it; nothing where the next pass does."""
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


# Of a scan: its equation and operands, and ``gate`` and ``reduced`` of the level, before it and
# after it.
Gate = jax.Array | None
Scan = Callable[[Any, Values, Gate, Gate], tuple[Values, Gate, Gate]]


@dataclass(frozen=True)
class Ways:
    """How a program is written.

    chained: see ``Order``.
    forward: the function has no backward, so that each gather may wait for the input of the unit before.
    reductions: move them, too. Not where XLA makes them of a sharding: those run where the gradient is computed.
    row_major: what a loop stacks has the memory layout of its dimensions' order. XLA:GPU chooses others for a loop and
        for the one in backward, and copies all of it from one to the other. TPUs have tiles, and sharded programs lose
        the shardings of what has a layout.
    """

    chained: bool = False
    forward: bool = False
    reductions: bool = True
    row_major: bool = False


class Level:
    """A program without the bodies of its loops.

    gate: a scalar, True when the gather after the last one may start. reduced: True when the last reduction is done.
    stale: what in the traced program does not know of the loop before, and has to wait for these two instead.
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
            # Bound anew, not evaluated with its neighbours: the barrier is the moment at which a
            # moved transfer is waited for, and gets a gate of its own there.
            return self._barrier(operands(equation.invars), list(lax.optimization_barrier(values)))
        if primitive == "scan":
            results, self.gate, self.reduced = self._scan(equation, values, self.gate, self.reduced)
            # A loop that stays as it is ends with transfers that nothing is known of, and that
            # nothing runs during.
            moved = [(GATHERS, self.gate), ((REDUCE,), self.reduced)]
            self.stale = frozenset(name for names, last in moved if last is not None for name in names)
            return results
        if mark == REDUCE:
            self._reduced = equation.outvars
        else:
            self._gathered = equation.outvars
        if not self.ways.chained and (mark in self.stale or self.ways.forward):
            # The gate that was traced knows nothing of the loop before, whose transfers have moved.
            last = self.reduced if mark == REDUCE else self.gate
            values = values if last is None else with_gate(equation, values, last)
        self.stale -= {REDUCE} if mark == REDUCE else set(GATHERS)
        return list(jaxpr_as_fun(program_of(equation))(*whole(values)))

    def _barrier(self, taken: Sequence[Any], values: Values) -> Values:
        if any(v in self._reduced for v in taken):
            # True when what this barrier lets through is there, which is the reduction.
            *values, self.reduced = fence([*values, jnp.array(True)])
            self._reduced = ()
        if any(v in self._gathered for v in taken):
            values = self._open_gate(values)
            self._gathered = ()
        return values

    def _open_gate(self, values: Values) -> Values:
        """What a barrier lets through when a gather is done and its unit's input is there."""
        *values, self.gate = fence([*values, jnp.array(True)])
        return values


class Pass(Level):
    """A body without the gather and the reduction that have moved.

    done: True when the reductions of the passes before are done that this pass waits for. issue: starts the next pass's
    gather, after the last one of this pass. ahead: what it returned.
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
        # ``done`` goes along, so that a pass waits for the reductions of passes before: two layers'
        # whole gradients exist at once, not one for each layer.
        *values, self.gate = fence([*values, self._done])
        if self._issue is not None:
            self.ahead = self._issue(self.gate)
            if self.ways.chained:
                # Simulated devices bear one collective at a time: no gather beside what follows.
                values, self.ahead = fence((values, self.ahead))
        return values
