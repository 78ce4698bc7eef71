"""``RowShard``: rows of a tensor cut over the data-parallel axes of a mesh.

A mesh has one or two data-parallel axes, outer before inner, and tensor-parallel axes may follow. Rows are cut over the
innermost ``axes`` data-parallel axes. On coordinates (m, n, t) of a mesh (M, N, T) a rank holds::

    outer m       inner n      tensor t
    Replicate     RowShard     Shard(0)     shard n of N
    RowShard      RowShard     Shard(0)     shard n * M + m of N * M, so that an all-gather over m yields shard n of N
    Partial       RowShard     Shard(0)     its term of a sum, of shard n of N
    Partial       Partial      Shard(0)     its term of a sum, not cut

Tensor-parallel axes cut first, as in torch: row bounds count the rows that tensor-parallel axes leave to this rank. A
dimension that holds several tensors one after the other, such as gate and up projections, is cut by ``FusedShard``: of
rows ``|g0 g1 g2 g3|u0 u1 u2 u3|`` the first of two ranks has ``g0 g1 u0 u1``.

To make the whole tensor, one all-gather runs over each axis that cuts rows, outer axis first. For padded shards 0 to 3
on a mesh (2, 2), where coordinate (m, n) holds shard n * 2 + m::

    outer axis    (0, 0) has |0|    (1, 0) has |1|    both get |0 1|;  (0, 1) and (1, 1) get |2 3|
    inner axis    (0, 0) has |0 1|  (0, 1) has |2 3|  both get |0 1 2 3|
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from bridge.core.sharding import Cut, local_ranges
from bridge.core.sharding.layout.rows import local_shape, rows_of
from torch_impl.comm import collectives
from torch_impl.comm.mesh import check_order, coordinate_of, shard_index

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Parts ``[start, stop)`` of a dimension, in the order of the local tensor."""


class FusedShard(Placement):
    """Dimension ``dim`` consists of tensors of the relative ``sizes``, each cut into equal parts over the axis.

    Not a ``Shard``: torch would assume that the local tensor is one range of the dimension.
    """

    dim: int
    sizes: tuple[int, ...]

    def __init__(self, dim: int, sizes: Sequence[int]) -> None:
        """Raises ValueError for fewer than two sizes, or sizes below 1."""
        super().__init__()
        self.dim, self.sizes = dim, tuple(sizes)
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise ValueError(f"FusedShard: expected two or more sizes >= 1, got {self.sizes}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FusedShard) and (self.dim, self.sizes) == (other.dim, other.sizes)

    def __hash__(self) -> int:
        return hash((FusedShard, self.dim, self.sizes))

    def __repr__(self) -> str:
        return f"FusedShard({self.dim}, {self.sizes})"

    def __reduce__(self) -> tuple[type[FusedShard], tuple[int, tuple[int, ...]]]:
        return FusedShard, (self.dim, self.sizes)

    def ranges(self, length: int, ranks: int, rank: int) -> Ranges:
        """The part of a dimension of ``length`` that ``rank`` of the axis holds."""
        return tuple(local_ranges(length, Cut("", self.dim, self.sizes), ranks, rank))


class RowShard(Placement):
    """Shard ``k`` of the data-parallel axes holds rows ``[bounds[k], bounds[k + 1])``; ranges may be empty and unequal.

    Each of the ``axes`` mesh axes over which rows are cut has the same placement object.

    ``shape`` is the shape of the whole tensor, or None if unknown. Equality ignores ``shape``.
    """

    bounds: tuple[int, ...]
    axes: int
    shape: tuple[int, ...] | None

    def __init__(self, bounds: Sequence[int], axes: int = 1, shape: Sequence[int] | None = None) -> None:
        """Raises ValueError unless the bounds ascend from 0 and ``axes`` is 1 or 2."""
        super().__init__()
        self.bounds, self.axes = tuple(bounds), axes
        # Rows of a stack form a matrix, whose shape does not determine the shape of the stack.
        self.shape = None if shape is None else tuple(shape)
        descends = any(a > b for a, b in itertools.pairwise(self.bounds))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or descends:
            raise ValueError(f"RowShard: expected two or more ascending row bounds from 0, got {self.bounds}")
        if axes not in (1, 2):
            raise ValueError(f"RowShard: expected rows cut over 1 or 2 mesh axes, got axes={axes}")

    @property
    def dim(self) -> int:
        """RuntimeError: programs that read it, such as transformers' loader, cut a dimension into equal parts."""
        raise RuntimeError(
            f"{self!r}: expected code that takes a sharded tensor's rows from to_local() and full_tensor(), got code "
            "that asks for a dimension to cut into equal parts, which would give ranks the rows of other ranks: load "
            "with from_pretrained() without distributed_config, and call fully_shard() on the returned model"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowShard) and (self.bounds, self.axes) == (other.bounds, other.axes)

    def __hash__(self) -> int:
        return hash((RowShard, self.bounds, self.axes))

    def __repr__(self) -> str:
        return f"RowShard({self.bounds}" + (f", axes={self.axes})" if self.axes > 1 else ")")

    def __reduce__(self) -> tuple[type[RowShard], tuple[tuple[int, ...], int, tuple[int, ...] | None]]:
        return RowShard, (self.bounds, self.axes, self.shape)


def row_placement(placements: Sequence[Placement]) -> RowShard | None:
    """The placement that cuts rows, or None for a tensor that every data-parallel rank holds whole."""
    return next((placement for placement in placements if isinstance(placement, RowShard)), None)


def row_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Mesh axes over which rows are cut, outer to inner."""
    return tuple(axis for axis, placement in enumerate(placements) if isinstance(placement, RowShard))


def tensor_parallel_ranges(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], at: Sequence[int] | None = None
) -> tuple[Ranges, ...]:
    """By dimension, the ranges of a tensor of this global shape that the tensor-parallel axes leave to a rank.

    at: the rank's mesh coordinate (default: this rank's).
    """
    ranges: list[Ranges] = [((0, size),) for size in shape]
    # Several axes may cut one dimension: each cuts what those before it left.
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            ((start, stop),) = ranges[placement.dim]
            lengths = chunk_lengths(stop - start, mesh.size(axis))
            own = (at or coordinate_of(mesh))[axis]
            start += sum(lengths[:own])
            ranges[placement.dim] = ((start, start + lengths[own]),)
        elif isinstance(placement, FusedShard):
            own = (at or coordinate_of(mesh))[axis]
            ranges[placement.dim] = placement.ranges(shape[placement.dim], mesh.size(axis), own)
    return tuple(ranges)


def tensor_parallel_sizes(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], at: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The shape of what the tensor-parallel axes leave to a rank of a tensor of this global shape, see above."""
    ranges = tensor_parallel_ranges(shape, mesh, placements, at)
    return tuple(sum(stop - start for start, stop in pieces) for pieces in ranges)


def tensor_parallel_part(
    whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """The part of ``whole`` that the tensor-parallel axes leave to this rank: a view, or a copy for fused tensors."""
    for dim, held in enumerate(tensor_parallel_ranges(whole.shape, mesh, placements)):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in held]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def chunk_lengths(length: int, chunks: int) -> list[int]:
    """The lengths into which ``Shard`` cuts a dimension: equal, rounded up, until nothing is left."""
    part = -(-length // chunks)
    return [min(part, max(0, length - k * part)) for k in range(chunks)]


def check_placements(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """ValueError for tensor-parallel placements, row bounds or a mesh that do not fit a tensor of this shape."""
    cut: list[int] = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate() or placement.is_partial() or isinstance(placement, RowShard):
            continue
        # Subclasses of Shard do not cut into equal parts.
        known = type(placement) is Shard or isinstance(placement, FusedShard)
        if not known or not 0 <= placement.dim < len(shape):  # type: ignore[attr-defined]  # both have one
            raise ValueError(
                f"tensor_parallel placement of a tensor of shape {tuple(shape)}: expected Replicate() or Shard(dim) "
                f"with 0 <= dim < {len(shape)}, got {placement}"
            )
        cut.append(placement.dim)  # type: ignore[attr-defined]  # as above
        if isinstance(placement, FusedShard):
            _check_fused(shape[placement.dim], mesh.size(axis), placement)
    if any(isinstance(other, FusedShard) and cut.count(other.dim) > 1 for other in placements):
        raise ValueError(
            f"tensor_parallel placements of a tensor of shape {tuple(shape)}: expected a dimension of fused tensors to "
            f"be cut by one axis, got {tuple(placements)}"
        )
    # Every tensor is checked, since gathers would put rows in the wrong place without an error.
    check_order(mesh)
    rows = row_placement(placements)
    if rows is None:
        return
    local = tensor_parallel_sizes(shape, mesh, placements)
    shards, num_rows = math.prod(map(mesh.size, row_axes(placements))), rows_of(local)[1]
    if len(rows.bounds) != shards + 1 or rows.bounds[-1] != num_rows:
        raise ValueError(
            f"row bounds of a tensor of shape {tuple(local)} on {shards} ranks: expected {shards + 1} bounds ending at "
            f"{num_rows}, got {rows.bounds}"
        )


def _check_fused(length: int, ranks: int, placement: FusedShard) -> None:
    unit = sum(placement.sizes)
    if length % unit or any(length // unit * size % ranks for size in placement.sizes):
        raise ValueError(
            f"{placement}: expected a dimension of tensors that {ranks} ranks cut in equal parts, got {length} elements"
        )


def local_sizes(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The shape of this rank's local tensor, of a tensor of this global shape. ValueError as ``check_placements``."""
    check_placements(shape, mesh, placements)
    sizes = tensor_parallel_sizes(shape, mesh, placements)
    rows = row_placement(placements)
    if rows is None:
        return sizes
    shard = shard_index(mesh, row_axes(placements))
    return local_shape(sizes, rows.bounds[shard + 1] - rows.bounds[shard])


def check_local(
    local: torch.Tensor, shape: Sequence[int], placements: Sequence[Placement], expected: Sequence[int]
) -> None:
    """ValueError unless a local tensor of a tensor of this global shape has the expected shape."""
    if tuple(local.shape) != tuple(expected):
        raise ValueError(
            f"local tensor of a tensor of shape {tuple(shape)} under {tuple(placements)}: expected shape "
            f"{tuple(expected)}, got {tuple(local.shape)}"
        )


def is_tensor_parallel(placements: Sequence[Placement]) -> bool:
    """Whether ranks of a tensor-parallel axis hold different parts of the tensor."""
    return any(isinstance(placement, Shard | FusedShard) for placement in placements)


def is_fused(placements: Sequence[Placement]) -> bool:
    """Whether a dimension is cut in a way that torch would misinterpret."""
    return any(isinstance(placement, FusedShard) for placement in placements)


def replicated(placements: Sequence[Placement]) -> bool:
    """Whether every rank of the mesh holds the whole tensor."""
    return all(isinstance(placement, Replicate) for placement in placements)


def cut_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Mesh axes whose ranks hold different elements, so a reduction of the tensor must combine them."""
    return tuple(axis for axis, placement in enumerate(placements) if not placement.is_replicate())


def gather(
    local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """A tensor of global ``shape`` in new memory, equal on all ranks, from the ranks' ``local`` parts."""
    if local.is_floating_point() and local.itemsize == 1:
        # gloo does not support float8.
        return gather(local.view(torch.uint8), shape, mesh, placements).view(local.dtype)
    return _gather_tensor_parallel(_gather_rows(local, shape, mesh, placements), shape, mesh, placements)


def _gather_rows(
    local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """All rows that the tensor-parallel axes leave to this rank."""
    rows = row_placement(placements)
    if rows is None:
        return local.clone()
    sizes = tensor_parallel_sizes(shape, mesh, placements)
    row_size, _ = rows_of(sizes)
    lengths = [(r1 - r0) * row_size for r0, r1 in itertools.pairwise(rows.bounds)]
    # All ranks know all bounds, so all of them skip an empty gather.
    if not any(lengths):
        return local.new_empty(sizes)
    # Shards are unequal, and gloo gathers only equal shards, so each is padded to the longest.
    gathered = local.new_zeros(max(lengths))
    gathered[: local.numel()] = local.reshape(-1)
    for axis in row_axes(placements):
        part, gathered = gathered, local.new_empty(mesh.size(axis) * gathered.numel())
        collectives.all_gather([gathered], [part], mesh.get_group(axis))
    shards = gathered.view(-1, max(lengths))
    return torch.cat([shard[:length] for shard, length in zip(shards, lengths, strict=True)]).view(sizes)


def _gather_tensor_parallel(
    part: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    # The axis that cut last is gathered first.
    for axis, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, Shard | FusedShard):
            continue
        dim, ranks = placement.dim, mesh.size(axis)
        whole = tensor_parallel_sizes(shape, mesh, placements[:axis])[dim]
        # For each tensor that the dimension holds, the lengths of the ranks' parts.
        if isinstance(placement, FusedShard):
            lengths = [[b - a for a, b in placement.ranges(whole, ranks, rank)] for rank in range(ranks)]
        else:
            lengths = [[length] for length in chunk_lengths(whole, ranks)]
        # The cut dimension comes first, so that each rank's part is contiguous in the gathered tensor.
        padded = part.new_zeros(max(map(sum, lengths)), *part.shape[:dim], *part.shape[dim + 1 :])
        padded[: part.shape[dim]] = part.movedim(dim, 0)
        gathered = padded.new_empty(ranks, *padded.shape)
        if padded.numel():
            collectives.all_gather([gathered.view(-1)], [padded.view(-1)], mesh.get_group(axis))
        pieces = [gathered[k, : sum(own)].split(own) for k, own in enumerate(lengths)]
        part = torch.cat([piece for tensor in zip(*pieces, strict=True) for piece in tensor]).movedim(0, dim)
    return part.contiguous()
