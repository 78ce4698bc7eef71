"""FSDP2's arguments and methods: what is translated and refused (``docs/reference/fsdp2-differences.md``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.torch_version import TorchVersion

from bridge.core.sharding.policy.strategy import StrategyName
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.runtime.ground.ownership import OwnedParameter
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy
from torch_impl.runtime.ground.tensor_parallel import SpmdMesh, joined_axes

# If torch's policy has no reduce_dtype, torch reduces in the parameters' own dtype; before 2.15 in param_dtype.
_REDUCES_AS_GIVEN = TorchVersion(torch.__version__) >= "2.15.0a0"


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the mesh axes that are data-parallel: ``shard`` the inner one, ``replicate`` the outer one.

    Several names together are one axis. Raises ValueError if both are None.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: expected shard or replicate, got neither")
        for field_name, axes in (("shard", self.shard), ("replicate", self.replicate)):
            if not isinstance(axes, str | list | tuple | None):
                raise TypeError(
                    f"DataParallelMeshDims.{field_name}: expected a name of a mesh axis or a tuple "
                    f"of names, got {axes!r}"
                )


def policy_of(value: object) -> MixedPrecisionPolicy:
    """None: the default. A policy of torch's is read field by field. TypeError for anything else.

    Raises NotImplementedError for a field of torch's that this package lacks, unless it has its default value.
    """
    if value is None:
        return MixedPrecisionPolicy()
    if isinstance(value, fsdp.MixedPrecisionPolicy):
        known = {field.name for field in fields(MixedPrecisionPolicy)}
        for field in fields(value):
            if field.name not in known and getattr(value, field.name) != field.default:
                refuse(
                    f"MixedPrecisionPolicy.{field.name} of this torch", "use torch_impl.MixedPrecisionPolicy"
                )
        values = {field.name: getattr(value, field.name) for field in fields(value) if field.name in known}
        if _REDUCES_AS_GIVEN and value.param_dtype in (torch.bfloat16, torch.float16):
            values["reduce_dtype"] = value.reduce_dtype or torch.float32
        return MixedPrecisionPolicy(**values)
    if not isinstance(value, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a torch_impl.MixedPrecisionPolicy, got {type(value).__name__}")
    return value


def offload_of(policy: object) -> CPUOffloadPolicy | None:
    """None for weights on the device; TypeError for anything that is not a policy."""
    if policy is None or type(policy) is OffloadPolicy:
        return None
    if isinstance(policy, CPUOffloadPolicy):
        return policy
    raise TypeError(f"offload_policy: expected CPUOffloadPolicy(), OffloadPolicy() or None, got {policy!r}")


def reshard_of(reshard_after_forward: object) -> bool | None:
    """NotImplementedError for a number of ranks to reshard to, TypeError unless a bool or None is given."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if isinstance(reshard_after_forward, int):
        refuse(
            f"reshard_after_forward={reshard_after_forward}",
            "use True (least memory), False (fewest gathers), or a mesh of two axes with strategy='hsdp', whose "
            "gathers stay within the inner axis",
        )
    raise TypeError(f"reshard_after_forward: expected a bool or None, got {reshard_after_forward!r}")


def meshes_of(
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    owned: Iterable[OwnedParameter],
    mesh: DataParallelMesh,
) -> list[DataParallelMesh]:
    """The mesh over which each parameter is sharded: ``mesh``, or that of the function's ``ShardPlacementResult``.

    ``Shard(dim)``, alone or in the result, has no effect. Raises ValueError for a dimension that the parameter lacks
    and TypeError for any other result; NotImplementedError for a mesh that does not shard its innermost axis.
    """
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(
            "shard_placement_fn: expected a function of a parameter, which returns Shard(dim), a ShardPlacementResult "
            f"or None, got {shard_placement_fn!r}"
        )
    meshes = {mesh.mesh: mesh}
    chosen = []
    for parameter in owned:
        wanted = None if shard_placement_fn is None else shard_placement_fn(parameter.param)
        info = getattr(wanted, "mesh_info", None)
        placement = wanted if info is None else getattr(wanted, "placement", None)
        _check_placement(parameter, placement)
        its = mesh.mesh if info is None else _mesh_of(parameter.name, info)
        if its not in meshes:
            meshes[its] = DataParallelMesh(its)
        chosen.append(meshes[its])
    return chosen


def _check_placement(parameter: OwnedParameter, placement: object) -> None:
    if placement is None:
        return
    if not isinstance(placement, Shard):
        raise TypeError(
            "shard_placement_fn: expected Shard(dim), a ShardPlacementResult or None for "
            f"{parameter.name}, got {placement!r}"
        )
    ndim = parameter.param.ndim
    # A scalar has one row.
    if not -max(ndim, 1) <= placement.dim < max(ndim, 1):
        raise ValueError(
            f"shard_placement_fn: expected a dimension of {parameter.name}, which has {ndim}, got {placement!r}"
        )


def _mesh_of(name: str, info: Any) -> DeviceMesh:
    """The mesh of a ``FSDPMeshInfo`` or ``HSDPMeshInfo``, for which torch has no public names."""
    mesh, shard = getattr(info, "mesh", None), getattr(info, "shard_mesh_dim", None)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"shard_placement_fn: expected the mesh_info of {name} to have a DeviceMesh, got {info!r}"
        )
    if shard != mesh.ndim - 1 or mesh.ndim > 2:
        refuse(
            f"shard_placement_fn: {type(info).__name__} for {name} that shards axis {shard} of {mesh.ndim}",
            "give a mesh whose last axis shards and whose other axis, if any, replicates",
        )
    return mesh


def data_parallel_axes(
    mesh: DeviceMesh | None, dims: Any, strategy: StrategyName | None
) -> tuple[DeviceMesh, SpmdMesh, StrategyName | None]:
    """The axes of ``mesh`` that ``dims`` (ours or torch's) names, outer one first; ``mesh``; the strategy on them.

    Several names for one field become one axis, which torch flattens. Without an axis to shard over, the strategy is
    "no_shard". Raises ValueError for a missing mesh, for names that are not axis names in the order of the mesh, and
    for a strategy that contradicts ``dims``.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError("dp_mesh_dims: expected mesh= as well, got none")
    if not all(hasattr(dims, field_name) for field_name in ("replicate", "shard")):
        raise TypeError(
            f"dp_mesh_dims: expected a DataParallelMeshDims, got {dims!r}; "
            'DataParallelMeshDims(shard="dp") names an axis'
        )
    known = mesh.mesh_dim_names or ()
    axes: list[tuple[str, ...]] = []
    for field_name in ("replicate", "shard"):
        axis_names = getattr(dims, field_name)
        listed = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names or ())
        for name in listed:
            if name not in known:
                raise ValueError(f"dp_mesh_dims: expected names of mesh axes, {known}, got {name!r}")
        if list(listed) != sorted(set(listed), key=known.index):
            raise ValueError(
                f"dp_mesh_dims.{field_name}: expected each axis once, in the order of the mesh, {known}, got {listed}"
            )
        if listed:
            axes.append(listed)
    if len(axes) == 2 and set(axes[0]) & set(axes[1]):
        raise ValueError(f"dp_mesh_dims: expected an axis to shard or to replicate, got {dims}")
    if dims.shard is None:
        if strategy not in (None, "no_shard"):
            raise ValueError(f"strategy: expected 'no_shard' without an axis to shard over, got {strategy!r}")
        strategy = "no_shard"
    spmd = SpmdMesh(mesh, frozenset(known.index(name) for names in axes for name in names))
    return joined_axes(mesh, axes), spmd, strategy


def refuse(what: str, instead: str) -> NoReturn:
    """Raise the NotImplementedError of everything in this module."""
    raise NotImplementedError(f"{what} is not available: {instead}")


class Unavailable:
    """Methods of ``torch.distributed.fsdp.FSDPModule`` that raise NotImplementedError.

    Methods whose docstring says "Only ..." accept the value that describes this package's behaviour.
    """

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        refuse(
            "set_custom_all_gather",
            "gathers are issued by torch_impl.comm.collectives, in place in the flat buffers",
        )

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        refuse(
            "set_custom_reduce_scatter",
            "reductions are issued by torch_impl.comm.collectives, from the flat gradient buffers",
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Only False."""
        if enable:
            refuse(
                "set_allocate_memory_from_process_group_for_comm(True)",
                "collectives work in the flat buffers, without staging buffers; leave the call out",
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        refuse(
            "set_symm_mem_for_comm",
            "collectives work in the flat buffers, without staging buffers; leave the call out",
        )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Only True."""
        if not unshard_in_backward:
            refuse(
                "set_unshard_in_backward(False)",
                "a backward that needs the weights anyway would read freed memory; set_reshard_after_forward(False) "
                "saves the second gather",
            )

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Only False."""
        if keep:
            refuse(
                "set_keep_unsharded_storage(True)",
                "whole weights share a pool of buffers; leave the call out, and capture only the optimizer's step",
            )

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Only False."""
        if enabled:
            refuse(
                "set_manual_backward_finalization(True)",
                "each backward reduces its gradients before it returns; set_requires_gradient_sync(False) postpones "
                "the reduction to a later backward",
            )

    def finalize_backward(self, *, async_op: bool = False) -> NoReturn:
        refuse(
            "finalize_backward", "each backward reduces its gradients before it returns; leave the call out"
        )

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Only False."""
        if reduce_scatter_unused_params:
            refuse(
                "set_reduce_scatter_unused_params(True)",
                "ranks may always use different parameters of a unit: a parameter that any rank used has a gradient on "
                "all ranks; units that only some ranks use must be merged into one",
            )

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Only 2, the number of existing buffers."""
        if max_input_buffers != 2:
            refuse(
                f"set_reduce_scatter_max_input_buffers({max_input_buffers!r})",
                "gradient buffers of at most two units are alive; leave the call out",
            )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Only False."""
        if enable:
            refuse(
                "set_separate_reduce_scatter_group(True)",
                "gathers and reductions share the process group of their mesh axis; leave the call out",
            )
