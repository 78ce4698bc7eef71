"""The data-parallel mesh axes, and the order of shards on them.

A mesh lists its axes outer to inner; here they are counted from the innermost, because tensors are sharded over the
innermost ones first. *Level* a of an array is the array cut over the a innermost axes; level 0 is whole. On M x N
devices shard k of level 2 lies on the device with inner coordinate n and outer coordinate m, k = n * M + m::

    2 x 3 devices          level 1                          level 2
    m=0:  0  1  2          |   n=0   |   n=1   |   n=2   |  |n0 m0|n0 m1|n1 m0|n1 m1|n2 m0|n2 m1|
    m=1:  3  4  5

so a gather over the outer axis joins neighbours, and gathers from any level to any other leave elements in one order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec


@dataclass(frozen=True)
class MeshAxes:
    """Names and sizes of the axes, innermost first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> MeshAxes:
        return cls(mesh.axis_names[::-1], tuple(mesh.shape[name] for name in mesh.axis_names[::-1]))

    @property
    def ndim(self) -> int:
        return len(self.names)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def shards(self, level: int) -> int:
        """Into how many shards ``level`` cuts an array."""
        return math.prod(self.sizes[:level])

    def spec(self, level: int, dimension: int = 0) -> PartitionSpec:
        """An array of ``level`` that is cut along ``dimension``."""
        if level == 0:
            return PartitionSpec()
        cut = self.names[0] if level == 1 else self.names[:level]
        return PartitionSpec(*[None] * dimension, cut)

    @property
    def batch_spec(self) -> PartitionSpec:
        """Rows of a batch: device after device in the order of the mesh."""
        return PartitionSpec(self.names[::-1] if self.ndim > 1 else self.names[0])
