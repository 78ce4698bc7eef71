"""Which gradients of a unit are reduced when a backward has computed them, over which axes, and which are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_impl.runtime.group import ParameterGroup


class UnitGradients:
    """Gradients of the ``groups`` of a unit. The program sets the flags, by the setters of ``FSDPModule``."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self._groups = groups
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.last_backward = True
        self.exposes_main_grad = False

    @property
    def _reduces_all(self) -> bool:
        return self.last_backward and self.requires_all_reduce

    def _keeps(self, group: ParameterGroup) -> bool:
        # Gradients that are not sharded are reduced over all axes or over none.
        return not self.requires_gradient_sync or not (self._reduces_all or group.strategy.gradients)

    def expose(self) -> None:
        """A backward of the unit begins: let fused kernels write gradients, if the program wants that."""
        if self.exposes_main_grad:
            for group in self._groups:
                group.gradient.expose(self._keeps(group))

    def arrived(self, index: int, k: int, reshards: bool) -> None:
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
        group.gradient.arrived(k, self._keeps(group), reshards and group.strategy.shard_parameters)

    def finish(self) -> None:
        """Reduce or keep what was collected."""
        for group in self._groups:
            if self._keeps(group):
                group.gradient.keep()
            else:
                group.gradient.reduce(self._reduces_all)

    def waiting(self) -> list[ParameterGroup]:
        """Groups with sums of earlier backwards that are to be reduced now, by ``reduce_waiting``."""
        last = self._reduces_all
        return [one for one in self._groups if one.reduction.waits(last) and not self._keeps(one)]

    def reduce_waiting(self, groups: Sequence[ParameterGroup]) -> None:
        """Reduce what earlier backwards left in these."""
        for group in groups:
            group.gradient.reduce(self._reduces_all, idle=True)

    def abandon(self) -> None:
        """Drop what was collected in a backward that raised."""
        for group in self._groups:
            group.gradient.abandon()
