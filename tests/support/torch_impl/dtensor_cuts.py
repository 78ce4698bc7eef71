"""Tensors cut in all ways that meshes of one to three axes allow, for the tests of ``RowDTensor``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from bridge.core.sharding.layout.rows import local_shape, rows_of
from torch_impl.comm.mesh import shard_index
from torch_impl.dtensor.placement import FusedShard
from torch_impl.dtensor.tensor import RowDTensor, make_dtensor

SHAPES = [(7, 3), (5,), (), (2, 3, 4), (1, 9), (0, 4), (4, 4, 2), (6, 1)]


@dataclass(frozen=True)
class Cut:
    """How a mesh of this shape holds tensors. With ``axes`` 0 rows are whole."""

    mesh_shape: tuple[int, ...]
    axes: int = 1
    tensor_parallel: tuple[Placement, ...] = ()

    def mesh(self) -> DeviceMesh:
        names = ("outer", "inner", "tensor", "expert")[: len(self.mesh_shape)]
        return init_device_mesh("cpu", self.mesh_shape, mesh_dim_names=names)

    def fits(self, shape: Sequence[int]) -> bool:
        ranks = self.mesh_shape[len(self.mesh_shape) - len(self.tensor_parallel) :]
        return all(
            placement.is_replicate()
            or (
                placement.dim < len(shape)
                and (
                    isinstance(placement, Shard) or shape[placement.dim] % (size * sum(placement.sizes)) == 0
                )
            )
            for placement, size in zip(self.tensor_parallel, ranks, strict=True)
        )


# For four ranks.
CUTS = [
    Cut((4,)),
    Cut((2, 2)),
    Cut((2, 2), axes=2),
    Cut((4, 1), axes=2),
    Cut((2, 2), axes=0),
    Cut((2, 2), tensor_parallel=(Shard(0),)),
    Cut((2, 2), tensor_parallel=(Shard(1),)),
    Cut((2, 2), tensor_parallel=(Replicate(),)),
    Cut((1, 4), tensor_parallel=(Shard(0),)),
    Cut((1, 2, 2), axes=2, tensor_parallel=(Shard(1),)),
    Cut((2, 1, 2), axes=2, tensor_parallel=(Shard(0),)),
    Cut((2, 1, 2), axes=1, tensor_parallel=(Shard(0),)),
    Cut((1, 2, 2), axes=0, tensor_parallel=(Shard(1),)),
    Cut((1, 1, 2, 2), axes=2, tensor_parallel=(Shard(0), Shard(0))),
    Cut((2, 2), tensor_parallel=(FusedShard(0, (1, 1)),)),
    Cut((2, 2), axes=0, tensor_parallel=(FusedShard(0, (1, 2)),)),
    Cut((2, 2), tensor_parallel=(FusedShard(2, (1, 1)),)),
    Cut((2, 1, 2), axes=2, tensor_parallel=(FusedShard(1, (1, 1)),)),
    Cut((1, 2, 2), tensor_parallel=(FusedShard(0, (1, 1)), Shard(1))),
]


def values(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def uneven_bounds(num_rows: int, shards: int) -> tuple[int, ...]:
    """The first shard has half of the rows, the second to last has none, and the last has the rest."""
    inner = [min(num_rows, (num_rows + 1) // 2 + k) for k in range(shards - 1)]
    if shards > 2:
        inner[-1] = inner[-2]
    return (0, *inner, num_rows)


def distribute(full: torch.Tensor, cut: Cut, mesh: DeviceMesh) -> RowDTensor:
    """``full``, which all ranks hold, cut by ``cut``. The local tensor has its own memory."""
    data = mesh.ndim - len(cut.tensor_parallel)
    part, coordinate = full, mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(cut.tensor_parallel, data):
        if isinstance(placement, FusedShard):
            unit = part.shape[placement.dim] // sum(placement.sizes)
            fused = part.split([unit * size for size in placement.sizes], placement.dim)
        elif isinstance(placement, Shard):
            fused = (part,)
        else:
            continue
        parts = [_chunk(section, mesh.size(axis), placement.dim, coordinate[axis]) for section in fused]
        part = torch.cat(parts, placement.dim).contiguous()
    options = {"axes": cut.axes, "tensor_parallel": cut.tensor_parallel}
    if cut.axes == 0:
        return make_dtensor(part.clone(), mesh, full.shape, None, **options)
    over = range(data - cut.axes, data)
    shards = 1
    for axis in over:
        shards *= mesh.size(axis)
    row_size, num_rows = rows_of(part.shape)
    bounds = uneven_bounds(num_rows, shards)
    at = shard_index(mesh, list(over))
    r0, r1 = bounds[at], bounds[at + 1]
    local = part.reshape(-1)[r0 * row_size : r1 * row_size].clone()
    return make_dtensor(local.view(local_shape(part.shape, r1 - r0)), mesh, full.shape, bounds, **options)


def _chunk(tensor: torch.Tensor, chunks: int, dim: int, index: int) -> torch.Tensor:
    """Cut like torch: a short dimension has fewer chunks."""
    pieces = tensor.chunk(chunks, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


def placed(
    seed: int = 0, cuts: Sequence[Cut] = CUTS, few: bool = False
) -> Iterator[tuple[Cut, torch.Tensor, RowDTensor]]:
    """Every shape under every one of ``cuts``; with ``few`` every third, other ones under each."""
    for number, cut in enumerate(cuts):
        mesh = cut.mesh()
        for index, shape in enumerate(SHAPES):
            if cut.fits(shape) and not (few and (index + number) % 3):
                full = values(shape, seed + index)
                yield cut, full, distribute(full, cut, mesh)


FEW = pytest.mark.parametrize(
    "few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some shapes", "all shapes"]
)
