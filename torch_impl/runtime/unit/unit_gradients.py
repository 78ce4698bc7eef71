"""Which gradients of a unit are reduced when a backward has computed them, over which axes, and which are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_impl.runtime.ground import autograd
from torch_impl.runtime.unit.group import ParameterGroup


class UnitGradients:
    """Gradients of the ``groups`` of a unit. The program sets the flags, by the setters of ``FSDPModule``."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self._groups = groups
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.last_backward = True
        self.exposes_main_grad = False
        # Whether a backward has reached an output of the unit: on all ranks, whichever parameters each of them used.
        self._reached = False

    @property
    def _reduces_all(self) -> bool:
        return self.last_backward and self.requires_all_reduce

    def _keeps(self, group: ParameterGroup) -> bool:
        # Gradients that are not sharded are reduced over all axes or over none.
        return not self.requires_gradient_sync or not (self._reduces_all or group.strategy.gradients)

    def attach_main_grads(self) -> None:
        """A backward of the unit begins: let fused kernels write gradients, if the program wants that."""
        if self.exposes_main_grad:
            for group in self._groups:
                group.gradient.attach_main_grads(self._keeps(group))

    def add_gradient(self, index: int, k: int, reshards: bool) -> None:
        """Collect the gradient of parameter ``k`` of group ``index``; ``reshards``: the unit does after backward.

        RuntimeError in a backward with ``create_graph=True``.
        """
        group = self._groups[index]
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"parameter {group.names[k]!r} of unit {group.unit_name!r}: expected a backward without "
                "create_graph=True, since the gradient of a sharded parameter, a sum over ranks, has no graph, got one "
                "with it; for derivatives by inputs call torch.autograd.grad(outputs, inputs, create_graph=True), and "
                "backward() of what is computed from them"
            )
        group.gradient.add_gradient(k, self._keeps(group), reshards and group.strategy.shard_parameters)

    def outputs_reached(self, accumulates: bool) -> None:
        """A backward has reached an output of the unit; ``accumulates``: it computes gradients of parameters."""
        self._reached = self._reached or accumulates

    def takes_part(self) -> bool:
        """Whether the backward that runs now computes a gradient of any parameter of the unit."""
        return any(
            param.requires_grad and autograd.reaches(param)
            for group in self._groups
            for param in group.unsharded
        )

    def finish(self) -> None:
        """Reduce or keep what was collected; also where nothing was, if other ranks may have collected something."""
        reached, self._reached = self._reached, False
        # All groups of the unit are reduced side by side, during the next unit's backward.
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
        """Groups with sums of earlier backwards that are to be reduced now, by ``reduce_waiting``."""
        last = self._reduces_all
        return [one for one in self._groups if one.reduction.waits(last) and not self._keeps(one)]

    def reduce_waiting(self, groups: Sequence[ParameterGroup]) -> None:
        """Reduce what earlier backwards left in these."""
        self._wait_for_others(groups)
        for group in groups:
            group.gradient.reduce(self._reduces_all, idle=True)

    def backward_ended(self) -> None:
        """All backwards have ended: the program may make a step now, if it has reduced the gradients for that."""
        if self.requires_gradient_sync and self._reduces_all:
            for group in self._groups:
                group.step_may_follow()

    def abandon(self) -> None:
        """Drop what was collected in a backward that raised."""
        self._reached = False
        for group in self._groups:
            group.gradient.abandon()
