"""``fully_shard``: from a module and options to a unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchModule

from bridge.core.sharding import DEFAULT_ALIGN, Align, Granularity, Placements, check_axes
from bridge.core.sharding.policy.mesh_axes import why_not_data_parallel
from bridge.core.sharding.policy.strategy import StrategyName
from torch_impl import fsdp2
from torch_impl.checkpoint.assigned import load_assigned
from torch_impl.checkpoint.full_state_dict import accept_full_state_dicts
from torch_impl.comm.agreement import require_same_unit
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.dtensor.construction import accept_row_placements
from torch_impl.fsdp_module import FSDPModule
from torch_impl.optimizer.arguments import refuse_other_optimizers
from torch_impl.options import UnitOptions, chosen_strategy
from torch_impl.planned_groups import PlannedGroup, check_mesh, make_groups, plan_groups
from torch_impl.runtime.gather.float8_products import computing_class
from torch_impl.runtime.ground.autograd import watch_backwards
from torch_impl.runtime.ground.ownership import OwnedParameter, owned_parameters
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy
from torch_impl.runtime.ground.tensor_parallel import SpmdMesh
from torch_impl.runtime.unit.unit import Unit
from torch_impl.runtime.weights.context import UnitContext

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])

_default_meshes: dict[str, Any] = {}


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: StrategyName | None = None,
    placements: Placements | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    granularity: Granularity = "row",
    rows: int = 1,
    align: Align = DEFAULT_ALIGN,
    grad_divisor: float | None = None,
    prefetch: int | None = None,
) -> M:
    """Make ``module`` a unit: it owns, shards and gathers all parameters below it that no inner unit owns.

    Call it on inner modules first, then on the outermost one, before the optimizer is built. The module is changed in
    place and returned. Its class becomes a subclass with ``FSDPModule`` mixed in, and ``parameters()`` returns DTensors
    over the main weights, which start from the current values. Main weights are float32 (float64 for float64
    parameters; frozen parameters keep their dtype) unless ``mp_policy`` says otherwise. All ranks of ``mesh`` call it
    with the same model. All ranks must hold the same values, since rank k keeps its rows of its own copy, or load
    values before the first forward; in the second case, some ranks may be on the meta device.

    The first call wraps ``distribute_tensor``, ``DTensor.from_local`` and private functions of
    ``torch.distributed.checkpoint.state_dict``, for the whole process, so that these know how sharded parameters are
    placed; see ``torch_impl.dtensor.construction`` and ``torch_impl.checkpoint.full_state_dict``. It also wraps the
    private function with which ``torch.autograd`` starts a backward, see ``torch_impl.runtime.ground.autograd``.

    module: a module, or a sequence of modules that form one unit, whose weights are gathered and reduced together.
    mesh: one or two data-parallel axes, outer to inner; None: all ranks of the default process group. Axes named for
        model parallelism ("tp", ...; see ``bridge.core.sharding.policy.mesh_axes``) are refused, unless dp_mesh_dims
        names them.
    strategy: see ``bridge.core.sharding.policy.strategy``; None: "optim_grads_params", which on two axes is HSDP.
    placements: the strategy spelled out for each mesh axis, instead of its name.
    reshard_after_forward: where parameters are sharded, free compute weights between forward and backward. None: yes,
        except in the root, the unit whose forward is called first, while gradients are enabled. If they are not freed,
        ``module.weight`` is the whole weight until the backward has ended.
    shard_placement_fn: for programs written for FSDP2. ``Shard(dim)`` has no effect, see ``torch_impl.fsdp2``. A
        ``ShardPlacementResult`` names the mesh over which a parameter is sharded instead of ``mesh``, for example the
        mesh of the ranks that hold the same experts.
    mp_policy: see ``MixedPrecisionPolicy``; torch's own is accepted.
    offload_policy: with ``CPUOffloadPolicy()``, main weights and gradients are stored in CPU memory (pinned if it says
        so and the mesh has GPUs), where the optimizer updates them; see ``torch_impl.runtime.ground.host_memory``. Such
        a mesh of GPUs also needs a backend for the CPU ("cpu:gloo,cuda:nccl") for reductions over parameters or
        gradients, such as clipping. None or ``OffloadPolicy()``: on the mesh's device.
    ignored_params: parameters that stay plain, and whose gradients stay local.
    dp_mesh_dims: ``DataParallelMeshDims``: which axes of ``mesh`` to use, by name. Parameters that are DTensors on all
        axes of ``mesh``, replicated on these axes, remain DTensors in forward and backward.
    granularity: what a shard boundary never cuts: a "row", a "block" of ``rows`` rows, a "block(n)" or a "tensor"; or a
        mapping from names of the unit's parameters to these values. Names that are left out mean "row".
    align: shards are multiples of this many elements; or "auto"; see ``bridge.core.sharding.plan_layout``.
    grad_divisor: gradients are summed over ranks and divided by this (None: the number of ranks, hence the mean).
    prefetch: 1 (the same as None) gathers the next unit while one computes, and reduces gradients during the next
        unit's backward, so two units' weights and gradients are in memory at a time. 0 gathers a unit when it is used,
        and waits for its reduction before the backward continues: this needs the least memory, one unit's weights and
        gradients, but nothing is computed during a transfer. The root's value holds for all units below it, whatever
        value they were given. ``set_modules_to_forward_prefetch`` and its backward twin gather ahead with 0 as well.

    Raises TypeError or ValueError for wrong arguments, NotImplementedError for features that FSDP2 has and this package
    does not, and ValueError on all ranks when they disagree on the model. After an error the module is as before.
    """
    modules = _checked_modules(module)
    spmd = None
    if dp_mesh_dims is not None:
        mesh, spmd, strategy = fsdp2.data_parallel_axes(mesh, dp_mesh_dims, strategy)
    chosen = chosen_strategy(strategy, placements)
    options = UnitOptions(
        chosen,
        fsdp2.reshard_of(reshard_after_forward),
        fsdp2.policy_of(mp_policy),
        granularity,
        rows,
        align,
        grad_divisor,
        prefetch,
        fsdp2.offload_of(offload_policy),
    )
    ignored = _ignored(ignored_params)
    mesh, device = _mesh_and_device(mesh)
    refusal = None if dp_mesh_dims is not None else why_not_data_parallel(mesh.mesh_dim_names or ())
    if refusal is not None:
        raise ValueError(f"mesh: {refusal}, or name the axis in dp_mesh_dims")
    check_axes(chosen, placements, mesh.ndim)
    products = options.policy.float8_products
    classes = [_sharded_class(computing_class(type(member), products)) for member in modules]  # type: ignore[arg-type]  # classes have a hash
    unit = _build_unit(modules, options, ignored, DataParallelMesh(mesh), device, shard_placement_fn, spmd)
    accept_row_placements()
    accept_full_state_dicts()
    watch_backwards()
    if options.policy.store_param_remainders:
        refuse_other_optimizers()
    for member, cls in zip(modules, classes, strict=True):
        member.__class__ = cls
        member._unit = unit  # type: ignore[assignment]  # nn.Module declares its attributes to be tensors or modules
        unit.attach(member)
        member.register_load_state_dict_pre_hook(load_assigned)
    return module


def _build_unit(
    modules: Sequence[nn.Module],
    options: UnitOptions,
    ignored: set[int],
    mesh: DataParallelMesh,
    device: torch.device,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    spmd: SpmdMesh | None,
) -> Unit:
    """Every step that can fail; leaves the modules untouched, except that their parameters are marked as taken."""
    names = " and ".join(type(module).__name__ for module in modules)
    failure: Exception | None = None
    owned: list[OwnedParameter] = []
    plans: list[PlannedGroup] = []
    try:
        # Names must differ: several modules count as items of one.
        root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        owned = owned_parameters(root, ignored, FSDPModule, spmd)
        meshes = fsdp2.meshes_of(shard_placement_fn, owned, mesh)
        for parameter, own_mesh in zip(owned, meshes, strict=True):
            check_mesh(parameter, own_mesh, options)
        plans = plan_groups(owned, meshes, options)
    except Exception as error:
        failure = error
    description = {
        "parameters": [parameter.description for parameter in owned],
        **options.description,
        "error": None if failure is None else str(failure),
        "layouts": [plan.layout.fingerprint for plan in plans],
        "meshes": [list(plan.mesh.sizes) for plan in plans],
    }
    # A rank that fails before this exchange would leave the others waiting in it.
    on_meta = any(parameter.param.is_meta for parameter in owned)
    # Ranks with values and ranks without wait for a load, which makes them equal.
    unequal = require_same_unit(names, description, on_meta, mesh, device)
    if failure is not None:
        raise failure
    context = UnitContext(device, 1 if options.prefetch is None else options.prefetch)
    groups = make_groups(plans, options, context, device, unequal)
    for parameter in owned:
        parameter.take(names)
        for module, _ in parameter.sites if options.policy.float8_products else ():
            module.__class__ = computing_class(type(module), float8_products=True)
    return Unit(groups, context, options.policy, options.reshard_after_forward)


def _checked_modules(module_or_list: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a unit: for a sequence, without modules that other modules of the sequence contain."""
    several = isinstance(module_or_list, list | tuple)
    modules: list[nn.Module] = list(module_or_list) if several else [module_or_list]  # type: ignore[arg-type, list-item]  # checked below
    if not modules:
        raise ValueError("fully_shard: expected one or more modules, got an empty sequence")
    for module in modules:
        _check_module(module)
        for name, below in module.named_modules():
            if isinstance(below, TorchModule):
                raise ValueError(
                    f"fully_shard: {name or 'the module'} ({type(below).__name__}) is already sharded by "
                    "torch.distributed.fsdp; shard all modules of a model with the same package"
                )
    if several:
        inner = {id(below) for module in modules for below in module.modules() if below is not module}
        modules = [module for module in dict.fromkeys(modules) if id(module) not in inner]
    return modules


def _check_module(module: object) -> None:
    class_name = type(module).__name__
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: expected a torch.nn.Module or a list of them, got {class_name}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"fully_shard: expected a module of Python code, got {class_name}; shard it before scripting"
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        raise ValueError(
            f"fully_shard: expected a module with a forward, got {class_name}; shard its "
            "items separately, or as one unit: fully_shard(list(module))"
        )
    if isinstance(module, FSDPModule):
        raise ValueError(f"fully_shard: {class_name} is already sharded")
    members = (vars(module), vars(module)["_parameters"], vars(module)["_buffers"], vars(module)["_modules"])
    for name in ("_unit", "_original_class"):
        # Not hasattr: wrappers such as CheckpointWrapper show the attributes of a sharded module inside them.
        if hasattr(type(module), name) or any(name in names for names in members):
            raise ValueError(
                f"fully_shard: {class_name} already has an attribute {name!r}, which sharding needs; rename it"
            )


def _ignored(params: Iterable[nn.Parameter] | None) -> set[int]:
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable | None):
        raise TypeError(f"ignored_params: expected a set or list of parameters, got {type(params).__name__}")
    listed = list(params or ())
    for param in listed:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params: expected parameters, got {type(param).__name__}")
    return {id(param) for param in listed}


def _mesh_and_device(mesh: DeviceMesh | None) -> tuple[DeviceMesh, torch.device]:
    if not dist.is_initialized():
        raise ValueError(
            "fully_shard: no process group; call torch.distributed.init_process_group first (also for one process)"
        )
    if mesh is None:
        mesh = _default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.device_type == "cuda":
        return mesh, torch.device("cuda", torch.cuda.current_device())
    return mesh, torch.device(mesh.device_type)


def _default_mesh() -> DeviceMesh:
    """One mesh for all units of a process group, since DTensors must share a mesh to be reduced together."""
    world = dist.group.WORLD
    if _default_meshes.get("group") is not world:
        on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
        _default_meshes.update(group=world, mesh=mesh)
    return _default_meshes["mesh"]


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """One subclass per class, so that modules of one class remain of one class."""
    attributes = {"__module__": cls.__module__, "_original_class": cls}
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), attributes)
