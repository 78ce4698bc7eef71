"""What the parts of one unit share: its phase, its name, and the schedule below its root."""

from __future__ import annotations

import torch

from torch_impl.comm.streams import Streams
from torch_impl.runtime.gradients.reduction import Reductions
from torch_impl.runtime.ground.phase import Lifecycle
from torch_impl.runtime.memory.pool import BufferPool
from torch_impl.runtime.weights.schedule import Schedule


class UnitContext:
    """Held by a unit, its groups and their buffers. ``device``: the mesh's.

    The parts do not hold the unit: such a cycle would keep a deleted model's memory until the garbage collector comes.
    They ask for streams and pool at each use, since a unit is its own root until an outer unit runs first.
    """

    def __init__(self, device: torch.device, prefetch: int) -> None:
        self.device = device
        self.schedule = Schedule(device, prefetch)
        self.lifecycle = Lifecycle()
        self.name = ""

    @property
    def streams(self) -> Streams:
        return self.schedule.streams

    @property
    def pool(self) -> BufferPool:
        return self.schedule.pool

    @property
    def reductions(self) -> Reductions:
        return self.schedule.reductions

    @property
    def reads_weights(self) -> bool:
        return self.lifecycle.reads_weights
