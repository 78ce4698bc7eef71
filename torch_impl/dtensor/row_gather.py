"""The whole of a tensor whose rows are cut as ``row_shard`` says, by one all-gather over each axis that cuts it.

coordinates (m, n) of a mesh (2, 2), padded shards 0 to 3; shard n * 2 + m lies on (m, n)
outer axis    (0, 0) has |0|    (1, 0) has |1|    both get |0 1|;  (0, 1) and (1, 1) get |2 3|
inner axis    (0, 0) has |0 1|  (0, 1) has |2 3|  both get |0 1 2 3|
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from bridge.sharding.rows import rows_of
from torch_impl.comm import collectives
from torch_impl.dtensor.placement import chunk_lengths, row_axes, row_placement, tensor_parallel_box


def gather(
    local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """A tensor of global ``shape`` in memory of its own, equal on all ranks, from the ranks' ``local`` parts."""
    return _gather_tensor_parallel(_gather_rows(local, shape, mesh, placements), shape, mesh, placements)


def _gather_rows(
    local: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """All rows of what the tensor-parallel axes leave to this rank."""
    rows = row_placement(placements)
    if rows is None:
        return local.clone()
    sizes = tensor_parallel_box(shape, mesh, placements).sizes
    row_size, _ = rows_of(sizes)
    lengths = [(r1 - r0) * row_size for r0, r1 in itertools.pairwise(rows.bounds)]
    if not any(lengths):
        return local.new_empty(sizes)
    # gloo refuses all-gathers of unequal sizes, hence the padding.
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
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim
        lengths = chunk_lengths(
            tensor_parallel_box(shape, mesh, placements[:axis]).sizes[dim], mesh.size(axis)
        )
        padded = part.new_zeros(max(lengths), *part.shape[:dim], *part.shape[dim + 1 :])
        padded[: part.shape[dim]] = part.movedim(dim, 0)
        gathered = padded.new_empty(len(lengths), *padded.shape)
        if padded.numel():
            collectives.all_gather([gathered.view(-1)], [padded.view(-1)], mesh.get_group(axis))
        part = torch.cat([gathered[k, :length] for k, length in enumerate(lengths)]).movedim(0, dim)
    return part.contiguous()
