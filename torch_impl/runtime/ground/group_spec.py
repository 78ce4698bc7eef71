"""The properties of a parameter group that are fixed at the start: layout, dtypes, divisor of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.policy.group_dtypes import GroupDtypes
from bridge.core.sharding.policy.strategy import Strategy
from torch_impl.comm.collective_order import CollectiveOrder
from torch_impl.runtime.ground.buffer import ShardLevels
from torch_impl.runtime.ground.host_memory import HostMemory
from torch_impl.runtime.ground.tensor_parallel import TensorParallel


@dataclass
class AllReduceHook:
    """A function of the program that changes reduced sums in place, before they are divided.

    ``function`` is None if there is no hook. ``stream`` is a CUDA stream on which the function runs
    instead of the reduction's stream.
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
        # The sums are the reduction's output, and the program's stream does not wait for that lane.
        self.stream.wait_stream(lane)
        with torch.cuda.stream(self.stream):
            self.function(sums)
        # ``finish`` waits for the lane, and divides the result of the hook.
        lane.wait_stream(self.stream)


@dataclass(eq=False)
class GroupSpec:
    """The properties of a group; lists are in the order of ``layout.slots``.

    All are fixed at the start, except ``divisor``, which divides sums over the ranks: a program may change it between
    two steps.

    ``suffix`` distinguishes the groups of a unit in reports. ``host``: main weights and gradients are
    stored in the host's memory, not on the device. ``order`` is None if there are no ranks to compare.
    """

    names: Sequence[str]
    tensor_parallel: Sequence[TensorParallel | None]
    layout: Layout
    levels: ShardLevels
    strategy: Strategy
    dtypes: GroupDtypes[torch.dtype]
    suffix: str
    host: HostMemory | None
    divisor: float
    order: CollectiveOrder | None
    hook: AllReduceHook = field(default_factory=AllReduceHook)
    shard_parameters: bool = field(init=False)
    """Whether compute weights are freed after use."""
    scatters: bool = field(init=False)
    """Whether the result of a reduction is never in the buffer that was reduced."""
    divides_first: bool = field(init=False)
    """Whether gradients are divided before they are summed, not after."""

    def __post_init__(self) -> None:
        # Fields, not properties, because a backward reads them for every gradient.
        strategy, mesh = self.strategy, self.levels.mesh
        self.shard_parameters = strategy.shard_parameters
        # Before the last microbatch a reduction uses only the axes that shard gradients, if any.
        self.scatters = mesh.shards(strategy.gradients or strategy.optimizer) > 1
        # float16 sums of many ranks overflow, so they are divided first; others after, which is exact.
        self.divides_first = self.dtypes.reduce == torch.float16

    def placed(self, index: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """The mesh of a parameter, and its placements on the model axes of this mesh."""
        mesh, placed = self.levels.mesh.mesh, self.tensor_parallel[index]
        return (mesh, ()) if placed is None else (placed.joint_mesh(mesh), placed.placements)

    def whole_parameter(self, index: int, whole: torch.Tensor) -> nn.Parameter:
        """A parameter over compute weights, which the model axes may cut."""
        placed, trainable = self.tensor_parallel[index], whole.is_floating_point() or whole.is_complex()
        return nn.Parameter(whole if placed is None else placed.wrap(whole), requires_grad=trainable)
