"""When a unit's transfers run: in turn with the computation, or during that of the unit before.

Of three units A, B, C; what stands in one column may run at the same time, and a column waits for
the one before::

    prefetch = 0    gather A | apply A | gather B | apply B | gather C | apply C
                    gather C | backward C | reduce C | gather B | backward B | reduce B | gather A | ...

    prefetch = 1    gather A | apply A  | apply B  | apply C
                             | gather B | gather C |
                    gather C | backward C | backward B | backward A |
                             | gather B   | gather A   |            |
                             |            | reduce C   | reduce B   | reduce A

With ``prefetch = 1`` a gather waits for the *input* of the unit before it, its use for that unit's
output. A reduction is waited for by the next reduction, and by the computation of the unit after
the next. So at most two units' whole weights and two units' whole gradients exist at once.

The order is that of the traced program. A place in it is known only in the trace that it belongs
to: in the body of a loop, and in each function that JAX traces apart, the first unit waits for its
own input. In loops ``pipeline.py`` then moves its gather into the pass before.

Nothing here frees memory: XLA does, when the last operation that reads an array has run. Fences and
gates see to it that this operation comes before the next gather. Whole weights stay only from a
unit's second forward to its backward, inside of a unit R that recomputes, since the last units of a
recomputation are the first of the backward that follows. With ``prefetch = 0``, and with
``prefetch = 1``, where two units' whole weights may exist at once::

    recompute R    gather A, apply A, drop A | gather B, apply B, drop B | gather C, apply C
    backward R     backward C, drop C | gather B, backward B, drop B | gather A, backward A, drop A

    recompute R    gather A, apply A, drop A | gather B, apply B | gather C, apply C
    backward R     backward C, drop C | backward B, drop B | gather A, backward A, drop A

A unit whose forward and backward are traced apart, as in a loop or inside of a unit that does not
recompute, is gathered again.
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
    """One forward of a unit, equal to itself alone. What the unit saves for backward has it."""


@dataclass
class Kept:
    """Of one trace of a model. ``limit``: of how many units there may be whole weights at once."""

    limit: int
    _recomputed: Any = None
    _held: list[tuple[Use, Any, Held]] = field(default_factory=list)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, units that are traced in the present trace run again, and their backward follows in it."""
        # The trace, no flag: forward and backward of a unit in a loop's body are traced apart, and
        # what forward kept would be tracers of a trace that has ended.
        before, self._recomputed = self._recomputed, get_opaque_trace_state()
        try:
            yield
        finally:
            self._recomputed = before

    def make_room(self, *, again: bool) -> None:
        """For one more unit's weights. ``again``: in backward, where those of the unit before are there as well."""
        # Weights that stay longer than their turn would make three units' weights at once. Those
        # that are dropped here are gathered a third time, which costs time, not memory.
        room = 0 if again else self.limit - 1
        del self._held[: max(0, len(self._held) - room)]

    def keep(self, held: Held) -> Use | None:
        """After a unit's forward: its use, by which backward asks for its weights; None where backward gathers them."""
        trace = get_opaque_trace_state()
        if self._recomputed != trace:
            return None
        use = Use()
        self._held.append((use, trace, held))
        return use

    def take(self, use: Use | None) -> Held | None:
        """In backward, of the unit whose forward was the last; None where its weights did not stay."""
        # The last one only, since backward meets units in the opposite order of their forwards.
        if self._held and self._held[-1][0] is use and self._held[-1][1] == get_opaque_trace_state():
            return self._held.pop()[2]
        return None


Tree = TypeVar("Tree")
# Of each group.
Arrays = Sequence[Sequence[jax.Array]]
Reduced = list[tuple[jax.Array, ...]]


@dataclass
class _LastIssued:
    """What a trace has issued last. ``gate``: True, a scalar that exists when the next gather may start. ``reduced``:
    True when a reduction is done, of the last two units."""

    trace: Any = None
    gate: jax.Array | None = None
    reduced: list[jax.Array] = field(default_factory=list)


@dataclass
class Order:
    """Of one trace of a model. ``prefetch``: 0 or 1.

    ``chained``: collectives also follow one another, which simulated devices need: what waits for a unit's gradients
    then waits for their reduction.
    gates_reductions: False where XLA reduces gradients as they are computed: what waits for a gate there is reduced
    already, and copied.
    model_axes: whether the mesh has any. A gate reads an element of each array, which XLA would send over them.
    kept: whole weights that wait for backward.
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
        """Whole weights of each group, from which its leaves are cut, and ``after``, which comes after them.

        ``again``: in backward. ``use``: see ``Kept.keep``.
        """
        # Before make_room, which would drop the weights that this very unit asks for.
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
            # Else XLA keeps what forward cut from whole weights until backward, a second copy of
            # them.
            held, after = fence((held, after))
        if not sharded:
            return held, after
        last = self._last_issued(again)
        name, gate = (GATHER, None) if last.gate is None else (GATHER_AHEAD, last.gate)
        if gate is None:
            # Nothing was issued in this trace. The fence ties a constant to the unit's input:
            # unfenced, XLA would see that the gate is True and issue the gathers of all layers at
            # the start (unrolled recomputing layers: 30.65 MB instead of 8.21).
            after, gate = fence((after, jnp.array(True)))

        def gather(gate: jax.Array, *sources: Sequence[jax.Array]) -> list[Sequence[jax.Array]]:
            gathered: list[Sequence[jax.Array]] = []
            for i, source in zip(sharded, sources, strict=True):
                # As in _in_turn.
                with jax.named_scope("gather"):
                    if all(map(is_on_device, source)):
                        # A barrier, too: else XLA makes one gather of two of the same parameter,
                        # and keeps its weights.
                        source, gate = fence((source, gate))
                        source = hold_until(source, gate)
                    else:
                        source = fetch_after(source, gate)
                    gathered.append(groups[i].gather(source))
                if self.chained:
                    # The next group's gather after this one: two in flight meet under one
                    # rendezvous key of the CPU simulator, which then aborts or hangs
                    # (simulate_devices).
                    gathered, gate = fence((gathered, gate))
            return gathered

        for i, whole in zip(sharded, mark(name, gather)(gate, *(held[i] for i in sharded)), strict=True):
            held[i] = whole
        return self._open_gate(last, held, after, gate)

    def _reuse(self, held: Held, after: Tree) -> tuple[Held, Tree]:
        if not self.prefetch:
            # Else XLA keeps what forward cut from whole weights until backward, a second copy of
            # them.
            return fence((held, after))
        last = self._last_issued(True)
        gate = last.gate
        if gate is None:
            after, gate = fence((after, jnp.array(True)))

        def keep(gate: jax.Array, held: Held) -> Held:
            # What a call returns as it was given is none of its results.
            return fence((held, gate))[0]

        return self._open_gate(last, mark(KEPT, keep)(gate, held), after, gate)

    def _open_gate(self, last: _LastIssued, held: Held, after: Tree, gate: jax.Array) -> tuple[Held, Tree]:
        # What leaves a barrier and is not used is dropped, so what compute waits for goes on as the
        # next gate. The reduction of the unit before the last must be done by here. Without this
        # wait reductions could fall behind, and the whole gradients of more than two units would
        # wait for theirs.
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
        # The first group last: what follows needs something of it, and so waits for all of them.
        for i in reversed(range(len(groups))):
            source = held[i]
            if groups[i].strategy.shard_parameters:
                if not all(map(is_on_device, source)):
                    # XLA's schedulers move copies from the host to the front of the program, past
                    # barriers; only a value that they cannot know holds them back (fetch_after).
                    after, gate = fence((after, jnp.array(True)))
                    source = fetch_after(source, gate)
                # From here on: where a sharding alone says "gather", XLA names the operation by
                # what it reads.
                with jax.named_scope("gather"):
                    # Fences 1 and 3 of unit.py: not before the unit's input, in backward not before
                    # the cotangent. Without: gathers leave the loop over microbatches (K = 4: 32.42
                    # MB instead of 11.37), and backward's gather merges with forward's.
                    source, after = fence((source, after))
                    if several:
                        # Barriers order what XLA:CPU schedules, not what its threads run at once.
                        source = hold_until(source, gate_after((after, gathered)))
                    source = gathered = groups[i].gather(source)
                # What follows may need nothing of these weights; its collectives must still come
                # after this one.
                source, after = fence((source, after))
            elif again:
                # Else XLA keeps what forward cut from whole weights until backward, a second copy
                # of them.
                source, after = fence((source, after))
            held[i] = source
        return held, after

    @property
    def _needs_gates(self) -> bool:
        """Whether barriers do not do, as of programs of simulated devices whose collectives are written."""
        # With model axes an element that a gate reads would be sent over them, a collective more;
        # what XLA adds there has a channel each, so that nothing can meet under one key.
        return self.chained and self.gates_reductions and not self.model_axes

    def reduce(
        self, groups: Sequence[Group], gradients: Arrays, inner: Tree, inputs: Arrays
    ) -> tuple[Reduced, Tree, Arrays]:
        """Reduced gradients of each group, and ``inner``, those of units inside, and gradients of the ``inputs``."""
        last = self._last_issued(True)
        beside = self.prefetch and not self.chained
        if beside:
            # Else XLA may put off gradients of weights, and keep activations for them.
            gradients, inputs = fence((gradients, inputs))
        done = jnp.array(True)
        if beside and last.reduced:
            # A gate that is used nowhere would be dropped, and what this unit's computation waits
            # for with it.
            done = last.reduced[-1]
            done = done if last.gate is None else jnp.logical_and(done, last.gate)
        reduced: Reduced = []
        for group, values in zip(groups, gradients, strict=True):
            if not group.trainable:
                reduced.append(())
            elif beside:
                reduced.append(self._reduce_beside(group, done, values))
            else:
                # No collective during another (see hold): reductions of inner units, this one, the
                # next gather.
                values, inner, reduced = fence((values, inner, reduced))
                if self._needs_gates and reduced:
                    # Gradients of vectors alone may need nothing of units inside.
                    values = hold_until(values, gate_after((inner, reduced)))
                with jax.named_scope("reduce"):
                    reduced.append(group.reduce(values))
        if beside:
            if any(group.trainable for group in groups):
                # ``done`` exists when the reductions do: the next reduction waits for it.
                reduced, done = fence((reduced, jnp.array(True)))
                last.reduced = [*last.reduced[-1:], done]
        else:
            # Also without a reduction: else XLA puts off gradients of weights, and keeps
            # activations for them (4 x 8 rows of the decoder under "optim" with recomputation: 94
            # MB, with the fence 59). The gate goes along, so that the next gather, which waits for
            # it, follows this reduction.
            reduced, inputs, last.gate = fence((reduced, inputs, last.gate))
        return reduced, inner, inputs

    def _reduce_beside(
        self, group: Group, done: jax.Array, gradients: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        def reduce(done: jax.Array, *gradients: jax.Array) -> tuple[jax.Array, ...]:
            with jax.named_scope("reduce"):
                # Gates of reductions are choices, no barriers: nothing may use what leaves a
                # barrier, and XLA then drops the dependence. In the pjit engine what waits is
                # reduced already, and the choice would be a copy of it.
                return group.reduce(hold_until(gradients, done) if self.gates_reductions else gradients)

        return mark(REDUCE, reduce)(done, *gradients)

    def _last_issued(self, backward: bool) -> _LastIssued:
        """Of the present trace; empty where nothing is known of it."""
        last = self._issued[backward]
        # A gate is a tracer of its trace. Once that has ended JAX refuses it
        # (UnexpectedTracerError), and in the body of a loop a gate from around it would be an
        # operand of the loop.
        trace = get_opaque_trace_state()
        if last.trace != trace:
            last.trace, last.gate, last.reduced = trace, None, []
        return last
