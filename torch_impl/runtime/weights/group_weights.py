"""What a parameter group is told when it is made, and what it asks of its weights, however these lie in memory.

``flat_weights`` has those of most groups, ``extended_weights`` those whose class says itself what is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import nn

from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.policy.group_dtypes import GroupDtypes
from bridge.core.sharding.policy.strategy import Strategy
from torch_impl.comm.streams import Step
from torch_impl.runtime.ground.buffer import ShardLevels
from torch_impl.runtime.ground.host_memory import HostMemory
from torch_impl.runtime.ground.tensor_parallel import TensorParallel
from torch_impl.runtime.weights.context import UnitContext

Version: TypeAlias = tuple[int, ...]

GivenParameter: TypeAlias = tuple[nn.Parameter, torch.Tensor]
"""A parameter, and its values or, under tensor parallelism, this rank's part of them."""


@dataclass(frozen=True, eq=False)
class GroupSpec:
    """What is known of a group from the start; lists are in the order of ``layout.slots``.

    ``context`` is that of the unit, whose groups ``suffix`` tells apart in reports. ``host``: main weights and
    gradients lie there, not on the device.
    """

    names: Sequence[str]
    tensor_parallel: Sequence[TensorParallel | None]
    layout: Layout
    levels: ShardLevels
    strategy: Strategy
    dtypes: GroupDtypes[torch.dtype]
    context: UnitContext
    suffix: str
    host: HostMemory | None


class GroupWeights(Protocol):
    """The main weights and the compute weights of a group, and the parameters over both."""

    params: list[nn.Parameter]
    """Sharded, over the main weights."""
    unsharded: list[nn.Parameter]
    """Over the compute weights."""

    def allocate(
        self, device: torch.device, given: Sequence[GivenParameter], finish: Callable[[], None]
    ) -> None:
        """Make weights and parameters like the given ones, with their values if they have any.

        ``finish`` ends a gather that is under way.
        """
        ...

    def when_made(self, callback: Callable[[], None]) -> None:
        """Call back when ``unsharded`` are others than now, if they are not known before the first gather."""
        ...

    @property
    def on_meta(self) -> bool:
        """Whether the weights have shapes, but no memory yet."""
        ...

    @property
    def main_tensors(self) -> list[torch.Tensor]:
        """The memory of the main weights."""
        ...

    @property
    def main_version(self) -> Version:
        """Another one after each write to the main weights."""
        ...

    @property
    def real_bytes(self) -> int:
        """Bytes of the main weights without padding."""
        ...

    @property
    def resident(self) -> torch.Tensor | None:
        """See the note of the package."""
        ...

    @property
    def separate(self) -> bool:
        """Whether the compute weights are others than the main weights."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether compute weights come from a gather; else, under no_shard, they are the main weights."""
        ...

    @property
    def compute_tensors(self) -> list[torch.Tensor]:
        """The memory of the compute weights."""
        ...

    @property
    def compute_device(self) -> torch.device:
        """Where the compute weights lie."""
        ...

    @property
    def allocated(self) -> bool:
        """Whether the compute weights have memory; under no_shard always."""
        ...

    @property
    def aside(self) -> bool:
        """Whether what was gathered waits for ``settle``."""
        ...

    def steps(self, changed: bool, current: bool) -> list[Step]:
        """What gathers the main weights.

        ``changed``: they are others than at the last gather. ``current``: a gather of these very main weights was
        completed, so that what was kept of it still holds.
        """
        ...

    def settle(self) -> None:
        """Bring what was gathered to where ``unsharded`` are, before they are read."""
        ...

    def release(self) -> None:
        """Forget the compute weights and free their memory."""
        ...
