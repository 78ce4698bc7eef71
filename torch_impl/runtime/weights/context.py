"""The state that the parts of one unit share: its phase, its name, and the schedule of its root."""

from __future__ import annotations

import torch

from torch_impl.runtime.ground.phase import READS_WEIGHTS, Phase
from torch_impl.runtime.weights.schedule import Schedule


class UnitContext:
    """Held by a unit, its groups and their buffers. ``device``: the mesh's.

    The parts do not hold the unit, because such a cycle would keep a deleted model's memory until the garbage collector
    runs. They read the schedule at each use, since a unit is its own root until an outer unit runs first.
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
        """Share ``schedule`` from now on; ``name``: the name of the unit's module below the root."""
        # A unit that was a root until now may have left a reduction in its own schedule.
        if self.schedule is not schedule:
            self.schedule.reductions.finish()
            # Any unit may turn it off, before a forward shows which units share a pool.
            if not self.schedule.pool.enabled:
                schedule.pool.enable(False)
        self.schedule, self.name = schedule, name or "root"
