"""Parameters that are DTensors before they are sharded: tensor parallelism on further axes.

A mesh ("dp", "tp") of 2 x 2 ranks, a weight that ``parallelize_module`` cut by columns, then
``fully_shard`` by rows::

    given: Shard(1) on tp        each tp rank's half is a tensor of its own for the flat buffer
    |    |    |                  tp 0                tp 1
    | t0 | t1 |                  dp 0 |  rows  |     dp 0 |  rows  |
    |    |    |                  dp 1 |  rows  |     dp 1 |  rows  |

At rest the parameter is a DTensor on both axes, placed ``(RowShard, Shard(1))``; in forward and
backward it is again the DTensor on tp that was given. A plain parameter that was marked by ``mark``
is treated as if it had been given so; a policy does that.

A program that keeps all parameters as DTensors on one mesh of all axes names the data-parallel
ones, on which they are replicated (``dp_mesh_dims``). In forward and backward such a parameter is
again a DTensor on all axes. Its gradient is whatever the ranks' terms are on the data-parallel
axes, which the group sums.

All use of torch's private access to a mesh's root, and to meshes made of others, is in this module.
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
"""The attribute of a plain parameter that says how a policy places it."""


@dataclass(frozen=True)
class SpmdMesh:
    """A mesh of all axes, of which those numbered ``data_axes`` are data-parallel."""

    mesh: DeviceMesh
    data_axes: frozenset[int]


@dataclass(frozen=True)
class TensorParallel:
    """How a parameter lies on model axes; ``shape`` and ``stride`` are global.

    ``spmd``: it was given on the mesh of all axes, replicated on the data-parallel ones. If there
    are no others, ``placements`` is empty.
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
        """This rank's part of a gradient, which autograd may place otherwise than the parameter.

        Terms of a sum over other axes than the data-parallel ones are added up in ``reduce``.
        """
        # A kernel that works on local tensors delivers this rank's part as it is.
        if not isinstance(grad, DTensor):
            return grad
        mesh, wanted = self.mesh, self.placements
        if self.spmd is not None:
            # Terms of a sum over the data-parallel axes stay as they are.
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
        """These placements on the data-parallel axes, and those of the parameter on the others."""
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
        """Of this rank's part."""
        return torch.Size(tensor_parallel_sizes(self.shape, self.mesh, self.placements))

    def joint_mesh(self, data_parallel: DeviceMesh) -> DeviceMesh:
        """The mesh of the data-parallel axes and these."""
        if not self.placements:
            return data_parallel
        names = (*(data_parallel.mesh_dim_names or ()), *(self.mesh.mesh_dim_names or ()))
        root = data_parallel._get_root_mesh()
        # torch warns of slices by the name of an axis that was flattened from others.
        if set(names) - set(root.mesh_dim_names or ()):
            return DeviceMesh._concatenate([data_parallel, self.mesh])
        return root[names]


def mark(param: torch.Tensor, placed: TensorParallel) -> None:
    """Have ``param``, plain and whole on every rank, cut as ``placed`` says when it is sharded."""
    setattr(param, MARK, placed)


def joined_axes(mesh: DeviceMesh, axes: Sequence[tuple[str, ...]]) -> DeviceMesh:
    """The mesh of these axes, outer one first; several names are one axis, flattened."""
    if all(len(names) == 1 for names in axes):
        return mesh[tuple(name for (name,) in axes)]
    parts = [mesh[names] if len(names) == 1 else mesh[names]._flatten("_".join(names)) for names in axes]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def tensor_parallel_of(name: str, param: torch.Tensor, spmd: SpmdMesh | None = None) -> TensorParallel | None:
    """None for a plain parameter. ValueError for a DTensor that cannot be sharded further."""
    if not isinstance(param, DTensor):
        return getattr(param, MARK, None)
    for placement in param.placements:
        # Subclasses of Shard cut otherwise than in equal parts.
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

    Axes that were flattened from others may lie anywhere.
    """
    if not placed.placements:
        return
    names = (data_parallel.mesh_dim_names, placed.mesh.mesh_dim_names)
    root = data_parallel._get_root_mesh()
    known = root.mesh_dim_names or ()
    # Not by identity: DTensor hands out equal meshes that it has cached.
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
