"""The one or two data-parallel axes of a mesh, and the order of shards on them.

Axes are counted from the innermost one, since tensors are sharded over the innermost first. On a mesh of M x N ranks,
shard k of a buffer that is cut over both axes belongs to the rank with inner coordinate n and outer coordinate m,
k = n * M + m::

    2 x 3 ranks            cut over the inner axis          cut over both
    m=0:  0  1  2          |   n=0   |   n=1   |   n=2   |  |n0 m0|n0 m1|n1 m0|n1 m1|n2 m0|n2 m1|
    m=1:  3  4  5

so that an all-gather over the outer axis turns the finer shards into the coarser one.
"""

from __future__ import annotations

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class DataParallelMesh:
    """Sizes, this rank's coordinates and process groups of ``mesh``, by axis, innermost first.

    Raises ValueError for a mesh of more than two axes, or one whose axes list ranks in falling order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"mesh: expected one or two data-parallel axes, got shape {tuple(mesh.shape)}; take those axes of it, "
                "for example mesh['dp']"
            )
        axes = range(mesh.ndim)[::-1]
        self.mesh = mesh
        self.sizes = tuple(mesh.size(axis) for axis in axes)
        self.coordinates = tuple(mesh.get_local_rank(axis) for axis in axes)
        self.groups = tuple(mesh.get_group(axis) for axis in axes)
        for group, here in zip(self.groups, self.coordinates, strict=True):
            if dist.get_rank(group) != here:
                raise ValueError(
                    f"mesh: expected ranks in rising order along each axis, got {mesh.mesh.tolist()}: process groups "
                    "order their ranks so, and shards would go to the wrong ones"
                )

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def size(self) -> int:
        """Number of ranks on all axes."""
        return math.prod(self.sizes)

    def shards(self, axes: int) -> int:
        """Into how many shards the ``axes`` innermost axes cut a buffer."""
        return math.prod(self.sizes[:axes])

    def index(self, axes: int) -> int:
        """Which of these this rank holds."""
        index = 0
        for size, here in zip(self.sizes[:axes], self.coordinates, strict=False):
            index = index * size + here
        return index
