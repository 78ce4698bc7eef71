"""Parameters that are DTensors already when they are sharded: tensor parallelism on further mesh axes.

A mesh ("dp", "tp") of 2 x 2 ranks, a weight that ``parallelize_module`` cut by columns, then ``fully_shard`` by rows::

    given: Shard(1) on tp        each tp rank's half is a tensor of its own for the flat buffer
    |    |    |                  tp 0                tp 1
    | t0 | t1 |                  dp 0 |  rows  |     dp 0 |  rows  |
    |    |    |                  dp 1 |  rows  |     dp 1 |  rows  |

At rest the parameter is a DTensor on both axes, placed ``(RowShard, Shard(1))``; in forward and backward it is again
the DTensor on tp that was given. A plain parameter that was marked by ``mark`` is treated as if it had been given so; a
policy does that. All use of torch's private access to a mesh's root is in this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torch_impl.dtensor.placement import is_fused, tensor_parallel_part, tensor_parallel_sizes
from torch_impl.dtensor.tensor import make_placed

MARK = "_placed_by_policy"
"""The attribute of a plain parameter that says how a policy places it."""


@dataclass(frozen=True)
class TensorParallel:
    """How a parameter lies on the mesh axes that are not data-parallel; ``shape`` and ``stride`` are global."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The DTensor over this rank's part."""
        if is_fused(self.placements):
            return make_placed(local, self.mesh, self.shape, self.placements)
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient, which autograd may place otherwise than the parameter."""
        # A kernel that works on local tensors delivers this rank's part as it is.
        if not isinstance(grad, DTensor):
            return grad
        if tuple(grad.placements) == self.placements:
            return grad.to_local()
        return grad.redistribute(self.mesh, self.placements).to_local()

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that has the global shape."""
        return tensor_parallel_part(whole, self.mesh, self.placements)

    @property
    def local_shape(self) -> torch.Size:
        """Of this rank's part."""
        return torch.Size(tensor_parallel_sizes(self.shape, self.mesh, self.placements))

    def joint_mesh(self, data_parallel: DeviceMesh) -> DeviceMesh:
        """The mesh of the data-parallel axes and these."""
        names = (*(data_parallel.mesh_dim_names or ()), *(self.mesh.mesh_dim_names or ()))
        root = data_parallel._get_root_mesh()
        return root[names]


def mark(param: torch.Tensor, placed: TensorParallel) -> None:
    """Have ``param``, plain and whole on every rank, cut as ``placed`` says when it is sharded."""
    setattr(param, MARK, placed)


def tensor_parallel_of(name: str, param: torch.Tensor) -> TensorParallel | None:
    """None for a plain parameter without a mark. ValueError for a DTensor that cannot be sharded further."""
    if not isinstance(param, DTensor):
        return getattr(param, MARK, None)
    for placement in param.placements:
        # Subclasses of Shard cut otherwise than in equal parts.
        if not isinstance(placement, Replicate) and type(placement) is not Shard:
            raise ValueError(
                f"{name}: expected a parameter placed by Shard(dim) and Replicate() on its tensor-parallel mesh, got "
                f"{param.placements}"
            )
    return TensorParallel(param.device_mesh, tuple(param.placements), param.shape, param.stride())


def check_joint(name: str, given: TensorParallel, data_parallel: DeviceMesh) -> None:
    """ValueError unless the axes of both meshes are named axes of one mesh, the data-parallel ones outside."""
    names = (data_parallel.mesh_dim_names, given.mesh.mesh_dim_names)
    root = data_parallel._get_root_mesh()
    known = root.mesh_dim_names or ()
    # Not by identity: DTensor hands out equal meshes that it has cached.
    if root == given.mesh._get_root_mesh() and all(names):
        order = [known.index(axis) for axis in (*(names[0] or ()), *(names[1] or ())) if axis in known]
        if len(order) == data_parallel.ndim + given.mesh.ndim and order == sorted(set(order)):
            return
    raise ValueError(
        f"{name}: expected a tensor-parallel DTensor whose mesh and the data-parallel mesh are parts of one named "
        f"mesh, data-parallel axes first, got axes {names[1]} beside {names[0]}; make one mesh, for example "
        "init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), and use mesh['tp'] and mesh['dp']"
    )
