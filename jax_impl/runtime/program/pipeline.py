"""Move the transfers of scanned layers by one pass of the loop: software pipelining of a traced program.

The body of a loop gathers a layer, applies it, and in backward reduces its gradients. Within one pass nothing can run
during these transfers, so they move into the neighbouring pass. Backward over layers 3 to 0, one column per pass; the
first and the last pass are outside the loop::

               |          |            |     loop, 2 passes      |            |
    gather     | 3        | 2          | 1          | 0          |            |
    backward   |          | 3          | 2          | 1          | 0          |
    reduce     |          |            | 3          | 2          | 1          | 0

Forward has no reductions, and no first pass outside the loop. Each layer is still gathered and reduced equally often. A
gather waits for the input of the previous layer (``order.py``), and a pass waits for the transfers of the previous
pass, so that at most two layers' whole weights and two layers' whole gradients exist at once.

The loops of a model are known only after tracing, and their backward only after JAX has differentiated them. So
``pipeline`` reads the traced program of a function and rewrites these loops. A gather moves if it depends on the loop's
slices, not on its carry, and a reduction moves if its results leave the loop stacked. Everything else stays in place,
such as transfers inside ``jax.checkpoint``, ``lax.cond`` and ``lax.while_loop``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_impl.comm.collectives import fence
from jax_impl.modules.seal import scan_counts
from jax_impl.runtime.program.level import (
    TRANSFERS,
    Gate,
    Level,
    Parts,
    Pass,
    Scan,
    Ways,
    sources_of,
    with_gate,
)
from jax_impl.runtime.program.traced import (
    Split,
    Values,
    evaluate,
    inline_around,
    program_of,
    read,
    scope_of,
    variables,
    whole,
)

T = TypeVar("T")


def pipeline(function: Callable[..., T], ways: Ways) -> Callable[..., T]:
    """``function`` with the transfers of its loops moved."""

    def scan(equation: Any, values: Values, gate: Gate, reduced: Gate) -> tuple[Values, Gate, Gate]:
        loop = _Loop.of(equation, values, ways)
        if loop.length > 1 and (loop.parts.gather is not None or loop.parts.late):
            return loop.run(gate, reduced, scan)
        return loop.run_unmoved(scan), None, None

    def run(*args: Any) -> T:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = Level(ways, scan).run(inline_around(program, TRANSFERS), jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """Between two passes. gathered: whole weights of the next pass. waiting: inputs of ``late`` from the previous pass.

    done: True when the reductions that ran during earlier passes are done.
    """

    carry: Values
    gathered: Values
    waiting: Values
    stacks: Values
    done: jax.Array


@dataclass(frozen=True)
class _Loop:
    """A scan. ``constants``, ``carry``, ``stacked``: its operands."""

    body: ClosedJaxpr
    parts: Parts
    constants: Values
    carry: Values
    stacked: Values
    length: int
    reverse: bool
    unroll: Any
    ways: Ways

    @staticmethod
    def of(equation: Any, values: Values, ways: Ways) -> _Loop:
        length, reverse, unroll = (equation.params[name] for name in ("length", "reverse", "unroll"))
        body = inline_around(equation.params["jaxpr"], TRANSFERS)
        constants, carries = scan_counts(equation, body.jaxpr)
        parts = Parts.of(body.jaxpr, constants, carries, reductions=ways.reductions and not ways.chained)
        # A loop in the other direction begins with the separate pass.
        stacked = [
            x.whole if isinstance(x, Split) and x.reverse == reverse else x
            for x in values[constants + carries :]
        ]
        return _Loop(
            body,
            parts,
            whole(values[:constants]),
            whole(values[constants : constants + carries]),
            stacked,
            length,
            reverse,
            unroll,
            ways,
        )

    def run_unmoved(self, scan: Scan) -> Values:
        """The results if no transfer moves."""

        def body(carry: Values, slices: Values) -> tuple[Values, Values]:
            results = Level(self.ways, scan).run(self.body, [*self.constants, *carry, *slices])
            return results[: len(carry)], results[len(carry) :]

        carry, stacks = lax.scan(
            body, self.carry, whole(self.stacked), self.length, reverse=self.reverse, unroll=self.unroll
        )
        return [*carry, *stacks]

    def run(self, gate: Gate, reduced: Gate, scan: Scan) -> tuple[Values, Gate, Gate]:
        """Results, and ``gate`` and ``reduced`` after the loop; None for the one whose transfers did not move."""
        carry, gathered, gathers = self.carry, [], self.parts.gather is not None
        if gathers:
            if gate is None:
                # Nothing was gathered before the loop: the first gather waits for the loop's input, as a unit's gather
                # waits for the unit's input (fence 1 of unit.py).
                carry, gate = fence((carry, jnp.array(True)))
            gathered = self._gather(0, gate)
        kept = [v.aval for v in self.body.jaxpr.outvars[len(carry) :]]
        stacks = [jnp.zeros((self.length - self._splits, *aval.shape), aval.dtype) for aval in kept]
        done = jnp.array(True) if reduced is None else reduced
        state, gate = _State(carry, gathered, [], stacks, done), None
        # The first pass has no reduction of an earlier pass, and its slice of a Split is separate.
        first = int(bool(self.parts.late) or any(isinstance(x, Split) for x in self.stacked))
        end = self.length - int(gathers)
        if first:
            state, gate = self._pass(0, state, scan)
        if first < end:
            state = lax.fori_loop(
                first, end, lambda k, state: self._pass(k, state, scan)[0], state, unroll=self.unroll
            )
        if gathers:
            state, gate = self._pass(end, state, scan, last=True)
        if not self.parts.late:
            return [*state.carry, *state.stacks], gate, None
        # The last reduction ends with the loop; ``reduced`` tells the following code.
        late, reduced = fence((self._run_late(state.waiting), jnp.array(True)))
        return (
            [*state.carry, *self._write_stacks(state.stacks, late, self.length - 1, late=True)],
            gate,
            reduced,
        )

    @property
    def _splits(self) -> bool:
        """Whether the last pass's results stay separate: with a reduction, stacked results are small."""
        return self.parts.gather is not None and not self.parts.late

    def _pass(self, k: Any, state: _State, scan: Scan, last: bool = False) -> tuple[_State, Gate]:
        parts, outputs, carries = self.parts, self.body.jaxpr.outvars, len(self.carry)
        carry, stacked = state.carry, self.stacked
        if last and self.ways.row_major:
            # Otherwise XLA slices this pass's inputs before the loop and keeps them: one more layer of saved arrays.
            carry, stacked = fence((carry, stacked))
        env = variables(self.body, [*self.constants, *carry, *self._slices(k, stacked)])
        issue = None
        if parts.gather is not None:
            env.update(zip(parts.gather.outvars, state.gathered, strict=True))
            issue = None if last else lambda gate: self._gather(k + 1, gate)
        # Reductions from before the loop may run during the whole first pass.
        done = jnp.array(True) if type(k) is int and k == 0 else state.done
        level = Pass(self.ways, scan, parts, done, issue)
        now = [v for i, v in enumerate(outputs) if i - carries not in parts.stacked]
        level.evaluate(self.body.jaxpr, parts.middle, env, [*now, *parts.waiting])
        reduced = self._run_late(state.waiting) if state.waiting else []
        # Transfers of this pass end with the pass, before its results are copied into the stacks: so at most two
        # layers' whole weights, and two layers' whole gradients, exist at once.
        results, waiting, gathered, reduced, done = fence(
            (whole(read(env, now)), whole(read(env, parts.waiting)), level.ahead, reduced, state.done)
        )
        if self._splits and last:
            both = zip(state.stacks, results[carries:], strict=True)
            stacks: Values = [Split(looped, value, self.reverse) for looped, value in both]
        else:
            stacks = self._write_stacks(state.stacks, results[carries:], k, late=False)
        if reduced:
            stacks = self._write_stacks(stacks, reduced, k - 1, late=True)
        return _State(results[:carries], gathered, waiting, stacks, done), level.gate

    def _gather(self, k: Any, gate: jax.Array) -> Values:
        """Whole weights of pass ``k``."""
        gather = self.parts.gather
        # Carried values are not available here, and not needed.
        inputs = [*self.constants, *[None] * len(self.carry), *self._slices(k, self.stacked)]
        env = variables(self.body, inputs)
        evaluate(self.body.jaxpr, self.parts.early, env, sources_of(gather))
        with scope_of(gather):
            return list(
                jaxpr_as_fun(program_of(gather))(
                    *with_gate(gather, [env.get(v) for v in gather.invars], gate)
                )
            )

    def _run_late(self, waiting: Values) -> Values:
        """Stacked results of a moved reduction."""
        nothing = [None] * (len(self.carry) + len(self.stacked))
        env = variables(self.body, [*self.constants, *nothing])
        env.update(zip(self.parts.waiting, waiting, strict=True))
        outputs = self.body.jaxpr.outvars[len(self.carry) :]
        wanted = [v for i, v in enumerate(outputs) if i in self.parts.stacked]
        evaluate(self.body.jaxpr, self.parts.late, env, wanted)
        return read(env, wanted)

    def _slices(self, k: Any, stacked: Values) -> Values:
        """The slices of ``stacked`` for pass ``k``."""
        slices = []
        for x in stacked:
            if not isinstance(x, Split):
                slices.append(lax.dynamic_index_in_dim(x, self._layer(k), keepdims=False))
            elif type(k) is int and k == 0:
                slices.append(x.last)
            else:
                slices.append(lax.dynamic_index_in_dim(x.looped, self._layer(k) - x.reverse, keepdims=False))
        return slices

    def _layer(self, k: Any) -> Any:
        """The layer of pass ``k``."""
        return self.length - 1 - k if self.reverse else k

    def _write_stacks(self, stacks: Values, values: Values, k: Any, late: bool) -> Values:
        """``stacks`` with the late results of pass ``k``, or with its other results."""
        mine = [i for i in range(len(stacks)) if (i in self.parts.stacked) == late]
        # The first layer is separate if the loop ends with it.
        at = self._layer(k) - int(self._splits and self.reverse)
        stacks = list(stacks)
        for i, value in zip(mine, values, strict=True):
            stacks[i] = lax.dynamic_update_index_in_dim(stacks[i], value, at, 0)
            if self.ways.row_major:
                # XLA:GPU would choose another layout for the backward loop, and copy all layers.
                stacks[i] = with_layout_constraint(stacks[i], Layout(tuple(range(stacks[i].ndim))))
        return stacks
