"""What the parts of one unit share: its phase, its name, and the schedule below its root."""

from __future__ import annotations

import torch

from torch_impl.runtime.ground.phase import READS_WEIGHTS, Phase
from torch_impl.runtime.weights.schedule import Schedule


class UnitContext:
    """Held by a unit, its groups and their buffers. ``device``: the mesh's.

    The parts do not hold the unit: such a cycle would keep a deleted model's memory until the
    garbage collector comes. They ask for the schedule at each use, since a unit is its own root
    until an outer unit runs first.
    """

    def __init__(self, device: torch.device, prefetch: int) -> None:
        self.device = device
        self.schedule = Schedule(device, prefetch)
        self.phase = Phase.REST
        self.name = ""

    @property
    def reads_weights(self) -> bool:
        """Whether a program may read compute weights without a call of the runtime."""
        return self.phase in READS_WEIGHTS

    def join(self, schedule: Schedule, name: str) -> None:
        """Share ``schedule`` from now on; ``name``: that of the unit's module below the root."""
        # A unit that has been a root until now may have left a reduction in its own schedule.
        if self.schedule is not schedule:
            self.schedule.reductions.finish()
            # It may have been turned off in any unit, before a forward told who shares one.
            if not self.schedule.pool.enabled:
                schedule.pool.enable(False)
        self.schedule, self.name = schedule, name or "root"
