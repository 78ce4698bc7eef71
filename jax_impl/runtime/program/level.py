"""One level of a traced program: transfers and loops in their order, each told when it may start.

``pipeline.py`` says what for. A level is a program without the bodies of its loops, or one pass of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_impl.comm.collectives import fence
from jax_impl.runtime.program.loop_parts import GATHERS, REDUCE, TRANSFERS, Parts, with_gate
from jax_impl.runtime.program.traced import (
    Env,
    Split,
    Values,
    called,
    evaluate,
    holds,
    mark_of,
    operands,
    read,
    variables,
    whole,
)

# Of a scan: its equation and operands, and ``gate`` and ``reduced`` of the level, before it and after it.
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
        evaluate(jaxpr, equations, env, wanted, self._is_special, self._special)

    def _is_special(self, equation: Any, env: Env) -> bool:
        primitive, mark = equation.primitive.name, mark_of(equation)
        if primitive == "optimization_barrier":
            known = (*self._gathered, *self._reduced)
            return any(v in known or isinstance(env.get(v), Split) for v in operands(equation.invars))
        return mark in TRANSFERS or (primitive == "scan" and holds(equation, TRANSFERS))

    def _special(self, equation: Any, values: Values) -> Values:
        primitive, mark = equation.primitive.name, mark_of(equation)
        if primitive == "optimization_barrier":
            return self._barrier(operands(equation.invars), list(lax.optimization_barrier(values)))
        if primitive == "scan":
            results, self.gate, self.reduced = self._scan(equation, values, self.gate, self.reduced)
            # A loop that stays as it is ends with transfers that nothing is known of, and that nothing runs during.
            moved = [(GATHERS, self.gate), ((REDUCE,), self.reduced)]
            self.stale = frozenset(name for names, last in moved if last is not None for name in names)
            return results
        if mark == REDUCE:
            self._reduced = equation.outvars
        else:
            self._gathered = equation.outvars
        if not self.ways.chained and (mark in self.stale or self.ways.forward):
            last = self.reduced if mark == REDUCE else self.gate
            values = values if last is None else with_gate(equation, values, last)
        self.stale -= {REDUCE} if mark == REDUCE else set(GATHERS)
        return list(jaxpr_as_fun(called(equation))(*whole(values)))

    def _barrier(self, taken: Sequence[Any], values: Values) -> Values:
        if any(v in self._reduced for v in taken):
            *values, self.reduced = fence([*values, jnp.array(True)])
            self._reduced = ()
        if any(v in self._gathered for v in taken):
            values = self._opened(values)
            self._gathered = ()
        return values

    def _opened(self, values: Values) -> Values:
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

    def _special(self, equation: Any, values: Values) -> Values:
        self._left -= mark_of(equation) in GATHERS
        return super()._special(equation, values)

    def _opened(self, values: Values) -> Values:
        if self._left:
            return super()._opened(values)
        *values, self.gate = fence([*values, self._done])
        if self._issue is not None:
            self.ahead = self._issue(self.gate)
            if self.ways.chained:
                values, self.ahead = fence((values, self.ahead))
        return values
