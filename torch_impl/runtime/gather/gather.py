"""From a rank's main weights to whole compute weights: what is sent, an all-gather for each mesh axis.

``CastGather`` casts and sends the compute dtype; ``SplitGather`` sends bfloat16 weights that have remainders;
``torch_impl.runtime.gather.float8`` quantizes and sends bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from bridge.core.sharding.policy.strategy import Strategy
from bridge.core.sharding.policy.strategy_collectives import collectives_of, keeps_shard
from torch_impl.comm.streams import Step
from torch_impl.runtime.ground.buffer import ShardLevels
from torch_impl.runtime.ground.host_memory import fetch


class WeightGather(Protocol):
    """How a group's compute weights come from its main weights."""

    @property
    def resident(self) -> torch.Tensor | None:
        """What a rank keeps between its main weights and whole compute weights, see the note of the package."""
        ...

    def steps(self, main: torch.Tensor, target: torch.Tensor, current: bool) -> list[Step]:
        """Steps that fill ``target``, whole, from all ranks' ``main``, an axis a step.

        ``current``: the last steps were completed with these very main weights, so that what was kept still holds.
        """
        ...


class CastGather:
    """Shards are cast to ``compute`` and gathered in it, on ``device``, where main weights may be fetched to."""

    def __init__(
        self,
        levels: ShardLevels,
        strategy: Strategy,
        compute: torch.dtype,
        device: torch.device,
        fetches: bool,
    ) -> None:
        self._levels, self._strategy, self._compute, self._device = levels, strategy, compute, device
        self._fetches = fetches
        self.resident: torch.Tensor | None = None
        if keeps_shard(strategy):
            self.resident = levels.buffer(strategy.parameters, compute, device).flat

    def steps(self, main: torch.Tensor, target: torch.Tensor, current: bool) -> list[Step]:
        transfers, steps = collectives_of(self._strategy, self._levels.axes), list[Step]()
        axes = (*transfers.gathered_once, *transfers.gathered)
        # The outer axis is the slow one: backward, and further microbatches, gather over the inner one only.
        if self.resident is not None and current:
            axes, source = (*transfers.gathered,), self.resident
        # Cast before the gather: fewer bytes cross the network.
        elif self._fetches:
            steps, source = fetch(main, self._compute, self._device)
        else:
            source = main.to(self._compute)
        if not axes:
            return [*steps, ("gather", partial(_copy, target, source))]
        # What is gathered over an axis is of the level that this axis does not cut.
        for level in axes:
            if level == 0:
                output = target
            elif self.resident is not None and level == self._strategy.parameters:
                output = self.resident
            else:
                # Between the levels that are kept, memory for this gather only.
                output = source.new_empty(self._levels.size(level))
            steps.append((lane_of(level), partial(self._levels.gather, level, output, source)))
            source = output
        return steps


class SplitGather:
    """Own rows lie in the whole compute weights, beside remainders, and are gathered from there."""

    resident = None

    def __init__(self, levels: ShardLevels, strategy: Strategy) -> None:
        self._levels, self._strategy = levels, strategy

    def steps(self, main: torch.Tensor, target: torch.Tensor, current: bool) -> list[Step]:
        """As of ``WeightGather``; ``main``, the remainders, stay where they are."""
        transfers, steps = collectives_of(self._strategy, self._levels.axes), list[Step]()
        source = self._levels.shard_of(self._strategy.optimizer, target)
        for level in (*transfers.gathered_once, *transfers.gathered):
            output = source.new_empty(self._levels.size(level)) if level else target
            steps.append((lane_of(level), partial(self._levels.gather, level, output, source)))
            source = output
        return steps


def lane_of(axis: int) -> str:
    """The lane of collectives over an axis, counted from the innermost one."""
    return "gather" if axis == 0 else "outer"


def _copy(target: torch.Tensor, source: torch.Tensor, async_op: bool) -> None:
    target.copy_(source)
