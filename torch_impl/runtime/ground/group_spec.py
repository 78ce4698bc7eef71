"""What is known of a parameter group from the start: layout, dtypes, and divisor of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.policy.group_dtypes import GroupDtypes
from bridge.core.sharding.policy.strategy import Strategy
from torch_impl.comm.collective_order import CollectiveOrder
from torch_impl.runtime.ground.buffer import ShardLevels
from torch_impl.runtime.ground.host_memory import HostMemory
from torch_impl.runtime.ground.tensor_parallel import TensorParallel


@dataclass
class Divisor:
    """The number that divides sums over the ranks. A program may set another number between two steps."""

    value: float


@dataclass
class AllReduceHook:
    """A function of the program that changes reduced sums in place, before they are divided.

    ``function`` is None where there is no hook. ``stream`` is a CUDA stream on which the function
    runs in place of the stream of the reduction.
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
        # The sums are the reduction's output, and the program's stream knows nothing of that lane.
        self.stream.wait_stream(lane)
        with torch.cuda.stream(self.stream):
            self.function(sums)
        # ``finish`` waits for the lane, and divides what the hook has written.
        lane.wait_stream(self.stream)


@dataclass(frozen=True, eq=False)
class GroupSpec:
    """What is known of a group from the start; lists are in the order of ``layout.slots``.

    ``suffix`` tells the groups of a unit apart in reports. ``host``: main weights and gradients lie
    in the host's memory, not on the device. ``order`` is None where no ranks are to be compared.
    """

    names: Sequence[str]
    tensor_parallel: Sequence[TensorParallel | None]
    layout: Layout
    levels: ShardLevels
    strategy: Strategy
    dtypes: GroupDtypes[torch.dtype]
    suffix: str
    host: HostMemory | None
    divisor: Divisor
    order: CollectiveOrder | None
    hook: AllReduceHook = field(default_factory=AllReduceHook)
    shard_parameters: bool = field(init=False)
    """Whether compute weights are freed after use."""
    scatters: bool = field(init=False)
    """Whether what a reduction leaves is never in the buffer that was reduced."""
    divides_first: bool = field(init=False)
    """Whether gradients are divided before they are summed, not after."""

    def __post_init__(self) -> None:
        # Fields, not properties: a backward asks for them with every gradient.
        strategy, mesh = self.strategy, self.levels.mesh
        # Before the last microbatch a reduction takes the axes that cut gradients, if any.
        scatters = mesh.shards(strategy.gradients or strategy.optimizer) > 1
        # float16 sums of many ranks overflow: averaged before; others after, which is exact.
        divides_first = self.dtypes.reduce == torch.float16
        object.__setattr__(self, "shard_parameters", strategy.shard_parameters)
        object.__setattr__(self, "scatters", scatters)
        object.__setattr__(self, "divides_first", divides_first)
