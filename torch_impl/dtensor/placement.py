"""``RowShard``: rows of a tensor cut over the data-parallel axes of a mesh.

A mesh has one or two data-parallel axes, outer before inner, and tensor-parallel axes may follow. Rows are cut over the
innermost ``axes`` data-parallel axes. On coordinates (m, n, t) of a mesh (M, N, T) a rank holds::

    outer m       inner n      tensor t
    Replicate     RowShard     Shard(0)     shard n of N
    RowShard      RowShard     Shard(0)     shard n * M + m of N * M, so that an all-gather over m yields shard n of N
    Partial       RowShard     Shard(0)     its part of a sum, of shard n of N
    Partial       Partial      Shard(0)     its part of a sum, not cut

Tensor-parallel axes cut first, as torch does: row bounds count the rows of what they leave to this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from bridge.sharding.rows import Box, rows_of

_ordered_meshes: WeakKeyDictionary[DeviceMesh, bool] = WeakKeyDictionary()


class RowShard(Placement):
    """Shard ``k`` of the data-parallel axes holds rows ``[bounds[k], bounds[k + 1])``; ranges may be empty and unequal.

    One and the same object stands on each of the ``axes`` mesh axes over which rows are cut.
    """

    bounds: tuple[int, ...]
    axes: int

    def __init__(self, bounds: Sequence[int], axes: int = 1) -> None:
        """Raises ValueError unless the bounds ascend from 0 and ``axes`` is 1 or 2."""
        super().__init__()
        self.bounds, self.axes = tuple(bounds), axes
        descends = any(a > b for a, b in itertools.pairwise(self.bounds))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or descends:
            raise ValueError(f"RowShard: expected two or more ascending row bounds from 0, got {self.bounds}")
        if axes not in (1, 2):
            raise ValueError(f"RowShard: expected rows cut over 1 or 2 mesh axes, got axes={axes}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowShard) and (self.bounds, self.axes) == (other.bounds, other.axes)

    def __hash__(self) -> int:
        return hash((RowShard, self.bounds, self.axes))

    def __repr__(self) -> str:
        return f"RowShard({self.bounds}" + (f", axes={self.axes})" if self.axes > 1 else ")")

    def __reduce__(self) -> tuple[type[RowShard], tuple[tuple[int, ...], int]]:
        return RowShard, (self.bounds, self.axes)


def row_placement(placements: Sequence[Placement]) -> RowShard | None:
    """The placement that cuts rows, or None for a tensor that every data-parallel rank holds whole."""
    return next((placement for placement in placements if isinstance(placement, RowShard)), None)


def row_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Mesh axes over which rows are cut, outer to inner."""
    return tuple(axis for axis, placement in enumerate(placements) if isinstance(placement, RowShard))


def shard_index(mesh: DeviceMesh, axes: Sequence[int], coordinate: Sequence[int] | None = None) -> int:
    """Which shard of rows cut over ``axes`` (outer to inner) lies on a mesh coordinate (default: this rank's)."""
    coordinate = coordinate_of(mesh) if coordinate is None else coordinate
    index = 0
    for axis in reversed(axes):
        index = index * mesh.size(axis) + coordinate[axis]
    return index


def coordinate_of(mesh: DeviceMesh) -> Sequence[int]:
    """This rank's coordinate; RuntimeError when it is not in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"expected a rank of the tensor's mesh {mesh}, got rank {dist.get_rank()}")
    return coordinate


def tensor_parallel_box(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    """The part of a tensor of this global shape that the tensor-parallel axes leave to this rank."""
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            lengths = chunk_lengths(sizes[placement.dim], mesh.size(axis))
            at = coordinate_of(mesh)[axis]
            offsets[placement.dim] += sum(lengths[:at])
            sizes[placement.dim] = lengths[at]
    return Box(tuple(offsets), tuple(sizes))


def chunk_lengths(length: int, chunks: int) -> list[int]:
    """How ``Shard`` cuts a dimension: equal parts, rounded up, as long as there is something left."""
    part = -(-length // chunks)
    return [min(part, max(0, length - k * part)) for k in range(chunks)]


def check_placements(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """ValueError for tensor-parallel placements, row bounds or a mesh that do not fit a tensor of this shape."""
    for placement in placements:
        known = placement.is_replicate() or placement.is_partial() or isinstance(placement, RowShard)
        # Subclasses of Shard cut otherwise than in equal parts.
        if not known and (type(placement) is not Shard or not 0 <= placement.dim < len(shape)):
            raise ValueError(
                f"tensor_parallel placement of a tensor of shape {tuple(shape)}: expected Replicate() or Shard(dim) "
                f"with 0 <= dim < {len(shape)}, got {placement}"
            )
    check_order(mesh)
    rows = row_placement(placements)
    if rows is None:
        return
    local = tensor_parallel_box(shape, mesh, placements).sizes
    shards, num_rows = 1, rows_of(local)[1]
    for axis in row_axes(placements):
        shards *= mesh.size(axis)
    if len(rows.bounds) != shards + 1 or rows.bounds[-1] != num_rows:
        raise ValueError(
            f"row bounds of a tensor of shape {tuple(local)} on {shards} ranks: expected {shards + 1} bounds ending at "
            f"{num_rows}, got {rows.bounds}"
        )


def check_order(mesh: DeviceMesh) -> None:
    """ValueError unless process groups list ranks as the mesh does, in which order gathers lay out what they get.

    torch sorts the ranks of some groups.
    """
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


def replicated(placements: Sequence[Placement]) -> bool:
    """Whether every rank of the mesh holds the whole tensor."""
    return all(isinstance(placement, Replicate) for placement in placements)


def cut_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Mesh axes whose ranks hold different elements: those that a reduction of the tensor has to combine."""
    return tuple(axis for axis, placement in enumerate(placements) if not placement.is_replicate())
