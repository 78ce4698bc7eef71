"""``fully_shard`` and the methods it gives to a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torch_impl.group import ParameterGroup
from torch_impl.layout import Granularity, Layout, plan_layout
from torch_impl.memory import MemoryReport, memory_report
from torch_impl.model_check import require_same_unit
from torch_impl.options import UnitOptions, check_divisor
from torch_impl.ownership import OwnedParameter, owned_parameters
from torch_impl.placement import strategy_named
from torch_impl.precision import MixedPrecisionPolicy, group_dtypes
from torch_impl.unit import Unit

_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}
_default_meshes: dict[str, Any] = {}


class FSDPModule:
    """Mixed into the class of a sharded module. ``recurse`` methods also reach the sharded modules below."""

    _unit: Unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        open_calls = self._unit.open_calls
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # mixed into an nn.Module
        except BaseException:
            # Not a forward hook: those are not called for a KeyboardInterrupt.
            self._unit.interrupted(open_calls)
            raise

    def unshard(self, async_op: bool = False) -> None:
        """Gather this unit's compute weights now and show them as its parameters until ``reshard``. Collective."""
        if async_op:
            raise ValueError(
                "unshard: expected async_op=False, got True; gathers do not overlap with compute yet"
            )
        self._unit.unshard()

    def reshard(self) -> None:
        """Show the sharded main weights again; free the compute weights unless the strategy keeps them."""
        self._unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, the next backwards keep gradients unreduced on each rank, whatever the strategy."""
        for module in self._fsdp_modules(recurse):
            module._unit.requires_gradient_sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """With False, ``optim`` and ``no_shard`` put off reduction; strategies with sharded gradients still reduce."""
        for module in self._fsdp_modules(True):
            module._unit.last_backward = is_last_backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run backwards of microbatches before the last one: ``set_is_last_backward(False)``, restored on leaving."""
        modules = list(self._fsdp_modules(True))
        before = [module._unit.last_backward for module in modules]
        self.set_is_last_backward(False)
        try:
            yield
        finally:
            for module, value in zip(modules, before, strict=True):
                module._unit.last_backward = value

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether ``optim_grads_params`` frees compute weights between forward and backward."""
        for module in self._fsdp_modules(recurse):
            module._unit.reshard_after_forward = reshard_after_forward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks."""
        check_divisor(factor)
        for group in self._unit.groups:
            group.gradient.divisor = factor

    def memory_report(self, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
        """Bytes that this module and the sharded modules below hold on this rank now; moments need the optimizer."""
        groups = [group for module in self._fsdp_modules(True) for group in module._unit.groups]
        return memory_report(groups, optimizer)

    def _fsdp_modules(self, recurse: bool) -> Iterator[FSDPModule]:
        if not recurse:
            yield self
            return
        assert isinstance(self, nn.Module)
        yield from (module for module in self.modules() if isinstance(module, FSDPModule))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FSDPModule:
        """What ``to``, ``half``, ``cuda`` and the like call: they convert buffers, but not sharded parameters."""
        assert isinstance(self, nn.Module)
        for module in self._fsdp_modules(True):
            for group in module._unit.groups:
                for name, param in zip(group.names, group.params, strict=True):
                    probe = fn(torch.empty(0, dtype=param.dtype, device=param.device))
                    if (probe.dtype, probe.device) != (param.dtype, param.device):
                        raise TypeError(
                            f"{name}: a sharded parameter stays {param.dtype} on {param.device}, got a conversion to "
                            f"{probe.dtype} on {probe.device}; convert the module before fully_shard, or set "
                            "MixedPrecisionPolicy(param_dtype=...)"
                        )
        for child in self.modules():
            for key, buffer in child._buffers.items():
                child._buffers[key] = buffer if buffer is None else fn(buffer)
            for ignored in child._parameters.values():
                if ignored is not None and not isinstance(ignored, DTensor):
                    ignored.data = fn(ignored.data)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(f"cannot deepcopy a sharded {type(self).__name__}: {_COPY_ADVICE}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot copy or pickle a sharded {type(self).__name__}: {_COPY_ADVICE}")


_COPY_ADVICE = (
    "build the module again, shard it and load a state dict into it (torch_impl.save_checkpoint/load_checkpoint, or "
    "state_dict())"
)


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str = "optim_grads_params",
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    granularity: Granularity = "row",
    rows: int = 1,
    grad_divisor: float | None = None,
    **unsupported: Any,
) -> nn.Module:
    """Make ``module`` a unit: it owns, shards and gathers all parameters below it that no inner unit owns.

    Call it on inner modules first, then on the outermost one, before the optimizer is built. The module is changed in
    place and returned; its class becomes a subclass with ``FSDPModule`` mixed in, and ``parameters()`` shows DTensors
    over the main weights (float32, float64 for float64 parameters), built from the values as given. All ranks of
    ``mesh`` call it with the same model; each must hold the same values, since rank k keeps its rows of its own copy.

    mesh: one-dimensional mesh; None: all ranks of the default process group.
    strategy: see ``torch_impl.placement``.
    reshard_after_forward: for ``optim_grads_params``: free compute weights between forward and backward.
    mp_policy: see ``MixedPrecisionPolicy``.
    ignored_params: parameters that stay plain, and whose gradients stay local.
    granularity: what a shard boundary never cuts: a "row", a "block" of ``rows`` rows, a "block(n)" or a "tensor"; or a
        mapping from names of the unit's parameters to these, "row" for those left out.
    grad_divisor: gradients are summed over ranks and divided by this (None: the number of ranks, hence the mean).

    Raises TypeError or ValueError for wrong or unavailable arguments, and ValueError on all ranks when they disagree on
    the model; the module is then as before.
    """
    if unsupported:
        raise TypeError(
            f"fully_shard: no argument {', '.join(unsupported)}; available are mesh, strategy, reshard_after_forward, "
            "mp_policy, ignored_params, granularity, rows and grad_divisor (CPU offload, shard placement functions and "
            "meshes of two data-parallel axes are not)"
        )
    _check_module(module)
    options = UnitOptions(
        strategy_named(strategy),
        reshard_after_forward,
        MixedPrecisionPolicy() if mp_policy is None else mp_policy,
        granularity,
        rows,
        grad_divisor,
    )
    ignored = _ignored(ignored_params)
    mesh, device = _mesh_and_device(mesh)
    unit = _build_unit(module, options, ignored, mesh, device)
    module.__class__ = _sharded_class(type(module))
    module._unit = unit  # type: ignore[assignment]  # nn.Module declares its attributes to be tensors or modules
    unit.attach(module)
    return module


def _build_unit(
    module: nn.Module, options: UnitOptions, ignored: set[int], mesh: DeviceMesh, device: torch.device
) -> Unit:
    """All that can fail; leaves the module untouched, except that its parameters are marked as taken."""
    kind = type(module).__name__
    failure, owned, plans = None, [], []
    try:
        owned = owned_parameters(module, ignored, FSDPModule)
        plans = _plan_groups(owned, options, mesh.size() if options.strategy.shard_optimizer else 1)
    except ValueError as error:
        failure = error
    description = {
        "parameters": [one.description for one in owned],
        **options.description,
        "error": None if failure is None else str(failure),
        "layouts": [layout.fingerprint for _, layout in plans],
    }
    # A rank that fails before this exchange would leave the others waiting in it.
    require_same_unit(kind, description, mesh, device)
    if failure is not None:
        raise failure
    groups = []
    for members, layout in plans:
        dtypes = group_dtypes(members[0].param.dtype, options.policy)
        divisor = mesh.size() if options.grad_divisor is None else options.grad_divisor
        groups.append(ParameterGroup(members, layout, mesh, device, options.strategy, dtypes, divisor))
    for one in owned:
        one.take(kind)
    frees = options.reshard_after_forward and options.strategy.shard_parameters
    return Unit(groups, options.policy, frees)


def _plan_groups(
    owned: Sequence[OwnedParameter], options: UnitOptions, num_shards: int
) -> list[tuple[list[OwnedParameter], Layout]]:
    """Parameters of one dtype and one trainability make a group, with a layout of their own."""
    groups: dict[tuple[torch.dtype, bool], list[OwnedParameter]] = {}
    for one in owned:
        groups.setdefault((one.param.dtype, one.param.requires_grad), []).append(one)
    chosen = options.granularity
    if isinstance(chosen, Mapping):
        unknown = sorted(set(chosen) - {one.name for one in owned})
        if unknown:
            known = ", ".join(one.name for one in owned)
            raise ValueError(
                f"granularity: expected names of the unit's parameters ({known}), got {unknown[0]!r}"
            )
    plans = []
    for members in groups.values():
        shapes = {one.name: tuple(one.param.shape) for one in members}
        its = chosen
        if isinstance(chosen, Mapping):
            its = {name: chosen[name] for name in shapes if name in chosen}
        plans.append((members, plan_layout(shapes, num_shards, granularity=its, rows=options.rows)))
    return plans


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: expected a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"fully_shard: expected a module with a forward, got {type(module).__name__}; shard its items one by one"
        )
    if isinstance(module, FSDPModule):
        raise ValueError(f"fully_shard: {type(module).__name__} is sharded already")


def _ignored(params: Iterable[nn.Parameter] | None) -> set[int]:
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
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh: expected one data-parallel axis, got shape {tuple(mesh.shape)}; take one axis of it, for example "
            "mesh['dp']"
        )
    if mesh.device_type == "cuda":
        return mesh, torch.device("cuda", torch.cuda.current_device())
    return mesh, torch.device(mesh.device_type)


def _default_mesh() -> DeviceMesh:
    """One mesh for all units of a process group: DTensors of one mesh can be reduced together."""
    world = dist.group.WORLD
    if _default_meshes.get("group") is not world:
        on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
        _default_meshes.update(group=world, mesh=mesh)
    return _default_meshes["mesh"]


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """One subclass per class, so that modules of one class stay of one class."""
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    return _sharded_classes[cls]
