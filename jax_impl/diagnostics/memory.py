"""Bytes that a sharded training state keeps on each device between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jax_impl.runtime.sharding_plan import ShardingPlan
from jax_impl.train_state import TrainState


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes at rest on one device.

    With P parameters in buffers of W shards, ``main_weights`` is 4P / W on average, ``moments`` 8P / W, and
    ``padding`` fills the three buffers to equal shards. ``other`` is the rest of the optimizer state (the step
    count), and variables that are no parameters.
    ``host``: of all four kinds, what lies in the host's memory (``pinned_host``) instead; not in ``total``.
    Compute weights and gradients live only inside a step.
    """

    device: str
    main_weights: int
    moments: int
    padding: int
    other: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.main_weights + self.moments + self.padding + self.other


@dataclass(frozen=True)
class MemoryReport:
    """One entry for each device that this process addresses."""

    devices: tuple[DeviceMemory, ...]

    def __str__(self) -> str:
        kinds: tuple[str, ...] = ("main_weights", "moments", "padding", "other", "total")
        if any(device.host for device in self.devices):
            kinds = (*kinds, "host")
        lines = [f"{'bytes at rest':<16}" + "".join(f"{kind:>16}" for kind in kinds)]
        lines += [
            f"{d.device:<16}" + "".join(f"{getattr(d, kind):>16,}" for kind in kinds) for d in self.devices
        ]
        return "\n".join(lines)


def memory_report(plan: ShardingPlan, state: TrainState) -> MemoryReport:
    """Counted from the arrays' own shards; the split into parameters and padding comes from the layouts.

    Arrays in a kind of memory that is not the device's own count as the host's.
    """
    devices = [d for d in plan.mesh.devices.flat if d.process_index == jax.process_index()]
    main = dict.fromkeys(devices, 0)
    moments, padding, other, host = dict(main), dict(main), dict(main), dict(main)

    def add(tree: Any, kind: dict[jax.Device, int]) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            located = plan.locate_buffer(path, leaf)
            for shard in leaf.addressable_shards:
                stored = shard.data.nbytes
                if leaf.sharding.memory_kind not in (None, shard.device.default_memory().kind):
                    host[shard.device] += stored
                    continue
                real = plan.stored(located[0]).numel(shard.index) * leaf.dtype.itemsize if located else stored
                (kind if located else other)[shard.device] += real
                padding[shard.device] += stored - real

    add(state.weights, main)
    add(state.opt_state, moments)
    add(state.variables, other)
    return MemoryReport(
        tuple(DeviceMemory(str(d), main[d], moments[d], padding[d], other[d], host[d]) for d in devices)
    )
