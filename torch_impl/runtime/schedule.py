"""What the units below one root share: order of execution, prefetching, and the reduction under way.

    forward    | unit 1       | unit 2       | unit 3            while a unit computes, the next one is gathered
    gather     | 2            | 3            |
    backward   | unit 3       | unit 2       | unit 1            and the last one's gradients are reduced
    gather     | 2            | 1            |
    reduce                    | 3            | 2        | 1

Which unit is next is not configured but recorded: what followed at this place the last time. The first backward
expects the reverse of the forward. A program that departs from the record loses the rest of one pass's prefetching,
no more: what was gathered for nothing is freed at the end of the pass. Ranks that run the same units in the same
order also prefetch alike.

Units are held weakly: a deleted model frees its memory at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_impl.comm.streams import streams_for
from torch_impl.runtime import autograd
from torch_impl.runtime.gradient import GroupGradient
from torch_impl.runtime.pool import BufferPool

if TYPE_CHECKING:
    from torch_impl.runtime.unit import Unit


class Order:
    """The units that one pass reaches, compared with the pass before."""

    def __init__(self) -> None:
        self.expected: list[weakref.ref[Unit]] = []
        self.reached: list[weakref.ref[Unit]] = []

    def restart(self) -> None:
        """A new pass begins; the last one tells what to expect."""
        if self.reached:
            self.expected, self.reached = self.reached, []

    def reach(self, unit: Unit) -> Unit | None:
        """``unit`` begins; which one is expected after it, if all went as expected until now?"""
        place = len(self.reached)
        self.reached.append(unit.reference)
        if place + 1 < len(self.expected) and self.expected[place] is unit.reference:
            return self.expected[place + 1]()
        self.expected = []
        return None


class Schedule:
    """Shared by units on one device; made by the root when it runs forward first."""

    def __init__(self, device: torch.device) -> None:
        self.streams = streams_for(device)
        self.pool = BufferPool(device)
        self.units: list[weakref.ref[Unit]] = []
        self.open_forwards = 0
        self._forward, self._backward = Order(), Order()
        self._ended: list[weakref.ref[Unit]] = []
        self._prefetched: list[weakref.ref[Unit]] = []
        self._recomputed: list[weakref.ref[Unit]] = []
        self._reducing: weakref.ref[GroupGradient] | None = None
        self._tasks: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Unit]]]] = {}

    def forward_begins(self, unit: Unit) -> list[Unit]:
        """``unit`` begins to run forward, not in backward; returns what to prefetch."""
        if self.open_forwards == 0:
            self._abandon()
            self._rest_recomputed()
            self._forward.restart()
            self.pool.forward_begins()
            self._ended = []
        return _following(unit.forward_prefetch, self._forward.reach(unit))

    def forward_ended(self, unit: Unit) -> None:
        """A forward of ``unit`` ended; after the outermost one nothing that was prefetched is needed."""
        if autograd.current_backward() is None:
            self._ended.append(unit.reference)
            if self.open_forwards == 0:
                self._drop_prefetched()
                self.pool.rest()

    def backward_begins(self, unit: Unit) -> list[Unit]:
        """``unit`` begins to run backward, or forward again in backward; returns what to prefetch."""
        return _following(unit.backward_prefetch, self._backward.reach(unit))

    def prefetch(self, units: Iterable[Unit], refresh: bool) -> None:
        """Begin to gather the weights of ``units``; what is not needed is dropped when the pass ends."""
        for unit in units:
            if unit.start_unshard(refresh):
                self._prefetched.append(unit.reference)

    def join_backward(self, unit: Unit, task: int) -> weakref.ref[Any]:
        """``unit`` takes part in a backward: its end will be told. The reference dies when the backward raises."""
        if task not in self._tasks:
            if not self._running():
                self._abandon()
                self.pool.backward_begins()
                self._backward.restart()
                if not self._backward.expected:
                    self._backward.expected = self._ended[::-1]
            ended = autograd.weakly(self._backward_ended, task)
            autograd.at_end_of_backward(ended)
            self._tasks[task] = weakref.ref(ended), []
        ended_ref, units = self._tasks[task]
        units.append(unit.reference)
        return ended_ref

    def rest_at_end(self, unit: Unit) -> None:
        """``unit`` runs forward again in backward: look at the end whether a backward of it followed."""
        self._recomputed.append(unit.reference)

    def reduce(self, gradient: GroupGradient, last: bool, idle: bool = False) -> None:
        """Begin to reduce a group's gradients, after those before it: so at most two groups' buffers are in use."""
        self.finish_reduction()
        if gradient.start(last, self.streams, idle):
            self._reducing = weakref.ref(gradient)

    def finish_reduction(self) -> None:
        """Wait for the reduction under way, if there is one."""
        gradient = self._take_reducing()
        if gradient is not None:
            gradient.finish()

    def make_room(self) -> None:
        """A gradient buffer is about to be allocated: free that of the reduction under way, if that costs nothing."""
        gradient = None if self._reducing is None else self._reducing()
        if gradient is not None and gradient.only_waits:
            self.finish_reduction()

    def _take_reducing(self) -> GroupGradient | None:
        reference, self._reducing = self._reducing, None
        return None if reference is None else reference()

    def _backward_ended(self, task: int) -> None:
        _, units = self._tasks.pop(task)
        for unit in _alive(units):
            unit.backward_ended(task)
        # A nested backward (reentrant checkpointing) ends inside one that goes on.
        if not self._running():
            # Until it is finished, its group's sums look as if they waited.
            self.finish_reduction()
            for unit in _alive(self.units):
                unit.reduce_waiting()
            self.finish_reduction()
            self._drop_prefetched()
            self._rest_recomputed()
            self.pool.backward_ended()

    def _running(self) -> bool:
        """Whether a backward runs; forgets those that raised, whose callbacks the engine has dropped."""
        self._tasks = {task: entry for task, entry in self._tasks.items() if entry[0]() is not None}
        return bool(self._tasks)

    def recover(self) -> None:
        """Drop what a pass left behind that raised. Nothing while another pass runs."""
        if self.open_forwards == 0 and not self._running():
            self._abandon()
            self._rest_recomputed()

    def _abandon(self) -> None:
        gradient = self._take_reducing()
        if gradient is not None:
            gradient.abandon()
        self._drop_prefetched()
        for unit in _alive(self.units):
            unit.drop_raised()

    # Not when a backward begins: what it recomputed before its first unit joined would lose its weights.
    def _rest_recomputed(self) -> None:
        units, self._recomputed = self._recomputed, []
        for unit in _alive(units):
            unit.rest_after_recompute()

    def _drop_prefetched(self) -> None:
        units, self._prefetched = self._prefetched, []
        for unit in _alive(units):
            unit.drop_prefetched()


def _following(given: Sequence[weakref.ref[Unit]] | None, expected: Unit | None) -> list[Unit]:
    if given is not None:
        return _alive(given)
    return [] if expected is None else [expected]


def _alive(references: Iterable[weakref.ref[Unit]]) -> list[Unit]:
    return [unit for reference in references if (unit := reference()) is not None]
