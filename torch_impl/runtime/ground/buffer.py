"""The flat buffers of a group, at every degree of sharding, and the collectives between them.

A group's buffers are stored in one contiguous 1-D tensor, either whole or as one rank's shards::

    buffer 0, 4 shards of 4       buffer 1, 4 of 2
    |w w w w w w|b b|u u u u|. . . .|v v v v v v|. .|    whole
            |w w|b b|                    |v v|           rank 1's shards, one after the other

At level a, the buffers are cut over the a innermost mesh axes; level 0 is whole. A layout is planned
for the finest level in use; coarser levels merge its shards::

    mesh (2, 3)        buffer of 6 finest shards          one step coarser      one step finer
    level 0   |. . . . . . . . . . . .|    whole                                reduce-scatter, inner axis
    level 1   |. . . .|. . . .|. . . .|    3 shards       gather, inner axis    reduce-scatter, outer axis
    level 2   |. .|. .|. .|. .|. .|. .|    6 shards       gather, outer axis

An axis of one rank needs no collective.

A gradient buffer ends with *flags*, one for each parameter and finest shard in it, that tell which parameters were
used. Every rank must know this, whichever rows it holds, without another collective::

    level 0   |. . . . . .|f0 f1|f0 f1|f0 f1|    3 shards of rows, 2 parameters
    level 1   |. .|f0 f1|                        rows and flags, summed over the ranks

Views of a buffer are made once and stay valid while the storage behind them is freed and allocated
again, so tensors saved by autograd survive a reshard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.layout.rows import local_shape
from bridge.core.sharding.policy.strategy import Strategy
from bridge.core.sharding.policy.strategy_collectives import collectives_of, keeps_shard, num_flags
from torch_impl.comm import collectives
from torch_impl.comm.collectives import Work
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.comm.streams import Step
from torch_impl.runtime.ground.host_memory import fetch


class FlatBuffer:
    """A layout's buffers, initially zeros: all of them when ``rank`` is None, else ``rank``'s shards.

    The memory stays as long as the buffer; a ``ComputeBuffer`` has memory only while its weights are used.
    """

    allocated = True

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, rank: int | None, pinned: bool = False
    ) -> None:
        size = layout.padded_size if rank is None else layout.shard_size
        self.layout, self.rank = layout, rank
        self.flat = torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)
        self.nbytes = size * self.flat.element_size()

    def view(self, name: str) -> torch.Tensor:
        """The parameter in its own shape, or this rank's rows of it in their local shape."""
        slot = self.layout.slot(name)
        if self.rank is None:
            start = self.layout.start(name)
            return self.flat[start : start + slot.numel].view(slot.shape)
        r0, r1 = self.layout.row_range(name, self.rank)
        shape = local_shape(slot.shape, r1 - r0)
        # A rank without rows has no offset in the shard, but the start of the buffer always exists.
        if r0 == r1:
            return self.flat[:0].view(shape)
        start = self.layout.shard_start(name, self.rank)
        return self.flat[start : start + (r1 - r0) * slot.row_size].view(shape)

    @property
    def aside(self) -> bool:
        """Whether the contents wait for memory that another unit uses."""
        return False

    def settle(self) -> None:
        """Does nothing: the contents are where parameters see them."""

    def free(self) -> None:
        """Does nothing: main weights stay."""


class ShardLevels:
    """The levels of ``layout``, which has a shard for each rank of the ``finest`` innermost axes."""

    def __init__(self, layout: Layout, mesh: DataParallelMesh, finest: int) -> None:
        self.mesh, self.axes = mesh, mesh.ndim
        self.layouts = [layout.merged(layout.num_shards // mesh.shards(level)) for level in range(finest + 1)]
        # Read for every gradient of every backward, but layouts compute them at each access.
        self._sizes = [level_layout.shard_size for level_layout in self.layouts]
        self._slices = [level_layout.shard_slices for level_layout in self.layouts]
        self._geometry = [self._places(level) for level in range(finest + 1)]
        self._num_parameters = len(layout.slots)
        self._gradient_sizes = [
            level_layout.shard_size + num_flags(self.layouts[-1], level_layout.num_shards)
            for level_layout in self.layouts
        ]
        self._gaps = self._padding()

    def buffer(
        self, level: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
    ) -> FlatBuffer:
        """This rank's buffer of a level, zeros; ``pinned``: in pinned host memory."""
        # Shards of level 0 have no rank: every rank holds all of them.
        rank = self.mesh.index(level) if level else None
        return FlatBuffer(self.layouts[level], dtype, device, rank, pinned)

    def size(self, level: int) -> int:
        """The number of elements of a level that a rank holds."""
        return self._sizes[level]

    def gradient_size(self, level: int) -> int:
        """Elements of a rank's gradient buffer of a level: ``size(level)`` and the flags."""
        return self._gradient_sizes[level]

    def flags(self, level: int, gradient: torch.Tensor) -> torch.Tensor:
        """View ``[finest shards, parameters]`` of a gradient buffer: not 0 if the parameter was used."""
        return gradient[self._sizes[level] :].view(-1, self._num_parameters)

    def padding(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Views of a whole gradient buffer's padding: neither parameters nor flags."""
        return [gradient[first:stop] for first, stop in self._gaps]

    def row_bounds(self, level: int, name: str) -> tuple[int, ...]:
        """Row bounds of the level's shards, see ``Layout.row_bounds``."""
        return self.layouts[level].row_bounds(name)

    def shard_of(self, level: int, whole: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's shard of a level, from the whole buffers."""
        rank, num_shards = self.mesh.index(level), self.layouts[level].num_shards
        return torch.cat(
            [part.chunk(num_shards)[rank] if len(part) else part for part in self._parts(0, whole)]
        )

    def gather(self, level: int, output: torch.Tensor, shard: torch.Tensor, async_op: bool) -> Work | None:
        """Fill ``output`` of ``level`` from the shards of the next level."""
        if self.mesh.sizes[level] == 1:
            output.copy_(shard)
            return None
        outputs, shards = self._parts(level, output), self._parts(level + 1, shard)
        return collectives.all_gather(outputs, shards, self.mesh.groups[level], async_op)

    def reduce(self, level: int, shard: torch.Tensor, values: torch.Tensor, async_op: bool) -> Work | None:
        """Sum gradient buffer ``values`` of ``level`` over an axis into ``shard`` of the next."""
        values_of, shards = self._gradient_parts(level, values), self._gradient_parts(level + 1, shard)
        return collectives.reduce_scatter(shards, values_of, self.mesh.groups[level], async_op)

    def sum(self, axis: int, values: torch.Tensor, async_op: bool) -> Work | None:
        """Sum ``values`` over an axis, in place."""
        return collectives.all_reduce(values, self.mesh.groups[axis], async_op=async_op)

    def views(self, level: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """All parameters in this rank's buffer of a level, shaped as by ``FlatBuffer.view``."""
        # Geometry is computed once: a backward takes the views of all parameters twice.
        return [flat.as_strided(*geometry) for geometry in self._geometry[level]]

    def _places(self, level: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Shape, stride and offset of every parameter in this rank's buffer of a level."""
        # From a buffer without memory; offsets count elements, so they fit any dtype.
        buffer = self.buffer(level, torch.uint8, torch.device("meta"))
        views = [buffer.view(slot.name) for slot in buffer.layout.slots]
        return [(tuple(view.shape), view.stride(), int(view.storage_offset())) for view in views]

    def _padding(self) -> list[tuple[int, int]]:
        """Start and end of each range of padding in the whole buffers."""
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


class WeightGather(Protocol):
    """How a group's compute weights are made from its main weights."""

    @property
    def resident(self) -> torch.Tensor | None:
        """The shard that a rank keeps between main and whole weights, see the note of the package."""
        ...

    def steps(self, main: torch.Tensor, target: torch.Tensor, current: bool) -> list[Step]:
        """Steps that fill ``target``, whole, from all ranks' ``main``, one axis per step.

        ``current``: the last steps were completed with the same main weights, so the kept shard is still valid.
        """
        ...


class CastGather:
    """Shards are fetched to ``device`` if necessary, cast to ``compute``, and gathered in it."""

    def __init__(
        self,
        levels: ShardLevels,
        strategy: Strategy,
        compute: torch.dtype,
        device: torch.device,
        fetches: bool,
    ) -> None:
        self._levels, self._strategy, self._compute, self._device = levels, strategy, compute, device
        self._fetches = fetches
        self.resident: torch.Tensor | None = None
        if keeps_shard(strategy):
            self.resident = levels.buffer(strategy.parameters, compute, device).flat

    def steps(self, main: torch.Tensor, target: torch.Tensor, current: bool) -> list[Step]:
        transfers, steps = collectives_of(self._strategy, self._levels.axes), list[Step]()
        axes = (*transfers.gathered_once, *transfers.gathered)
        # The outer axis is slow, so backward and later microbatches gather over the inner axis only.
        if self.resident is not None and current:
            axes, source = (*transfers.gathered,), self.resident
        # Cast before the gather, so that fewer bytes cross the network.
        elif self._fetches:
            steps, source = fetch(main, self._compute, self._device)
        else:
            source = main.to(self._compute)
        if not axes:
            return [*steps, ("gather", partial(_copy, target, source))]
        # The gather over axis k gives level k, which axis k does not cut.
        for level in axes:
            if level == 0:
                output = target
            elif self.resident is not None and level == self._strategy.parameters:
                output = self.resident
            else:
                # Levels in between that are not kept get memory for this gather only.
                output = source.new_empty(self._levels.size(level))
            steps.append((lane_of(level), partial(self._levels.gather, level, output, source)))
            source = output
        return steps


class SplitGather:
    """Own rows are in the whole compute weights, next to remainders, and are gathered from there."""

    resident = None

    def __init__(self, levels: ShardLevels, strategy: Strategy) -> None:
        self._levels, self._strategy = levels, strategy

    def steps(self, main: torch.Tensor, target: torch.Tensor, current: bool) -> list[Step]:
        """As in ``WeightGather``; ``main``, the remainders, is not gathered."""
        transfers, steps = collectives_of(self._strategy, self._levels.axes), list[Step]()
        source = self._levels.shard_of(self._strategy.optimizer, target)
        for level in (*transfers.gathered_once, *transfers.gathered):
            output = source.new_empty(self._levels.size(level)) if level else target
            steps.append((lane_of(level), partial(self._levels.gather, level, output, source)))
            source = output
        return steps


def lane_of(axis: int) -> str:
    """The lane of collectives over an axis, counted from the innermost one."""
    return "gather" if axis == 0 else "outer"


def _copy(target: torch.Tensor, source: torch.Tensor, async_op: bool) -> None:
    target.copy_(source)
