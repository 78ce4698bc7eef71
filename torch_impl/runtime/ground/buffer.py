"""The flat buffers of a group, at every degree of sharding, and the collectives that lead from one to the next.

A group's buffers lie in one contiguous 1-D tensor, whole or one rank's shards of them::

    buffer 0, 4 shards of 4       buffer 1, 4 of 2
    |w w w w w w|b b|u u u u|. . . .|v v v v v v|. .|    whole
            |w w|b b|                    |v v|           what rank 1 holds, one after the other

Level a is the buffers cut over the a innermost mesh axes, level 0 is whole. A layout is planned for the finest level in
use; coarser ones merge its shards::

    mesh (2, 3)        buffer of 6 finest shards          one step coarser      one step finer
    level 0   |. . . . . . . . . . . .|    whole                                reduce-scatter, inner axis
    level 1   |. . . .|. . . .|. . . .|    3 shards       gather, inner axis    reduce-scatter, outer axis
    level 2   |. .|. .|. .|. .|. .|. .|    6 shards       gather, outer axis

An axis of one rank takes no collective.

A gradient buffer ends with *flags*, one for each parameter and finest shard in it, that tell which parameters were
used: every rank is to know that, whichever rows it holds, without a further collective::

    level 0   |. . . . . .|f0 f1|f0 f1|f0 f1|    3 shards of rows, 2 parameters
    level 1   |. .|f0 f1|                        rows and flags, summed over the ranks

Views of a buffer are taken once and stay valid while the storage behind them is freed and allocated again: tensors
saved by autograd survive a reshard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.layout.rows import local_shape
from bridge.core.sharding.policy.strategy_collectives import num_flags
from torch_impl.comm import collectives
from torch_impl.comm.collectives import Work
from torch_impl.comm.mesh import DataParallelMesh


class FlatBuffer:
    """``layout.padded_size`` zeros when ``rank`` is None, else ``layout.shard_size`` zeros: the shards of ``rank``."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, rank: int | None, pinned: bool = False
    ) -> None:
        size = layout.padded_size if rank is None else layout.shard_size
        self.layout, self.rank = layout, rank
        self.flat = torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)
        self.allocated = True
        self.nbytes = size * self.flat.element_size()
        self._storage = self.flat.untyped_storage()

    def view(self, name: str) -> torch.Tensor:
        """The parameter in its own shape, or this rank's rows of it in their local shape."""
        slot = self.layout.slot(name)
        if self.rank is None:
            start = self.layout.start(name)
            return self.flat[start : start + slot.numel].view(slot.shape)
        r0, r1 = self.layout.row_range(name, self.rank)
        shape = local_shape(slot.shape, r1 - r0)
        # A rank without rows has no place in the shard; the start of the buffer is always there.
        if r0 == r1:
            return self.flat[:0].view(shape)
        start = self.layout.shard_start(name, self.rank)
        return self.flat[start : start + (r1 - r0) * slot.row_size].view(shape)

    def allocate(self) -> None:
        """Give the buffer its memory; the contents are arbitrary."""
        # resize_ takes new memory and copies, also to the same size.
        if not self.allocated:
            self._storage.resize_(self.nbytes)
            self.allocated = True

    def free(self) -> None:
        """Release the memory; views stay, and must not be read until ``allocate`` and a refill."""
        self._storage.resize_(0)
        self.allocated = False

    def move(self, storage: torch.UntypedStorage) -> None:
        """Lie in other memory, which is allocated if it is not; views must be taken anew."""
        if storage.nbytes() < self.nbytes:
            storage.resize_(self.nbytes)
        self.allocated = True
        # A first evaluation may run in inference mode; training steps could not write to a tensor made there.
        with torch.inference_mode(False):
            flat = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
            self.flat, self._storage = flat.set_(storage, 0, (self.flat.numel(),), (1,)), storage


class ShardLevels:
    """``layout`` has as many shards as the ``finest`` innermost axes of ``mesh`` have ranks."""

    def __init__(self, layout: Layout, mesh: DataParallelMesh, finest: int) -> None:
        self.mesh, self.axes = mesh, mesh.ndim
        self.layouts = [layout.merged(layout.num_shards // mesh.shards(level)) for level in range(finest + 1)]
        # Asked for every gradient of every backward: layouts work these out anew at each question.
        self._sizes = [one.shard_size for one in self.layouts]
        self._slices = [one.shard_slices for one in self.layouts]
        self._geometry = [self._places(level) for level in range(finest + 1)]
        self._num_parameters = len(layout.slots)
        self._gaps = self._padding()

    def buffer(
        self, level: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
    ) -> FlatBuffer:
        """This rank's buffer of a level, zeros; ``pinned`` in the host's memory."""
        # Shards of level 0 have no rank: every rank holds all of them.
        rank = self.mesh.index(level) if level else None
        return FlatBuffer(self.layouts[level], dtype, device, rank, pinned)

    def size(self, level: int) -> int:
        """Elements that a rank holds of a level."""
        return self._sizes[level]

    def gradient_size(self, level: int) -> int:
        """Elements of a rank's gradient buffer of a level: ``size(level)``, and flags."""
        return self._sizes[level] + num_flags(self.layouts[-1], self.layouts[level].num_shards)

    def flags(self, level: int, gradient: torch.Tensor) -> torch.Tensor:
        """Of a gradient buffer of a level, a view ``[finest shards, parameters]``: not 0 where one was used."""
        return gradient[self._sizes[level] :].view(-1, self._num_parameters)

    def padding(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Views of a whole gradient buffer: what belongs to no parameter and is no flag."""
        return [gradient[first:stop] for first, stop in self._gaps]

    def row_bounds(self, level: int, name: str) -> tuple[int, ...]:
        """Row bounds of the level's shards, see ``Layout.row_bounds``."""
        return self.layouts[level].row_bounds(name)

    def shard_of(self, level: int, whole: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's shard of a level, out of the whole buffers."""
        rank, num_shards = self.mesh.index(level), self.layouts[level].num_shards
        return torch.cat(
            [part.chunk(num_shards)[rank] if len(part) else part for part in self._parts(0, whole)]
        )

    def gather(self, level: int, output: torch.Tensor, shard: torch.Tensor, async_op: bool) -> Work | None:
        """Fill ``output`` of ``level`` from the shards of the level after it."""
        if self.mesh.sizes[level] == 1:
            output.copy_(shard)
            return None
        outputs, shards = self._parts(level, output), self._parts(level + 1, shard)
        return collectives.all_gather(outputs, shards, self.mesh.groups[level], async_op)

    def reduce(self, level: int, shard: torch.Tensor, values: torch.Tensor, async_op: bool) -> Work | None:
        """Sum ``values``, a gradient buffer of ``level``, over an axis into ``shard``, one of the level after it."""
        values_of, shards = self._gradient_parts(level, values), self._gradient_parts(level + 1, shard)
        return collectives.reduce_scatter(shards, values_of, self.mesh.groups[level], async_op)

    def sum(self, axis: int, values: torch.Tensor, async_op: bool) -> Work | None:
        """Sum ``values`` over an axis, in place."""
        return collectives.all_reduce(values, self.mesh.groups[axis], async_op=async_op)

    def views(self, level: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """All parameters in ``flat``, this rank's buffer of a level, as ``FlatBuffer.view`` shows them."""
        # Places are worked out once: a backward takes the views of all parameters twice.
        return [flat.as_strided(*place) for place in self._geometry[level]]

    def _places(self, level: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Shape, stride and offset of every parameter in this rank's buffer of a level."""
        # Of a buffer without memory: in any dtype, places count elements.
        buffer = self.buffer(level, torch.uint8, torch.device("meta"))
        views = [buffer.view(slot.name) for slot in buffer.layout.slots]
        return [(tuple(view.shape), view.stride(), int(view.storage_offset())) for view in views]

    def _padding(self) -> list[tuple[int, int]]:
        """First element and end of each stretch of the whole buffers that lies between parameters."""
        layout, gaps, end = self.layouts[0], list[tuple[int, int]](), 0
        taken = sorted((layout.start(slot.name), slot.numel) for slot in layout.slots if slot.numel)
        for start, numel in (*taken, (self._sizes[0], 0)):
            if start > end:
                gaps.append((end, start))
            end = start + numel
        return gaps

    def _gradient_parts(self, level: int, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return [*(flat[part] for part in self._slices[level]), flat[self._sizes[level] :]]

    def _parts(self, level: int, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        slices = self._slices[level]
        # Most layouts have one buffer: the whole tensor is its only part, without a slice.
        return [flat] if len(slices) == 1 else [flat[part] for part in slices]
