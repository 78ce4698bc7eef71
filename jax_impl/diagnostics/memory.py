"""Bytes that a sharded training state keeps on each device between steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax

from bridge.core.text import human_bytes
from bridge.core.views import Viewed
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from jax_impl.train_state import TrainState

KINDS = ("main_weights", "moments", "padding", "other")


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a device's part of the state that are stored in host memory, in the categories of ``DeviceMemory``."""

    main_weights: int = 0
    moments: int = 0
    padding: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.main_weights + self.moments + self.padding + self.other


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes at rest on one device.

    With P parameters in buffers of W shards, ``main_weights`` is 4P / W on average, ``moments`` 8P / W, and ``padding``
    fills the three buffers to equal shards. ``other`` is the rest of the optimizer state (the step count), and
    variables that are not parameters. ``on_host``: the bytes in host memory (``pinned_host``), and ``host`` their
    total; ``total`` does not include them. Compute weights and gradients live only inside a step.
    """

    device: str
    main_weights: int
    moments: int
    padding: int
    other: int
    on_host: HostMemory = HostMemory()

    @property
    def total(self) -> int:
        return self.main_weights + self.moments + self.padding + self.other

    @property
    def host(self) -> int:
        return self.on_host.total


@dataclass(frozen=True, repr=False)
class MemoryReport(Viewed):
    """One entry for each device that this process addresses."""

    devices: tuple[DeviceMemory, ...]

    def summary(self) -> str:
        """One line."""
        most, host = (max((getattr(d, name) for d in self.devices), default=0) for name in ("total", "host"))
        more = f", and {human_bytes(host)} in host memory" if host else ""
        return f"{len(self.devices)} devices: at most {human_bytes(most)} at rest on one{more}"

    def __str__(self) -> str:
        columns = (*KINDS, "total")
        rows: list[tuple[str, DeviceMemory | HostMemory]] = []
        for device in self.devices:
            rows.append((device.device, device))
            if device.host:
                rows.append(("  in host memory", device.on_host))
        width = max(16, *(len(name) + 1 for name, _ in rows))
        lines = [f"{'bytes at rest':<{width}}" + "".join(f"{column:>16}" for column in columns)]
        lines += [
            f"{name:<{width}}" + "".join(f"{getattr(own, column):>16,}" for column in columns)
            for name, own in rows
        ]
        return "\n".join(lines)


def memory_report(plan: ShardingPlan, state: TrainState) -> MemoryReport:
    """Count the bytes of the arrays' own shards; the layouts tell parameters from padding.

    Arrays in a kind of memory other than the device's default count as host memory.
    """
    devices = [d for d in plan.mesh.devices.flat if d.process_index == jax.process_index()]
    # By device, and by whether the bytes are on the host.
    byte_counts = {(device, host): Counter[str]() for device in devices for host in (False, True)}

    def add(tree: Any, column: str) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            located = plan.locate_buffer(path, leaf)
            for shard in leaf.addressable_shards:
                host = leaf.sharding.memory_kind not in (None, shard.device.default_memory().kind)
                stored = shard.data.nbytes
                real = plan.stored(located[0]).numel(shard.index) * leaf.dtype.itemsize if located else stored
                own = byte_counts[shard.device, host]
                own[column if located else "other"] += real
                own["padding"] += stored - real

    add(state.weights, "main_weights")
    add(state.opt_state, "moments")
    add(state.variables, "other")

    def of(device: jax.Device, host: bool) -> dict[str, int]:
        return {column: byte_counts[device, host][column] for column in KINDS}

    return MemoryReport(
        tuple(DeviceMemory(str(d), **of(d, False), on_host=HostMemory(**of(d, True))) for d in devices)
    )
