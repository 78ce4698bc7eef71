"""The mesh of a policy as numbers: sizes by axis, and the shard of each device.

Model axes come after the data-parallel axes and take no part in sharding: all their places hold shards with the same
number, of different parts of the parameters. Everything else in this file is about data-parallel axes.

Axes are listed from outer to inner and counted from the innermost one. On M x N devices, row-major, shard k of a buffer
cut over both axes is on the device with coordinates (m, n), k = n M + m, so that a gather over the outer axis makes the
coarser shard::

    device   0   1   2   3   4   5        2 x 3, cut over both axes
    (m, n)  0,0 0,1 0,2 1,0 1,1 1,2
    shard    0   2   4   1   3   5
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bridge.core.sharding.policy.mesh_axes import is_model_axis
from bridge.planning.models.errors import PlanError


@dataclass(frozen=True)
class MeshShape:
    """``names`` and ``sizes`` of the data-parallel axes, outer to inner; ``model``: sizes of the model axes by name."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    model: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes or len(self.names) != len(self.sizes) or min(self.sizes) < 1:
            raise PlanError(f"mesh: expected one or more axes of one or more devices, got {self}")

    @staticmethod
    def of(sizes: Mapping[str, int]) -> MeshShape:
        """From ``{axis: size}``, outer to inner."""
        data = {name: size for name, size in sizes.items() if not is_model_axis(name)}
        model = tuple((name, size) for name, size in sizes.items() if name not in data)
        return MeshShape(tuple(data), tuple(data.values()), model)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.all_axes.items())

    @property
    def all_axes(self) -> dict[str, int]:
        """Sizes of all axes by name, outer to inner."""
        return {**dict(zip(self.names, self.sizes, strict=True)), **dict(self.model)}

    @property
    def model_ranks(self) -> int:
        """The number of places of all model axes."""
        return math.prod(size for _, size in self.model)

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def devices(self) -> int:
        """The number of devices over all axes."""
        return math.prod(self.sizes) * self.model_ranks

    def name(self, axis: int) -> str:
        """The name of the axis at position ``axis``, counted from the innermost."""
        return self.names[-1 - axis]

    def size(self, axis: int) -> int:
        """The size of the axis at position ``axis``, counted from the innermost."""
        return self.sizes[-1 - axis]

    def shards(self, axes: int) -> int:
        """The number of shards into which the ``axes`` innermost axes cut a buffer."""
        return math.prod(self.sizes[self.ndim - axes :])

    def shard_by_device(self, axes: int) -> np.ndarray:
        """``int64 [devices]``: the number of the shard that each device holds, devices row-major."""
        coordinates = np.unravel_index(np.arange(self.devices) // self.model_ranks, self.sizes)
        index = np.zeros(self.devices, np.int64)
        for axis in range(axes):
            index = index * self.size(axis) + coordinates[self.ndim - 1 - axis]
        return index
