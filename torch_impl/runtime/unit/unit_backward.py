"""The backwards in which a unit takes part, and the handling of the gradients that they compute."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torch_impl.runtime.ground import autograd
from torch_impl.runtime.unit.group import ParameterGroup


class UnitBackwards:
    """Backwards that a unit has joined and that have not ended; true if there are any.

    They tell when a backward has computed the gradients of all inputs of the unit. This counts calls
    of the unit, not gradients of its parameters, since ranks may use different parameters.
    """

    def __init__(self) -> None:
        # By number; a dead reference means that the backward raised.
        self._ends: dict[int, weakref.ref[Any]] = {}
        # Calls whose outputs have gradients while some inputs lack theirs, or are unknown.
        self._open_calls: set[int] = set()
        self._forwards = 0
        self._makes_graph = self.needed_later = False

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, task: int) -> bool:
        return task in self._ends

    @property
    def raised(self) -> bool:
        """Whether there are any, and all of them have raised."""
        return bool(self._ends) and all(end() is None for end in self._ends.values())

    def count_forward(self) -> None:
        """A forward has begun whose backward may follow."""
        self._forwards += 1

    def join(self, task: int, end: weakref.ref[Any]) -> None:
        """Take part in backward ``task``; ``end`` dies if it raises."""
        self._ends[task] = end
        # With create_graph, or in torch.func: gradients are computed as a part of a graph.
        self._makes_graph |= torch.is_grad_enabled()

    def reach_outputs(self, number: int, inputs: autograd.WatchedInputs) -> None:
        """Gradients have reached an output of call ``number``, or a gradient of its inputs."""
        # A call has several outputs; the inputs that take part are counted at the first.
        if number not in self._open_calls:
            self._open_calls.add(number)
            # For gradients that leave the unit unseen, no hook would gather the weights again.
            self.needed_later |= not inputs.expect() and torch.is_grad_enabled()

    def complete_inputs(self, number: int, seen: bool) -> bool:
        """The inputs of call ``number`` have their gradients; returns whether no more are to come.

        ``seen``: a backward through these gradients would be noticed.
        """
        self.needed_later |= not seen
        self._open_calls.discard(number)
        # Another call's backward may follow. Calls, unlike gradients, are equal on all ranks.
        return bool(self._ends) and not self._open_calls and self._forwards <= 1

    def end(self, task: int) -> None:
        """Backward ``task`` has ended, which the unit may already have dropped."""
        self._ends.pop(task, None)

    def forget_calls(self) -> None:
        """Expect no backward of earlier calls, unless the graph was extended."""
        self._open_calls.clear()
        if not self._makes_graph:
            self._forwards = 0
        self._makes_graph = self.needed_later = False

    def drop(self) -> None:
        """Forget all, whether they raised or not."""
        self._ends.clear()
        self._makes_graph = False
        self.forget_calls()


class UnitGradients:
    """Gradients of the ``groups`` of a unit, and the flags that setters of ``FSDPModule`` set."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self._groups = groups
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.last_backward = True
        self.exposes_main_grad = False
        # Whether a backward reached an output: on all ranks, whichever parameters they used.
        self._reached = False

    @property
    def _reduces_all(self) -> bool:
        return self.last_backward and self.requires_all_reduce

    def _keeps(self, group: ParameterGroup) -> bool:
        # Gradients that are not sharded are reduced over all axes or over none.
        return not self.requires_gradient_sync or not (self._reduces_all or group.strategy.gradients)

    def attach_main_grads(self) -> None:
        """A backward of the unit begins: let fused kernels write gradients if requested."""
        if self.exposes_main_grad:
            for group in self._groups:
                group.gradient.attach_main_grads(self._keeps(group))

    def add_gradient(self, index: int, k: int, reshards: bool) -> None:
        """Collect the gradient of parameter ``k`` of a group; ``reshards``: whether the unit does.

        RuntimeError in a backward with ``create_graph=True``.
        """
        group = self._groups[index]
        # Autograd enables gradients in hooks only in a backward with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"parameter {group.names[k]!r} of unit {group.unit_name!r}: expected a backward "
                "without create_graph=True, since the gradient of a sharded parameter is a sum over "
                "ranks and has no graph, got create_graph=True; for derivatives with respect to "
                "inputs call torch.autograd.grad(outputs, inputs, create_graph=True), and backward() "
                "of a result that is computed from them"
            )
        group.gradient.add_gradient(k, self._keeps(group), reshards and group.shard_parameters)

    def reach_outputs(self, accumulates: bool) -> None:
        """A backward has reached an output; ``accumulates``: it computes parameters' gradients."""
        self._reached = self._reached or accumulates

    def takes_part(self) -> bool:
        """Whether the running backward computes a gradient of any parameter of the unit."""
        return any(
            param.requires_grad and autograd.reaches(param)
            for group in self._groups
            for param in group.unsharded
        )

    def finish(self) -> None:
        """Reduce or keep the collected gradients; also none, if other ranks may have collected."""
        reached, self._reached = self._reached, False
        # All groups of the unit are reduced together, during the next unit's backward.
        self._wait_for_others(self._groups)
        for group in self._groups:
            if self._keeps(group):
                group.gradient.leave_unreduced()
            else:
                trains = any(param.requires_grad for param in group.params)
                group.gradient.reduce(self._reduces_all, idle=reached and trains)

    def _wait_for_others(self, groups: Sequence[ParameterGroup]) -> None:
        if groups and not all(map(self._keeps, groups)):
            groups[0].gradient.wait_for_others()

    def waiting(self) -> list[ParameterGroup]:
        """Groups with sums of earlier backwards that ``reduce_waiting`` must reduce now."""
        last = self._reduces_all
        return [group for group in self._groups if group.reduction.waits(last) and not self._keeps(group)]

    def reduce_waiting(self, groups: Sequence[ParameterGroup]) -> None:
        """Reduce the sums that earlier backwards left in these groups."""
        self._wait_for_others(groups)
        for group in groups:
            group.gradient.reduce(self._reduces_all, idle=True)

    def end_backward(self) -> None:
        """All backwards have ended: a step may follow, if gradients were reduced over all axes."""
        if self.requires_gradient_sync and self._reduces_all:
            for group in self._groups:
                group.weights.step_may_follow()

    def abandon(self) -> None:
        """Drop the gradients collected in a backward that raised."""
        self._reached = False
        for group in self._groups:
            group.gradient.abandon()
