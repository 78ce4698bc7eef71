"""The groups of a unit: first the parameters and layout of each are planned, then each gets its weights.

Ranks compare the plans before any of them makes a group, see ``require_same_unit``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from bridge.core.sharding import Layout, plan_layout
from torch_impl.comm.collective_order import collective_order
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.options import UnitOptions
from torch_impl.runtime.ground.buffer import ShardLevels
from torch_impl.runtime.ground.group_spec import GroupSpec
from torch_impl.runtime.ground.host_memory import HostMemory
from torch_impl.runtime.ground.ownership import OwnedParameter
from torch_impl.runtime.ground.precision import check_quantized, group_dtypes
from torch_impl.runtime.ground.tensor_parallel import check_joint
from torch_impl.runtime.unit.group import ParameterGroup
from torch_impl.runtime.weights.context import UnitContext
from torch_impl.runtime.weights.extended_weights import ExtendedWeights
from torch_impl.runtime.weights.extension import check_extension, extended_layout, own_rows
from torch_impl.runtime.weights.group_weights import FlatWeights


class PlannedGroup(NamedTuple):
    """Parameters of one dtype, one trainability and one mesh, all ``quantized`` or none.

    ``shards``: this rank's rows of parameters with extensions; None if there are no extensions.
    """

    members: list[OwnedParameter]
    quantized: bool
    mesh: DataParallelMesh
    layout: Layout
    shards: list[torch.Tensor] | None = None


def plan_groups(
    owned: Sequence[OwnedParameter], meshes: Sequence[DataParallelMesh], options: UnitOptions
) -> list[PlannedGroup]:
    """The groups of a unit, in the order of their first parameters; ``meshes`` contains each parameter's mesh."""
    groups: dict[tuple[torch.dtype, bool, bool, bool, DataParallelMesh], list[OwnedParameter]] = {}
    for parameter, own_mesh in zip(owned, meshes, strict=True):
        dtype, trainable = parameter.param.dtype, parameter.param.requires_grad
        extended = parameter.extended
        quantized = not extended and options.policy.is_quantized(dtype, parameter.local_shape)
        if quantized:
            check_quantized(parameter.name, dtype, options.policy, trainable=trainable)
        if options.policy.store_param_remainders:
            _check_remainders(parameter, options)
        groups.setdefault((dtype, trainable, quantized, extended, own_mesh), []).append(parameter)
    chosen = options.granularity
    if isinstance(chosen, Mapping):
        unknown = sorted(set(chosen) - {parameter.name for parameter in owned})
        if unknown:
            known = ", ".join(parameter.name for parameter in owned)
            raise ValueError(
                f"granularity: expected names of the unit's parameters ({known}), got {unknown[0]!r}"
            )
    plans = []
    for (_, _, quantized, extended, mesh), members in groups.items():
        if extended:
            plans.append(_plan_extended(members, options, mesh))
            continue
        shapes = {parameter.name: tuple(parameter.local_shape) for parameter in members}
        own = chosen
        if isinstance(chosen, Mapping):
            own = {name: chosen[name] for name in shapes if name in chosen}
        num_shards = mesh.shards(options.strategy.optimizer)
        layout = plan_layout(shapes, num_shards, granularity=own, rows=options.rows, align=options.align)
        plans.append(PlannedGroup(members, quantized, mesh, layout))
    return plans


def _plan_extended(
    members: list[OwnedParameter], options: UnitOptions, mesh: DataParallelMesh
) -> PlannedGroup:
    for parameter in members:
        check_extension(parameter, mesh, options.strategy)
    num_shards, first = mesh.shards(options.strategy.optimizer), members[0].param
    main = group_dtypes(first.dtype, options.policy, trainable=first.requires_grad).main
    shards = [
        own_rows(parameter, main, mesh.index(options.strategy.optimizer), num_shards) for parameter in members
    ]
    return PlannedGroup(members, False, mesh, extended_layout(members, num_shards), shards)


def check_mesh(parameter: OwnedParameter, mesh: DataParallelMesh, options: UnitOptions) -> None:
    """ValueError unless the parameter can be sharded over ``mesh`` by the unit's strategy."""
    if parameter.tensor_parallel is not None:
        check_joint(parameter.name, parameter.tensor_parallel, mesh.mesh)
    if options.strategy.optimizer > mesh.ndim:
        raise ValueError(
            f"{parameter.name}: strategy {options.strategy.name!r} shards over {options.strategy.optimizer} axes, "
            f"expected a mesh of as many axes from shard_placement_fn, got one of shape {tuple(mesh.mesh.shape)}"
        )


def _check_remainders(parameter: OwnedParameter, options: UnitOptions) -> None:
    """ValueError or NotImplementedError for a parameter that cannot be stored with a remainder."""
    dtypes = group_dtypes(parameter.param.dtype, options.policy, trainable=parameter.param.requires_grad)
    if dtypes.remainders and (dtypes.main, dtypes.compute) != (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{parameter.name}: expected float32 main weights and param_dtype=torch.bfloat16 with "
            f"store_param_remainders=True, got {dtypes.main} and {dtypes.compute}"
        )
    if parameter.extended:
        raise NotImplementedError(
            f"{parameter.name}: store_param_remainders=True is not available for a {type(parameter.local).__name__}, "
            "which defines its own rows"
        )
    if parameter.tensor_parallel is not None:
        raise NotImplementedError(
            f"{parameter.name}: store_param_remainders=True is not available for tensor-parallel parameters"
        )


def make_groups(
    plans: Sequence[PlannedGroup],
    options: UnitOptions,
    context: UnitContext,
    device: torch.device,
    unequal: bool,
) -> list[ParameterGroup]:
    """The planned groups with their weights; ``unequal``: some ranks have no values yet."""
    groups, host = [], None
    if options.offload is not None:
        host = HostMemory(pinned=options.offload.pin_memory and device.type == "cuda")
    for index, plan in enumerate(plans):
        first = plan.members[0].param
        trainable, quantized = first.requires_grad, plan.quantized
        divisor = plan.mesh.size if options.grad_divisor is None else options.grad_divisor
        spec = GroupSpec(
            [member.name for member in plan.members],
            [member.tensor_parallel for member in plan.members],
            plan.layout,
            ShardLevels(plan.layout, plan.mesh, options.strategy.optimizer),
            options.strategy,
            group_dtypes(first.dtype, options.policy, trainable=trainable, quantized=quantized),
            f" group {index}" if len(plans) > 1 else "",
            host,
            divisor,
            collective_order(plan.mesh),
        )
        weights = (
            FlatWeights(spec, context)
            if plan.shards is None
            else ExtendedWeights(spec, context, plan.members, plan.shards, options.policy)
        )
        main_device = torch.device("meta") if first.is_meta else device
        groups.append(ParameterGroup(plan.members, spec, context, weights, main_device, unequal))
    return groups
