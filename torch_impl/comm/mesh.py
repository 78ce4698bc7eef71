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
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_ordered_meshes: WeakKeyDictionary[DeviceMesh, bool] = WeakKeyDictionary()


class DataParallelMesh:
    """Sizes and process groups of ``mesh``, by axis, innermost first.

    Raises ValueError for a mesh of more than two axes, or if a process group orders its ranks differently.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"mesh: expected one or two data-parallel axes, got shape {tuple(mesh.shape)}; select these axes, "
                "for example with mesh['dp']"
            )
        axes = range(mesh.ndim)[::-1]
        self.mesh = mesh
        self.sizes = tuple(mesh.size(axis) for axis in axes)
        self.groups = tuple(mesh.get_group(axis) for axis in axes)
        # Over all axes. A field, because units read it at each gather.
        self.size = math.prod(self.sizes)
        check_order(mesh)

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def shards(self, level: int) -> int:
        """The number of shards into which the ``level`` innermost axes cut a buffer."""
        return math.prod(self.sizes[:level])

    def index(self, level: int) -> int:
        """The index of this rank's shard at ``level``."""
        return shard_index(self.mesh, range(self.ndim - level, self.ndim))


def shard_index(mesh: DeviceMesh, axes: Sequence[int], coordinate: Sequence[int] | None = None) -> int:
    """The index of the shard of rows that a mesh coordinate holds (default: this rank's); axes outer to inner."""
    coordinate = coordinate_of(mesh) if coordinate is None else coordinate
    index = 0
    # The inner coordinate is the most significant: an outer axis divides the shards of the inner axis further.
    for axis in reversed(axes):
        index = index * mesh.size(axis) + coordinate[axis]
    return index


def coordinate_of(mesh: DeviceMesh) -> Sequence[int]:
    """This rank's coordinate; RuntimeError if this rank is not in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"expected a rank of the tensor's mesh {mesh}, got rank {dist.get_rank()}")
    return coordinate


def check_order(mesh: DeviceMesh) -> None:
    """ValueError unless process groups list ranks in the order of the mesh, which determines where gathers put shards.

    torch sorts the ranks of some groups.
    """
    # Called for every tensor that is made, so cached.
    if mesh in _ordered_meshes:
        return
    coordinate = coordinate_of(mesh)
    for axis in range(mesh.ndim):
        index: list[int | slice] = list(coordinate)
        index[axis] = slice(None)
        along = mesh.mesh[tuple(index)].tolist()
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        if ranks != along:
            raise ValueError(
                f"mesh {mesh}: expected the ranks along axis {axis} in the order of their process group, {ranks}, got "
                f"{along}; number the mesh in ascending order"
            )
    _ordered_meshes[mesh] = True
