"""Transfers of scanned layers, one pass of the loop apart from their layer: software pipelining of a traced program.

The body of a loop gathers a layer, applies it, and in backward reduces its gradients. Inside of one pass nothing can run
beside these transfers, so they move into the pass next to it. Backward over layers 3 to 0, a column a pass; the first
and the last pass stand outside of the loop::

               |          |            |     loop, 2 passes      |            |
    gather     | 3        | 2          | 1          | 0          |            |
    backward   |          | 3          | 2          | 1          | 0          |
    reduce     |          |            | 3          | 2          | 1          | 0

Forward has no reductions, and no first pass outside. Each layer is still gathered and reduced as often as before. A
gather waits for the input of the layer before (``order.py``), and a pass for the transfers of the pass before, so that
two layers' whole weights and two layers' whole gradients exist at once.

Which loops a model has is known when it has run, and what they do in backward when JAX has differentiated them. So
``pipelined`` reads the program of a function and writes these loops anew. A gather moves if it depends on what the loop
is over, not on what it carries, and a reduction if its results leave the loop stacked. All else stays where it is, such
as what is inside of ``jax.checkpoint``, ``lax.cond`` and ``lax.while_loop``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_impl.comm.collectives import fence, gated
from jax_impl.modules.seal import scan_counts
from jax_impl.runtime.traced import (
    Env,
    Split,
    Values,
    called,
    evaluate,
    flattened,
    holds,
    mark_of,
    read,
    scope_of,
    variables,
    whole,
)

T = TypeVar("T")

# A unit's gather waits for its own input, or, ahead, for that of the unit before. The first operand is True then.
GATHER, GATHER_AHEAD, REDUCE = "twinshard_gather", "twinshard_gather_ahead", "twinshard_reduce"
_GATHERS = (GATHER, GATHER_AHEAD)
_TRANSFERS = (*_GATHERS, REDUCE)


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


def pipelined(function: Callable[..., T], ways: Ways) -> Callable[..., T]:
    """``function`` with its loops' transfers moved."""

    def run(*args: Any) -> T:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        found = _Level(ways).run(flattened(program, _TRANSFERS), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


class _Level:
    """A program without the bodies of its loops.

    gate: a scalar, True when the gather after the last one may start. reduced: True when the last reduction is done.
    stale: what in the traced program does not know of the loop before, and has to wait for these two instead.
    """

    def __init__(self, ways: Ways) -> None:
        self.ways = ways
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
        if mark in _GATHERS:
            self._gathered = equation.outvars
        if mark == REDUCE:
            self._reduced = equation.outvars
        if primitive == "optimization_barrier":
            known = (*self._gathered, *self._reduced)
            return any(v in known or isinstance(env.get(v), Split) for v in _variables(equation.invars))
        return mark in _TRANSFERS or (primitive == "scan" and holds(equation, _TRANSFERS))

    def _special(self, equation: Any, values: Values) -> Values:
        primitive, mark = equation.primitive.name, mark_of(equation)
        if primitive == "optimization_barrier":
            return self._barrier(_variables(equation.invars), list(lax.optimization_barrier(values)))
        if primitive == "scan":
            loop = _Loop.of(equation, values, self.ways)
            results, self.gate, self.reduced = loop.run(self.gate, self.reduced)
            # A loop that stays as it is ends with transfers that nothing is known of, and that nothing runs beside.
            moved = [(_GATHERS, self.gate), ((REDUCE,), self.reduced)]
            self.stale = frozenset(name for names, last in moved if last is not None for name in names)
            return results
        if not self.ways.chained and (mark in self.stale or self.ways.forward):
            if mark == REDUCE and self.reduced is not None:
                values = list(gated(values, self.reduced))
            elif mark in _GATHERS and self.gate is not None:
                values[0] = self.gate
        self.stale -= {REDUCE} if mark == REDUCE else set(_GATHERS)
        return list(jaxpr_as_fun(called(equation))(*whole(values)))

    def _barrier(self, operands: Sequence[Any], values: Values) -> Values:
        if any(v in self._reduced for v in operands):
            *values, self.reduced = fence([*values, jnp.array(True)])
            self._reduced = ()
        if any(v in self._gathered for v in operands):
            values = self._opened(values)
            self._gathered = ()
        return values

    def _opened(self, values: Values) -> Values:
        """What a barrier lets through when a gather is done and its unit's input is there."""
        *values, self.gate = fence([*values, jnp.array(True)])
        return values


class _Pass(_Level):
    """A body without the gather and the reduction that have moved.

    done: True when the reductions of the passes before are done that this pass waits for. issue: starts the next pass's
    gather, after the last one of this pass. ahead: what it returned.
    """

    def __init__(
        self, parts: _Parts, ways: Ways, done: jax.Array, issue: Callable[[jax.Array], Values] | None
    ) -> None:
        super().__init__(ways)
        self.ahead: Values = []
        self._done = done
        self._issue = issue
        self._left = sum(mark_of(equation) in _GATHERS for equation in parts.middle)
        self._gathered = parts.gather.outvars if parts.gather else ()

    def _special(self, equation: Any, values: Values) -> Values:
        self._left -= mark_of(equation) in _GATHERS
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


@dataclass(frozen=True)
class _Parts:
    """Equations of a body: what ``gather`` needs, the gather that moves, or None; what moves with a reduction."""

    early: list[Any]
    gather: Any
    middle: list[Any]
    late: list[Any]


@dataclass(frozen=True)
class _State:
    """Between two passes. gathered: whole weights of the next one. waiting: what ``late`` needs of the one before.

    done: True when the reductions are done that run beside the passes before.
    """

    carry: Values
    gathered: Values
    waiting: Values
    stacks: Values
    done: jax.Array


jax.tree_util.register_dataclass(_State)


@dataclass(frozen=True)
class _Loop:
    """A scan. ``constants``, ``carry``, ``stacked``: its operands. ``waiting``: variables that ``late`` needs."""

    body: ClosedJaxpr
    parts: _Parts
    constants: Values
    carry: Values
    stacked: Values
    length: int
    reverse: bool
    unroll: Any
    ways: Ways

    @staticmethod
    def of(equation: Any, values: Values, ways: Ways) -> _Loop:
        params = equation.params
        body = flattened(params["jaxpr"], _TRANSFERS)
        constants, carries = scan_counts(equation, body.jaxpr)
        return _Loop(
            body,
            _parts(body.jaxpr, constants, carries, params["length"], ways.reductions and not ways.chained),
            whole(values[:constants]),
            whole(values[constants : constants + carries]),
            # A loop in the other direction begins with the pass that stands apart.
            [
                x.whole if isinstance(x, Split) and x.reverse == params["reverse"] else x
                for x in values[constants + carries :]
            ],
            params["length"],
            params["reverse"],
            params["unroll"],
            ways,
        )

    def run(
        self, gate: jax.Array | None, reduced: jax.Array | None
    ) -> tuple[Values, jax.Array | None, jax.Array | None]:
        """Results, and ``gate`` and ``reduced`` after the loop; None for that whose transfers have not moved."""
        parts = self.parts
        if parts.gather is None and not parts.late:
            return self._as_it_is(), None, None
        carry, gathered = self.carry, []
        if parts.gather is not None:
            if gate is None:
                carry, gate = fence((carry, jnp.array(True)))
            gathered = self._gather(0, gate)
        rest = int(parts.gather is not None)
        length = self.length - 1 if self._splits else self.length
        stacks = [
            jnp.zeros((length, *v.aval.shape), v.aval.dtype) for v in self.body.jaxpr.outvars[len(carry) :]
        ]
        done = jnp.array(True) if reduced is None else reduced
        state = _State(carry, gathered, [], stacks, done)
        first = int(bool(parts.late) or any(isinstance(x, Split) for x in self.stacked))
        if first:
            state, gate = self._pass(0, state)
        if first < self.length - rest:
            state = lax.fori_loop(
                first, self.length - rest, lambda k, s: self._pass(k, s)[0], state, unroll=self.unroll
            )
        if rest:
            state, gate = self._pass(self.length - 1, state, last=True)
        stacks, reduced = state.stacks, None
        if parts.late:
            late, reduced = fence((self._late(state.waiting), jnp.array(True)))
            stacks = self._stacked(stacks, late, self.length - 1, late=True)
        return [*state.carry, *stacks], gate if parts.gather is not None else None, reduced

    @property
    def _splits(self) -> bool:
        return self.parts.gather is not None and not self.parts.late

    def _pass(self, k: Any, state: _State, last: bool = False) -> tuple[_State, jax.Array | None]:
        parts, jaxpr, carries = self.parts, self.body.jaxpr, len(self.carry)
        carry, stacked = state.carry, self.stacked
        if last and self.ways.row_major:
            # Else XLA cuts what this pass needs before the loop and keeps it: a layer's saved arrays more.
            carry, stacked = fence((carry, stacked))
        env = variables(self.body, [*self.constants, *carry, *self._slices(k, stacked)])
        issue = None
        if parts.gather is not None:
            env.update(zip(parts.gather.outvars, state.gathered, strict=True))
            issue = None if last else lambda gate: self._gather(k + 1, gate)
        # What was reduced before the loop may run beside the whole first pass.
        done = jnp.array(True) if type(k) is int and k == 0 else state.done
        level = _Pass(parts, self.ways, done, issue)
        late = _made(parts.late)
        now = [v for v in jaxpr.outvars if hasattr(v, "val") or v not in late]
        needed = _needed(parts.late)
        level.evaluate(jaxpr, parts.middle, env, [*now, *needed])
        results = read(env, now)
        reduced = self._late(state.waiting) if state.waiting else []
        # Transfers of this pass end with it, before its results are copied to where they are stacked.
        results, waiting, gathered, reduced, done = fence(
            (results, read(env, needed), level.ahead, reduced, state.done)
        )
        if self._splits and last:
            stacks = [Split(*both, self.reverse) for both in zip(state.stacks, results[carries:], strict=True)]
        else:
            stacks = self._stacked(state.stacks, results[carries:], k, late=False)
        if reduced:
            stacks = self._stacked(stacks, reduced, k - 1, late=True)
        return _State(results[:carries], gathered, waiting, stacks, done), level.gate

    def _gather(self, k: Any, gate: jax.Array) -> Values:
        """Whole weights of pass ``k``."""
        gather = self.parts.gather
        # Carried values have none here, and are not needed.
        env = variables(self.body, [*self.constants, *[None] * len(self.carry), *self._slices(k, self.stacked)])
        evaluate(self.body.jaxpr, self.parts.early, env, gather.invars[1:])
        with scope_of(gather):
            return list(jaxpr_as_fun(called(gather))(gate, *read(env, gather.invars[1:])))

    def _late(self, waiting: Values) -> Values:
        """Stacked results of the reduction that has moved."""
        nothing = [None] * (len(self.carry) + len(self.stacked))
        env = variables(self.body, [*self.constants, *nothing])
        env.update(zip(_needed(self.parts.late), waiting, strict=True))
        late = _made(self.parts.late)
        wanted = [v for v in self.body.jaxpr.outvars if not hasattr(v, "val") and v in late]
        evaluate(self.body.jaxpr, self.parts.late, env, wanted)
        return read(env, wanted)

    def _slices(self, k: Any, stacked: Values) -> Values:
        """What pass ``k`` gets of ``stacked``."""
        found = []
        for x in stacked:
            if not isinstance(x, Split):
                found.append(lax.dynamic_index_in_dim(x, self._index(k), keepdims=False))
            elif type(k) is int and k == 0:
                found.append(x.last)
            else:
                found.append(lax.dynamic_index_in_dim(x.looped, self._index(k) - x.reverse, keepdims=False))
        return found

    def _index(self, k: Any) -> Any:
        """The layer of pass ``k``."""
        return self.length - 1 - k if self.reverse else k

    def _stacked(self, stacks: Values, values: Values, k: Any, late: bool) -> Values:
        """``stacks`` with the late results of pass ``k``, or with the others."""
        made = _made(self.parts.late)
        outputs = self.body.jaxpr.outvars[len(self.carry) :]
        mine = [i for i, v in enumerate(outputs) if (not hasattr(v, "val") and v in made) == late]
        at = self._index(k) - int(self._splits and self.reverse)
        stacks = list(stacks)
        for i, value in zip(mine, values, strict=True):
            stacks[i] = lax.dynamic_update_index_in_dim(stacks[i], value, at, 0)
            if self.ways.row_major:
                stacks[i] = with_layout_constraint(stacks[i], Layout(tuple(range(stacks[i].ndim))))
        return stacks

    def _as_it_is(self) -> Values:
        constants = self.constants

        def one(carry: Values, slices: Values) -> tuple[Values, Values]:
            found = _Level(self.ways).run(self.body, [*constants, *carry, *slices])
            return found[: len(carry)], found[len(carry) :]

        carry, stacks = lax.scan(
            one, self.carry, whole(self.stacked), self.length, reverse=self.reverse, unroll=self.unroll
        )
        return [*carry, *stacks]


def _parts(jaxpr: Any, constants: int, carries: int, length: int, reductions: bool) -> _Parts:
    equations = list(jaxpr.eqns)
    nothing = _Parts([], None, equations, [])
    nested = any(e.primitive.name == "scan" and holds(e, _TRANSFERS) for e in equations)
    # Keys cannot be stacked here as scan does it.
    keys = any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in jaxpr.outvars)
    if length < 2 or nested or keys:
        return nothing
    first = next((e for e in equations if mark_of(e) in _GATHERS), None)
    last = next((e for e in reversed(equations) if mark_of(e) == REDUCE), None)
    gather, early, late = None, [], []
    if first is not None and mark_of(first) == GATHER:
        early = _before(equations, first.invars[1:])
        carried = set(jaxpr.invars[constants : constants + carries])
        if carried.isdisjoint(_needed(early) if early else _variables(first.invars[1:])):
            gather = first
    if last is not None and reductions:
        late = _after(equations, last)
        made = _made(late)
        if any(not hasattr(v, "val") and v in made for v in jaxpr.outvars[:carries]):
            late = []
    moved = {id(e) for e in late} | ({id(gather)} if gather is not None else set())
    return _Parts(early if gather is not None else [], gather, [e for e in equations if id(e) not in moved], late)


def _before(equations: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """What must be evaluated for these variables."""
    needed, found = set(_variables(wanted)), []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outvars):
            needed.update(_variables(equation.invars))
            found.append(equation)
    return found[::-1]


def _after(equations: Sequence[Any], first: Any) -> list[Any]:
    """``first`` and all that needs what it makes."""
    made, found = set(first.outvars), [first]
    for equation in equations[equations.index(first) + 1 :]:
        if not made.isdisjoint(_variables(equation.invars)):
            made.update(equation.outvars)
            found.append(equation)
    return found


def _made(equations: Sequence[Any]) -> set[Any]:
    return {v for equation in equations for v in equation.outvars}


def _needed(equations: Sequence[Any]) -> list[Any]:
    made = _made(equations)
    return list(dict.fromkeys(v for e in equations for v in _variables(e.invars) if v not in made))


def _variables(operands: Sequence[Any]) -> list[Any]:
    return [operand for operand in operands if not hasattr(operand, "val")]
