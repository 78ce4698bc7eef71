"""Parameters that are DTensors before they are sharded: tensor parallelism on further axes.

A mesh ("dp", "tp") of 2 x 2 ranks, a weight that ``parallelize_module`` cut by columns, then ``fully_shard`` by rows::

    given: Shard(1) on tp        each tp rank's half is a separate tensor in the flat buffer
    |    |    |                  tp 0                tp 1
    | t0 | t1 |                  dp 0 |  rows  |     dp 0 |  rows  |
    |    |    |                  dp 1 |  rows  |     dp 1 |  rows  |

At rest the parameter is a DTensor on both axes, placed ``(RowShard, Shard(1))``; in forward and
backward it is the original DTensor on tp again. A plain parameter that was marked by ``mark`` is
treated as if it had this placement from the start; policies use this.

A program that keeps all parameters as DTensors on one mesh of all axes names the data-parallel axes, on which they are
replicated (``dp_mesh_dims``). In forward and backward such a parameter is again a DTensor on all axes. On the
data-parallel axes, its gradient consists of the ranks' terms, which the group sums.

All uses of torch's private access to a mesh's root, and to meshes made of others, are in this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torch_impl.dtensor.placement import is_fused, tensor_parallel_part, tensor_parallel_sizes
from torch_impl.dtensor.tensor import make_placed

SUMMED = "_summed_over_ranks"
"""Attribute of an unsharded parameter: the group over which its gradient is summed first."""

MARK = "_placed_by_policy"
"""The attribute of a plain parameter that contains its placement by a policy."""


@dataclass(frozen=True)
class SpmdMesh:
    """A mesh of all axes; the axes with the indices ``data_axes`` are data-parallel."""

    mesh: DeviceMesh
    data_axes: frozenset[int]


@dataclass(frozen=True)
class TensorParallel:
    """The placement of a parameter on model axes; ``shape`` and ``stride`` are global.

    ``spmd``: the parameter was a DTensor on the mesh of all axes, replicated on the data-parallel
    axes. If there are no other axes, ``placements`` is empty.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    spmd: SpmdMesh | None = None

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The DTensor over this rank's part."""
        if self.spmd is not None:
            placed = self._on_all_axes([Replicate()] * self.spmd.mesh.ndim)
            return DTensor.from_local(
                local, self.spmd.mesh, placed, run_check=False, shape=self.shape, stride=self.stride
            )
        if is_fused(self.placements):
            return make_placed(local, self.mesh, self.shape, self.placements)
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def local_gradient(self, grad: torch.Tensor, reduce: torch.dtype) -> torch.Tensor:
        """This rank's part of a gradient, which autograd may place differently from the parameter.

        Terms of a sum over axes that are not data-parallel are added in ``reduce``.
        """
        # A kernel that works on local tensors directly delivers this rank's part.
        if not isinstance(grad, DTensor):
            return grad
        mesh, wanted = self.mesh, self.placements
        if self.spmd is not None:
            # Terms of a sum over the data-parallel axes are not added here.
            mesh, wanted = self.spmd.mesh, tuple(self._on_all_axes(grad.placements))
        if tuple(grad.placements) == wanted:
            return grad.to_local()
        pairs = zip(grad.placements, wanted, strict=True)
        sums = any(placement.is_partial() and placement != target for placement, target in pairs)
        # torch's stubs say that a cast DTensor is a plain tensor.
        terms: Any = grad.to(reduce) if sums else grad
        local: torch.Tensor = terms.redistribute(mesh, wanted).to_local()
        return local

    def _on_all_axes(self, on_data_axes: Sequence[Placement]) -> list[Placement]:
        """``on_data_axes`` on the data-parallel axes, and the parameter's placements on the others."""
        assert self.spmd is not None
        others = iter(self.placements)
        return [
            placement if axis in self.spmd.data_axes else next(others)
            for axis, placement in enumerate(on_data_axes)
        ]

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that has the global shape."""
        return tensor_parallel_part(whole, self.mesh, self.placements)

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's part."""
        return torch.Size(tensor_parallel_sizes(self.shape, self.mesh, self.placements))

    def joint_mesh(self, data_parallel: DeviceMesh) -> DeviceMesh:
        """The mesh of the data-parallel axes and of this parameter's model axes."""
        if not self.placements:
            return data_parallel
        names = (*(data_parallel.mesh_dim_names or ()), *(self.mesh.mesh_dim_names or ()))
        root = data_parallel._get_root_mesh()
        # torch warns about slices by the name of an axis that was flattened from others.
        if set(names) - set(root.mesh_dim_names or ()):
            return DeviceMesh._concatenate([data_parallel, self.mesh])
        return root[names]


def mark(param: torch.Tensor, placed: TensorParallel) -> None:
    """Make sharding cut ``param``, plain and whole on every rank, according to ``placed``."""
    setattr(param, MARK, placed)


def joined_axes(mesh: DeviceMesh, axes: Sequence[tuple[str, ...]]) -> DeviceMesh:
    """The mesh of these axes, outer one first; several names together are one axis, flattened."""
    if all(len(names) == 1 for names in axes):
        return mesh[tuple(name for (name,) in axes)]
    parts = [mesh[names] if len(names) == 1 else mesh[names]._flatten("_".join(names)) for names in axes]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def tensor_parallel_of(name: str, param: torch.Tensor, spmd: SpmdMesh | None = None) -> TensorParallel | None:
    """None for a plain parameter. ValueError for a DTensor that cannot be sharded further."""
    if not isinstance(param, DTensor):
        return getattr(param, MARK, None)
    for placement in param.placements:
        # Subclasses of Shard do not cut into equal parts.
        if not isinstance(placement, Replicate) and type(placement) is not Shard:
            raise ValueError(
                f"{name}: expected a parameter placed by Shard(dim) and Replicate() on its "
                f"tensor-parallel mesh, got {param.placements}"
            )
    mesh, placements = param.device_mesh, tuple(param.placements)
    if spmd is None or mesh != spmd.mesh:
        return TensorParallel(mesh, placements, param.shape, param.stride())
    names = mesh.mesh_dim_names or ()
    for axis in sorted(spmd.data_axes):
        if not isinstance(placements[axis], Replicate):
            raise ValueError(
                f"{name}: expected Replicate() on axis {names[axis]!r}, which dp_mesh_dims names, "
                f"got {placements}"
            )
    others = [axis for axis in range(mesh.ndim) if axis not in spmd.data_axes]
    part = mesh[tuple(names[axis] for axis in others)] if others else mesh
    return TensorParallel(part, tuple(placements[axis] for axis in others), param.shape, param.stride(), spmd)


def check_joint(name: str, placed: TensorParallel, data_parallel: DeviceMesh) -> None:
    """ValueError unless both meshes' axes are named axes of one mesh, data-parallel ones first.

    Axes that were flattened from others may be anywhere.
    """
    if not placed.placements:
        return
    names = (data_parallel.mesh_dim_names, placed.mesh.mesh_dim_names)
    root = data_parallel._get_root_mesh()
    known = root.mesh_dim_names or ()
    # Not by identity: DTensor returns equal meshes from a cache.
    if root == placed.mesh._get_root_mesh() and all(names):
        axes = (*(names[0] or ()), *(names[1] or ()))
        order = [known.index(axis) for axis in axes if axis in known]
        if order == sorted(set(order)) or len(order) < len(axes):
            return
    raise ValueError(
        f"{name}: expected a tensor-parallel DTensor whose mesh and the data-parallel mesh are "
        f"parts of one named mesh, data-parallel axes first, got axes {names[1]} with {names[0]}; "
        "make one mesh, for example init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', "
        "'tp')), and use mesh['tp'] and mesh['dp']"
    )
