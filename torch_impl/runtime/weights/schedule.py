"""Shared by the units below one root: order of execution, prefetching, reductions in progress.

With ``prefetch`` 1, a unit is gathered while the previous one computes, and reduced while the next one computes::

    forward    | unit 1       | unit 2       | unit 3
    gather     | 2            | 3            |
    backward   | unit 3       | unit 2       | unit 1
    gather     | 2            | 1            |
    reduce                    | 3            | 2        | 1

On the CPU gloo gathers into a copy. At the beginning of a backward all activations are in memory, and
weights and their copy would be in memory at the same time as them and the root's gradients. So the
first unit computes alone there, and the second unit's weights are gathered when it begins.

With ``prefetch`` 0 nothing is computed during a transfer, and only one unit's weights and gradients
are in memory at a time, in addition to the root's and those of enclosing units. Only modules named by
``set_modules_to_forward_prefetch`` and its backward counterpart are then gathered ahead::

    forward    gather 1 | unit 1 | gather 2 | unit 2 | gather 3 | unit 3
    backward   gather 3 | unit 3 | reduce 3 | gather 2 | unit 2 | reduce 2 | gather 1 | unit 1 | reduce 1

The next unit is not configured but recorded: it is the unit that followed last time. The first
backward expects the reverse of the forward. A program that deviates from the record loses only the
rest of one pass's prefetching: weights that were gathered for nothing are freed at the end of the
pass. Ranks that run the same units in the same order also prefetch alike.

Units are referenced weakly, so a deleted model frees its memory at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import torch

from torch_impl.comm.streams import streams_for
from torch_impl.runtime.ground import autograd
from torch_impl.runtime.ground.autograd import outside_transforms
from torch_impl.runtime.memory.pool import BufferPool

U = TypeVar("U")


class UnitParameters(Protocol):
    """The interface of a unit's parameters for a schedule."""

    def takes_part(self) -> bool: ...


class ScheduledUnit(Protocol):
    """The interface of a unit for a schedule."""

    @property
    def has_parameters(self) -> bool: ...

    @property
    def gradients(self) -> UnitParameters: ...

    def start_unshard(self, refresh: bool) -> bool: ...

    def drop_prefetched(self) -> None: ...

    def end_backward(self, task: int) -> None: ...

    def reduce_waiting(self) -> None: ...

    def end_pass(self) -> None: ...

    def rest_after_recompute(self) -> None: ...

    def drop_raised(self) -> None: ...


class Order:
    """The units that one pass reaches, compared with the previous pass."""

    def __init__(self) -> None:
        self.expected: list[weakref.ref[ScheduledUnit]] = []
        self.reached: list[weakref.ref[ScheduledUnit]] = []

    def restart(self) -> None:
        """A new pass begins; the last one determines what to expect."""
        if self.reached:
            self.expected, self.reached = self.reached, []

    def reach(self, unit: ScheduledUnit) -> list[ScheduledUnit]:
        """``unit`` begins; returns the units expected next, if all went as expected until now."""
        position = len(self.reached)
        self.reached.append(weakref.ref(unit))
        if position + 1 < len(self.expected) and self.expected[position]() is unit:
            return _alive(self.expected[position + 1 : position + 2])
        # A wrong guess costs a gather: after the first one nothing is expected until the next pass.
        self.expected = []
        return []


class Reduction(Protocol):
    """A reduction in progress, of one group."""

    @property
    def only_waits(self) -> bool: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Reductions:
    """The reductions in progress, all of one unit, so at most two units' buffers are in use."""

    def __init__(self) -> None:
        # Weak: a deleted model frees its gradients at once, even those that are being reduced.
        self._under_way: list[weakref.ref[Reduction]] = []

    def add(self, reduction: Reduction) -> None:
        """Remember a reduction; reductions of other units are already finished."""
        self._under_way.append(weakref.ref(reduction))

    def finish(self) -> None:
        """Wait for the reductions in the order in which they began, and publish their results."""
        for reduction in self._take():
            reduction.finish()

    def make_room(self) -> None:
        """A gradient buffer will be allocated: free buffers in reduction, if that costs nothing."""
        alive = _alive(self._under_way)
        if all(reduction.only_waits for reduction in alive):
            self.finish()

    def abandon(self) -> None:
        """Discard the reductions in progress: the backward that began them has raised."""
        for reduction in self._take():
            reduction.abandon()

    def _take(self) -> list[Reduction]:
        references, self._under_way = self._under_way, []
        return _alive(references)


class Schedule:
    """Shared by units on one device; ``prefetch`` is 0 or 1.

    Each unit makes one, with the ``prefetch`` that it was given. The root runs forward first, and its schedule replaces
    those of all units below: their transfers follow one another, so no unit can have a separate order.
    """

    def __init__(self, device: torch.device, prefetch: int) -> None:
        self.streams = streams_for(device)
        self.pool = BufferPool(device)
        self.reductions = Reductions()
        self._ahead = prefetch > 0
        self._units: list[weakref.ref[ScheduledUnit]] = []
        self.open_forwards = 0
        self._forward, self._backward = Order(), Order()
        # Until a unit with parameters has begun its backward.
        self._backward_starts = False
        self._ended: list[weakref.ref[ScheduledUnit]] = []
        # The number of a backward, and whether it computes gradients of parameters.
        self._accumulates: tuple[int | None, bool] = (None, False)
        self._prefetched: list[weakref.ref[ScheduledUnit]] = []
        self._recomputed: list[weakref.ref[ScheduledUnit]] = []
        self._tasks: dict[int, tuple[weakref.ref[Any], list[weakref.ref[ScheduledUnit]]]] = {}

    def add(self, unit: ScheduledUnit) -> None:
        """``unit`` is below the root of this schedule."""
        self._units.append(weakref.ref(unit))

    def begin_forward(self, unit: ScheduledUnit) -> list[ScheduledUnit]:
        """``unit`` begins to run forward, not in backward; returns what to prefetch."""
        # The outermost forward: state that an exception left open in the previous pass is obsolete.
        if self.open_forwards == 0:
            self._abandon()
            self._rest_recomputed()
            self._forward.restart()
            self.pool.begin_forward()
            self._ended = []
        return self._following(self._forward, unit)

    def end_forward(self, unit: ScheduledUnit) -> None:
        """A forward of ``unit`` ended; after the outermost, prefetched weights are not needed."""
        # Recomputed units come in the order of the backward, which is recorded separately.
        if autograd.current_backward() is None:
            self._ended.append(weakref.ref(unit))
            if self.open_forwards == 0:
                # Left by a backward inside a forward, which raised an error that the program caught.
                for left in _alive(self._units):
                    left.drop_raised()
                self._drop_prefetched()
                self.pool.rest()

    def begin_backward(self, unit: ScheduledUnit) -> list[ScheduledUnit]:
        """``unit`` begins to run backward, or forward in backward; returns what to prefetch."""
        expected = self._following(self._backward, unit)
        # See the note of the module.
        if self._backward_starts and self.streams.copies:
            expected = []
        if unit.has_parameters:
            self._backward_starts = False
        return expected

    def _following(self, order: Order, unit: ScheduledUnit) -> list[ScheduledUnit]:
        expected = order.reach(unit)
        return expected if self._ahead else []

    def begin_reductions(self) -> None:
        """A unit has begun its reductions; the next unit's backward runs during or after them."""
        if not self._ahead:
            self.reductions.finish()

    def prefetch(self, units: Iterable[ScheduledUnit], refresh: bool) -> None:
        """Begin to gather weights of ``units``; unused ones are dropped when the pass ends."""
        for unit in units:
            # Weights that were already there must not be dropped by this pass.
            if unit.start_unshard(refresh):
                self._prefetched.append(weakref.ref(unit))

    def join_backward(self, unit: ScheduledUnit, task: int) -> weakref.ref[Any]:
        """``unit`` takes part in a backward, and gets a call at its end; the reference dies if it raises."""
        if task not in self._tasks:
            # A nested backward (reentrant checkpointing) continues the pass of the outer one.
            if not self._running():
                # Nothing reports a backward that raised: the engine has dropped its callbacks.
                self._abandon()
                self.pool.begin_backward()
                self._backward.restart()
                self._backward_starts = True
                # For a first backward, assume that it reverses the forward, as in most programs.
                if not self._backward.expected:
                    self._backward.expected = self._ended[::-1]
            ended = autograd.weakly(self._end_backward, task)
            # The engine holds the only reference, so a dead one means that the backward raised.
            autograd.at_end_of_backward(ended)
            self._tasks[task] = weakref.ref(ended), []
        ended_ref, units = self._tasks[task]
        units.append(weakref.ref(unit))
        return ended_ref

    def accumulates(self) -> bool:
        """Whether the running backward computes gradients of any unit's parameters.

        False if a program asks for gradients of inputs only, as for a penalty: then nothing is to be reduced.
        """
        task = autograd.current_backward()
        if self._accumulates[0] != task:
            self._accumulates = task, any(unit.gradients.takes_part() for unit in _alive(self._units))
        return self._accumulates[1]

    def rest_at_end(self, unit: ScheduledUnit) -> None:
        """``unit`` runs forward again in backward: check at the end whether its backward followed."""
        self._recomputed.append(weakref.ref(unit))

    @outside_transforms
    def _end_backward(self, task: int) -> None:
        _, units = self._tasks.pop(task)
        # In the order of joining, which is the order of the backward, and equal on all ranks.
        for unit in _alive(units):
            unit.end_backward(task)
        # A nested backward (reentrant checkpointing) ends inside one that continues.
        if not self._running():
            # Until a reduction is finished, its group's sums look as if they waited.
            self.reductions.finish()
            for unit in _alive(self._units):
                unit.reduce_waiting()
            self.reductions.finish()
            # Not after the backward of a part of a loss, which reads weights but reaches no unit.
            # Nor inside a forward, which may read them.
            passed = self._backward.reached and not self.open_forwards
            for unit in _alive(self._units) if passed else ():
                unit.end_pass()
            self._drop_prefetched()
            self._rest_recomputed()
            self.pool.end_backward()

    def _running(self) -> bool:
        """Whether a backward runs; forgets backwards that raised, whose callbacks are dropped."""
        self._tasks = {task: entry for task, entry in self._tasks.items() if entry[0]() is not None}
        return bool(self._tasks)

    def recover(self) -> None:
        """Drop the state of a pass that raised. Does nothing while another pass runs."""
        # A program may call zero_grad in a forward or a hook: then no state was left behind.
        if self.open_forwards == 0 and not self._running():
            self._abandon()
            self._rest_recomputed()

    def _abandon(self) -> None:
        # First: a reduction of the last pass must not publish into the next one's gradients.
        self.reductions.abandon()
        self._drop_prefetched()
        for unit in _alive(self._units):
            unit.drop_raised()

    # Not when a backward begins: units that it recomputed before they joined need weights.
    def _rest_recomputed(self) -> None:
        units, self._recomputed = self._recomputed, []
        for unit in _alive(units):
            unit.rest_after_recompute()

    def _drop_prefetched(self) -> None:
        units, self._prefetched = self._prefetched, []
        for unit in _alive(units):
            unit.drop_prefetched()


def _alive(references: Iterable[weakref.ref[U]]) -> list[U]:
    return [unit for reference in references if (unit := reference()) is not None]
