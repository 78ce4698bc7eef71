"""The flat buffers of a group at every degree of sharding, and the collectives that lead from one to the next.

Level a is the buffers cut over the a innermost mesh axes, level 0 is whole. A layout is planned for the finest level in
use; coarser ones merge its shards::

    mesh (2, 3)        buffer of 6 finest shards          one step coarser      one step finer
    level 0   |. . . . . . . . . . . .|    whole                                reduce-scatter, inner axis
    level 1   |. . . .|. . . .|. . . .|    3 shards       gather, inner axis    reduce-scatter, outer axis
    level 2   |. .|. .|. .|. .|. .|. .|    6 shards       gather, outer axis

With several buffers, a shard holds its part of each, one after the other. An axis of one rank takes no collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.sharding.layout import Layout
from torch_impl.comm import collectives
from torch_impl.comm.collectives import Work
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.runtime.buffer import FlatBuffer


class ShardLevels:
    """``layout`` has as many shards as the ``finest`` innermost axes of ``mesh`` have ranks."""

    def __init__(self, layout: Layout, mesh: DataParallelMesh, finest: int) -> None:
        self.mesh = mesh
        self.layouts = [layout.merged(layout.num_shards // mesh.shards(level)) for level in range(finest + 1)]
        self._slices = [one.shard_slices for one in self.layouts]
        self._geometry = [self._places(level) for level in range(finest + 1)]

    def buffer(self, level: int, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        """This rank's buffer of a level, zeros."""
        rank = self.mesh.index(level) if level else None
        return FlatBuffer(self.layouts[level], dtype, device, rank)

    def size(self, level: int) -> int:
        """Elements that a rank holds of a level."""
        return self.layouts[level].shard_size

    def row_bounds(self, level: int, name: str) -> tuple[int, ...]:
        """Row bounds of the level's shards, see ``Layout.row_bounds``."""
        return self.layouts[level].row_bounds(name)

    def gather(self, level: int, output: torch.Tensor, shard: torch.Tensor, async_op: bool) -> Work | None:
        """Fill ``output`` of ``level`` from the shards of the level after it."""
        if self.mesh.sizes[level] == 1:
            output.copy_(shard)
            return None
        outputs, shards = self._parts(level, output), self._parts(level + 1, shard)
        return collectives.all_gather(outputs, shards, self.mesh.groups[level], async_op)

    def reduce(self, level: int, shard: torch.Tensor, values: torch.Tensor, async_op: bool) -> Work | None:
        """Sum ``values`` of ``level`` over an axis into ``shard`` of the level after it."""
        if self.mesh.sizes[level] == 1:
            shard.copy_(values)
            return None
        values_of, shards = self._parts(level, values), self._parts(level + 1, shard)
        return collectives.reduce_scatter(shards, values_of, self.mesh.groups[level], async_op)

    def sum(self, axis: int, values: torch.Tensor, async_op: bool) -> Work | None:
        """Sum ``values`` over an axis, in place."""
        if self.mesh.sizes[axis] == 1:
            return None
        return collectives.all_reduce(values, self.mesh.groups[axis], async_op=async_op)

    def views(self, level: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """All parameters in ``flat``, this rank's buffer of a level, as ``FlatBuffer.view`` shows them."""
        return [flat.as_strided(*place) for place in self._geometry[level]]

    def _places(self, level: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Shape, stride and offset of every parameter in this rank's buffer of a level."""
        buffer = self.buffer(level, torch.uint8, torch.device("meta"))
        views = [buffer.view(slot.name) for slot in buffer.layout.slots]
        return [(tuple(view.shape), view.stride(), int(view.storage_offset())) for view in views]

    def _parts(self, level: int, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        slices = self._slices[level]
        return [flat] if len(slices) == 1 else [flat[part] for part in slices]
