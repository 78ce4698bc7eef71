"""The schedule of a unit's transfers: in turn with computation, or during the computation of the previous unit.

For three units A, B, C; operations in one column may run at the same time, and a column waits for the previous one::

    prefetch = 0    gather A | apply A | gather B | apply B | gather C | apply C
                    gather C | backward C | reduce C | gather B | backward B | reduce B | gather A | ...

    prefetch = 1    gather A | apply A  | apply B  | apply C
                             | gather B | gather C |
                    gather C | backward C | backward B | backward A |
                             | gather B   | gather A   |            |
                             |            | reduce C   | reduce B   | reduce A

With ``prefetch = 1`` a gather waits for the *input* of the previous unit, and the use of its weights waits for that
unit's output. The next reduction, and the computation of the unit after the next, wait for a reduction. So at most two
units' whole weights and two units' whole gradients exist at once.

The order is the order of the traced program. A position in this order is known only within one trace: in the body of a
loop, and in each function that JAX traces separately, the first unit waits for its own input. In loops, ``pipeline.py``
then moves this unit's gather into the previous pass.

This module does not free memory: XLA frees an array after the last operation that reads it. Fences and gates ensure
that this operation comes before the next gather. Whole weights are kept only inside a unit R that recomputes, from a
unit's second forward to its backward, because the last units of a recomputation are the first of the following
backward. With ``prefetch = 0``, and with ``prefetch = 1``, which allows two units' whole weights at once::

    recompute R    gather A, apply A, drop A | gather B, apply B, drop B | gather C, apply C
    backward R     backward C, drop C | gather B, backward B, drop B | gather A, backward A, drop A

    recompute R    gather A, apply A, drop A | gather B, apply B | gather C, apply C
    backward R     backward C, drop C | backward B, drop B | gather A, backward A, drop A

A unit whose forward and backward are traced apart, as in a loop or in a unit without recomputation, is gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jax_impl.comm.collectives import fence, gate_after, hold_until
from jax_impl.runtime.groups.logical_group import Group
from jax_impl.runtime.groups.memory_kinds import fetch_after, is_on_device
from jax_impl.runtime.program.level import GATHER, GATHER_AHEAD, KEPT, REDUCE
from jax_impl.runtime.program.traced import mark

Held = Sequence[Sequence[jax.Array]]


@jax.tree_util.register_static
class Use:
    """One forward of a unit, equal only to itself. The unit's residuals contain this object."""


@dataclass
class Kept:
    """Kept weights in one trace of a model. ``limit``: the number of units whose whole weights may exist at once."""

    limit: int
    _recomputed: Any = None
    _held: list[tuple[Use, Any, Held]] = field(default_factory=list)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, units of the current trace run again, and their backward follows in the same trace."""
        # The trace, not a flag: forward and backward of a unit in a loop's body are traced separately, so weights kept
        # by forward would be tracers of a trace that has ended.
        before, self._recomputed = self._recomputed, get_opaque_trace_state()
        try:
            yield
        finally:
            self._recomputed = before

    def make_room(self, *, again: bool) -> None:
        """Make room for one more unit's weights. ``again``: in backward, where the previous unit's also exist."""
        # Weights that stay too long would mean three units' weights at once. Weights that are dropped here are gathered
        # a third time, which costs time, not memory.
        room = 0 if again else self.limit - 1
        del self._held[: max(0, len(self._held) - room)]

    def keep(self, held: Held) -> Use | None:
        """After a unit's forward: the use by which backward asks for the weights; None if backward gathers them."""
        trace = get_opaque_trace_state()
        if self._recomputed != trace:
            return None
        use = Use()
        self._held.append((use, trace, held))
        return use

    def take(self, use: Use | None) -> Held | None:
        """In backward: the weights of the unit whose forward was last; None if these weights were not kept."""
        # Only the last one, because backward visits units in the opposite order of their forwards.
        if self._held and self._held[-1][0] is use and self._held[-1][1] == get_opaque_trace_state():
            return self._held.pop()[2]
        return None


Tree = TypeVar("Tree")
# The arrays of each group.
Arrays = Sequence[Sequence[jax.Array]]
Reduced = list[tuple[jax.Array, ...]]


@dataclass
class _LastIssued:
    """The transfers that a trace issued last. ``gate``: a scalar True that exists when the next gather may start.
    ``reduced``: for the last two units, True when the reduction is done."""

    trace: Any = None
    gate: jax.Array | None = None
    reduced: list[jax.Array] = field(default_factory=list)


@dataclass
class Order:
    """The order of transfers in one trace of a model. ``prefetch``: 0 or 1.

    ``chained``: collectives also run one after another, which simulated devices need; code that waits for a unit's
    gradients then waits for their reduction.
    ``gates_reductions``: False if XLA reduces gradients as they are computed: a gate would only copy reduced gradients.
    ``model_axes``: whether the mesh has model axes. A gate reads an element of each array, which XLA would send over
    these axes. ``kept``: whole weights that wait for backward.
    """

    prefetch: int
    chained: bool
    gates_reductions: bool
    model_axes: bool = False
    kept: Kept = field(init=False)
    _issued: tuple[_LastIssued, _LastIssued] = field(default_factory=lambda: (_LastIssued(), _LastIssued()))

    def __post_init__(self) -> None:
        self.kept = Kept(1 + self.prefetch)

    def gather(
        self, groups: Sequence[Group], sources: Arrays, after: Tree, *, again: bool, use: Use | None = None
    ) -> tuple[Held, Tree]:
        """Whole weights of each group, from which its leaves are sliced, and ``after``, ordered after them.

        ``again``: in backward. ``use``: see ``Kept.keep``.
        """
        # Before make_room, which would drop the weights that this unit asks for.
        kept = self.kept.take(use)
        if kept is not None:
            return self._reuse(kept, after)
        if any(group.strategy.shard_parameters for group in groups):
            self.kept.make_room(again=again)
        if not self.prefetch:
            return self._gather_in_turn(groups, sources, after, again)
        sharded = [i for i, group in enumerate(groups) if group.strategy.shard_parameters]
        held = list(sources)
        if again and len(sharded) < len(groups):
            # Otherwise XLA keeps the slices that forward took from whole weights until backward, as a second copy.
            held, after = fence((held, after))
        if not sharded:
            return held, after
        last = self._last_issued(again)
        name, gate = (GATHER, None) if last.gate is None else (GATHER_AHEAD, last.gate)
        if gate is None:
            # This trace has issued nothing yet. The fence ties a constant to the unit's input: without the fence, XLA
            # would see that the gate is True and issue the gathers of all layers at the start (unrolled recomputing
            # layers: 30.65 MB instead of 8.21 MB).
            after, gate = fence((after, jnp.array(True)))

        def gather(gate: jax.Array, *sources: Sequence[jax.Array]) -> list[Sequence[jax.Array]]:
            gathered: list[Sequence[jax.Array]] = []
            for i, source in zip(sharded, sources, strict=True):
                # As in _in_turn.
                with jax.named_scope("gather"):
                    if all(map(is_on_device, source)):
                        # Also a barrier: otherwise XLA merges two gathers of the same parameter, and keeps the weights.
                        source, gate = fence((source, gate))
                        source = hold_until(source, gate)
                    else:
                        source = fetch_after(source, gate)
                    gathered.append(groups[i].gather(source))
                if self.chained:
                    # The next group's gather must wait for this one: two gathers in flight can meet under one
                    # rendezvous key of the CPU simulator, which then aborts or hangs (simulate_devices).
                    gathered, gate = fence((gathered, gate))
            return gathered

        for i, whole in zip(sharded, mark(name, gather)(gate, *(held[i] for i in sharded)), strict=True):
            held[i] = whole
        return self._open_gate(last, held, after, gate)

    def _reuse(self, held: Held, after: Tree) -> tuple[Held, Tree]:
        if not self.prefetch:
            # Otherwise XLA keeps the slices that forward took from whole weights until backward, as a second copy.
            return fence((held, after))
        last = self._last_issued(True)
        gate = last.gate
        if gate is None:
            after, gate = fence((after, jnp.array(True)))

        def keep(gate: jax.Array, held: Held) -> Held:
            # JAX does not count an operand that a call returns unchanged as a result of the call.
            return fence((held, gate))[0]

        return self._open_gate(last, mark(KEPT, keep)(gate, held), after, gate)

    def _open_gate(self, last: _LastIssued, held: Held, after: Tree, gate: jax.Array) -> tuple[Held, Tree]:
        # XLA drops unused results of a barrier, so the gate that compute waits for becomes the next gate. The reduction
        # of the unit before the last one must be done at this point. Without this wait reductions could fall behind,
        # and more than two units' whole gradients would wait for them.
        if len(last.reduced) > 1:
            gate = jnp.logical_and(gate, last.reduced[0])
        held, after, last.gate = fence((held, after, gate))
        return held, after

    def _gather_in_turn(
        self, groups: Sequence[Group], sources: Arrays, after: Tree, again: bool
    ) -> tuple[Held, Tree]:
        held = list(sources)
        several = self._needs_gates and sum(group.strategy.shard_parameters for group in groups) > 1
        gathered: Sequence[jax.Array] = ()
        # The first group comes last: the following code needs some of its weights, and so waits for all groups.
        for i in reversed(range(len(groups))):
            source = held[i]
            if groups[i].strategy.shard_parameters:
                if not all(map(is_on_device, source)):
                    # XLA's schedulers move copies from the host to the front of the program, past barriers; only a
                    # value that they cannot know delays the copies (fetch_after).
                    after, gate = fence((after, jnp.array(True)))
                    source = fetch_after(source, gate)
                # The scope begins here, because XLA names a gather that comes only from a sharding after its operands.
                with jax.named_scope("gather"):
                    # Fences 1 and 3 of unit.py: wait for the unit's input, in backward for the cotangent. Otherwise
                    # gathers leave the loop over microbatches (K = 4: 32.42 MB instead of 11.37 MB), and backward's
                    # gather merges with forward's.
                    source, after = fence((source, after))
                    if several:
                        # Barriers order XLA:CPU's schedule, but not the concurrent execution of its threads.
                        source = hold_until(source, gate_after((after, gathered)))
                    source = gathered = groups[i].gather(source)
                # The following code may not need these weights, but its collectives must still come after this one.
                source, after = fence((source, after))
            elif again:
                # Otherwise XLA keeps the slices that forward took from whole weights until backward, as a second copy.
                source, after = fence((source, after))
            held[i] = source
        return held, after

    @property
    def _needs_gates(self) -> bool:
        """Whether barriers are not enough, as in simulated devices' programs with explicit collectives."""
        # With model axes, a gate would need one more collective to read an element. Collectives that XLA adds there
        # have one channel each, so that they cannot meet under one key.
        return self.chained and self.gates_reductions and not self.model_axes

    def reduce(
        self, groups: Sequence[Group], gradients: Arrays, inner: Tree, inputs: Arrays
    ) -> tuple[Reduced, Tree, Arrays]:
        """Reduced gradients of each group, ``inner`` (gradients of units inside), and gradients of the ``inputs``."""
        last = self._last_issued(True)
        overlaps = self.prefetch and not self.chained
        if overlaps:
            # Otherwise XLA may delay gradients of weights, and keep activations for them.
            gradients, inputs = fence((gradients, inputs))
        done = jnp.array(True)
        if overlaps and last.reduced:
            # XLA would drop an unused gate, and with the gate the wait of this unit's computation.
            done = last.reduced[-1]
            done = done if last.gate is None else jnp.logical_and(done, last.gate)
        reduced: Reduced = []
        for group, values in zip(groups, gradients, strict=True):
            if not group.trainable:
                reduced.append(())
            elif overlaps:
                reduced.append(self._reduce_overlapped(group, done, values))
            else:
                # No collective may run during another (see hold): inner units' reductions, this one, the next gather.
                values, inner, reduced = fence((values, inner, reduced))
                if self._needs_gates and reduced:
                    # Gradients of vectors may not depend on the units inside.
                    values = hold_until(values, gate_after((inner, reduced)))
                with jax.named_scope("reduce"):
                    reduced.append(group.reduce(values))
        if overlaps:
            if any(group.trainable for group in groups):
                # ``done`` exists when the reductions do: the next reduction waits for it.
                reduced, done = fence((reduced, jnp.array(True)))
                last.reduced = [*last.reduced[-1:], done]
        else:
            # The fence is needed even without a reduction: otherwise XLA delays gradients of weights, and keeps
            # activations for them (4 x 8 rows of the decoder under "optim" with recomputation: 94 MB without the fence,
            # 59 MB with it). The fence includes the gate, so that the next gather, which waits for it, comes later.
            reduced, inputs, last.gate = fence((reduced, inputs, last.gate))
        return reduced, inner, inputs

    def _reduce_overlapped(
        self, group: Group, done: jax.Array, gradients: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        def reduce(done: jax.Array, *gradients: jax.Array) -> tuple[jax.Array, ...]:
            with jax.named_scope("reduce"):
                # Gates of reductions are selects, not barriers: if nothing uses a barrier's result, XLA drops the
                # dependence. In the pjit engine the gradients are already reduced, and the select would copy them.
                return group.reduce(hold_until(gradients, done) if self.gates_reductions else gradients)

        return mark(REDUCE, reduce)(done, *gradients)

    def _last_issued(self, backward: bool) -> _LastIssued:
        """The last transfers of the current trace; empty if none are known."""
        last = self._issued[backward]
        # A gate is a tracer of its trace. After the trace has ended, JAX refuses the gate (UnexpectedTracerError), and
        # in the body of a loop a gate from outside would be an operand of the loop.
        trace = get_opaque_trace_state()
        if last.trace != trace:
            last.trace, last.gate, last.reduced = trace, None, []
        return last
