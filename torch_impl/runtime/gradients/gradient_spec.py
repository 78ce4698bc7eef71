"""What is known of a group's gradients before any has come: where they belong, and how they are summed and divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.core.sharding.policy.group_dtypes import GroupDtypes
from bridge.core.sharding.policy.strategy import Strategy
from torch_impl.runtime.ground.buffer import ShardLevels
from torch_impl.runtime.ground.host_memory import HostMemory
from torch_impl.runtime.ground.tensor_parallel import TensorParallel


@dataclass
class Divisor:
    """By what sums over the ranks are divided. It belongs to the group: buffers and parameters may be made anew."""

    value: float


@dataclass
class AllReduceHook:
    """A function of the program that changes reduced sums in place, before they are divided; None: nothing.

    ``stream``: of CUDA, on which the function runs in place of the stream of the reduction.
    """

    function: Callable[[torch.Tensor], object] | None = None
    stream: Any = None

    def run(self, sums: torch.Tensor, async_op: bool) -> None:
        """A step of a transfer."""
        assert self.function is not None
        if self.stream is None:
            self.function(sums)
            return
        lane = torch.cuda.current_stream()
        self.stream.wait_stream(lane)
        with torch.cuda.stream(self.stream):
            self.function(sums)
        lane.wait_stream(self.stream)


@dataclass(frozen=True)
class GradientSpec:
    """What is known of a group's gradients from the start; lists are in the order of the layout's slots.

    ``params`` are the sharded parameters, whose ``.grad`` the optimizer reads, on the host if ``host`` is given.
    """

    names: Sequence[str]
    params: Sequence[nn.Parameter]
    tensor_parallel: Sequence[TensorParallel | None]
    levels: ShardLevels
    strategy: Strategy
    dtypes: GroupDtypes[torch.dtype]
    divisor: Divisor
    hook: AllReduceHook
    host: HostMemory | None

    @property
    def scatters(self) -> bool:
        """Whether what a reduction leaves is never in the buffer that was reduced."""
        # A reduction that is not the last one goes over the axes that gradients are sharded over, if there are any.
        return self.levels.mesh.shards(self.strategy.gradients or self.strategy.optimizer) > 1

    @property
    def divides_first(self) -> bool:
        """Whether gradients are divided before they are summed, not after."""
        # float16 sums overflow over many ranks, so they are averaged before; other dtypes after, which is exact.
        return self.dtypes.reduce == torch.float16
