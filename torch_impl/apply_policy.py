"""Shard a model by a policy: make the policy's mesh, shard its units innermost first, and recompute activations."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bridge.core.sharding
from bridge.core.sharding import PolicyError, UnitPolicy
from bridge.core.sharding.policy.recompute import Recompute, why_not_around
from torch_impl.api import fully_shard
from torch_impl.fsdp_module import FSDPModule
from torch_impl.parallel.cuts import apply_cuts, plan_cuts
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy

# They have no forward, so a unit's work could neither begin nor end in them.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# The operators of products, and the subset for batches of matrices.
_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.mv.default, _aten.dot.default, _aten.addmv.default)
_BATCHED = (_aten.bmm.default, _aten.baddbmm.default)
_KEPT = {"dots_saveable": (*_PRODUCTS, *_BATCHED), "dots_with_no_batch_dims_saveable": _PRODUCTS}


class ShardingPolicy(bridge.core.sharding.ShardingPolicy):
    """A policy that shards PyTorch models; ``bridge.core.sharding.policy.policy`` describes the fields of a policy."""

    def apply(
        self, model: nn.Module, *, mesh: DeviceMesh | None = None, device_type: str | None = None
    ) -> nn.Module:
        """``fully_shard`` every unit of ``model`` by this policy, the root last; returns the model, changed in place.

        mesh: a mesh whose axes equal the policy's in number, size and, where the mesh names its axes, in name; a mesh
            with model axes must name them. None: made from ``[mesh]`` over all ranks of the default process group, on
            ``device_type`` (None: "cuda" under NCCL, else "cpu").

        Modules that ``[[parallel]]`` names compute on their rank's part of their parameters, see
        ``torch_impl.parallel``. All ranks of a model axis must be given the same data.

        Weights that a strategy shards are freed after forward in the root too, unlike ``fully_shard``'s default: the
        JAX runtime gathers them again in backward, and a policy means the same collectives in both runtimes. A unit
        that recomputes keeps its inputs and, if the policy says so, the results of products. It computes its other
        activations again in backward, from the weights that backward gathers anyway. Its parameters keep their names.

        Raises PolicyError, before anything is changed, when policy and model do not fit (patterns, the dtype of the
        main weights, weights tied across units, the mesh), and every error that ``fully_shard`` raises.
        """
        modules = _modules_with_forward(model, self.source)
        units = self.units_of(modules)
        _check_main_weights(self, model)
        if self.precision.store_param_remainders and self.parallel:
            raise PolicyError(
                f"{self.source}: [precision] store_param_remainders: expected a policy without [[parallel]], as "
                f"PyTorch stores no remainders of parameters that a model axis cuts, got {len(self.parallel)} entries"
            )
        _check_ties(self, {path: modules[path] for path in units})
        for path, unit in units.items():
            if unit.recompute and "forward" in vars(modules[path]):
                raise PolicyError(
                    f"{self.source}: {path!r}: recomputation expects a forward that the module's class defines, got a "
                    "forward that was set on the module itself"
                )
            inside = next(
                (inner for inner in units if path != inner and (not path or inner.startswith(f"{path}."))),
                None,
            )
            if inside is not None and (reason := why_not_around(unit.recompute, path, inside)):
                raise PolicyError(f"{self.source}: {reason}")
        mesh = _mesh(self, mesh, device_type)
        cuts = plan_cuts(self, model, dict(zip(self.mesh, mesh.shape, strict=True)))
        apply_cuts(cuts, mesh, model)
        # A mesh of data-parallel axes alone may lack names.
        if self.model_axes:
            mesh = mesh[self.data_axes]
        for path in sorted(units, key=lambda path: path.count(".") + bool(path), reverse=True):
            module, unit = modules[path], units[path]
            own_class = type(module)
            if unit.recompute:
                module.__class__ = _recomputed_class(own_class, unit.recompute)  # type: ignore[arg-type]  # classes have a hash
            try:
                fully_shard(
                    module,
                    mesh=mesh,
                    strategy=unit.strategy,
                    placements=unit.placements,
                    reshard_after_forward=True,
                    mp_policy=_mixed_precision(self, unit),
                    granularity=unit.granularity,
                    align=self.align_of(unit),
                    prefetch=self.prefetch,
                )
            except BaseException:
                module.__class__ = own_class
                raise
        return model


class _Recomputed:
    """Mixed in between a unit and its class, so that the unit's weights are gathered when backward recomputes."""

    _recompute: Recompute = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(super().forward, **kwargs)  # type: ignore[misc]  # mixed into an nn.Module
        if self._recompute is True:
            return checkpoint(forward, *args, use_reentrant=False)
        kept = functools.partial(create_selective_checkpoint_contexts, list(_KEPT[str(self._recompute)]))
        return checkpoint(forward, *args, use_reentrant=False, context_fn=kept)


@functools.cache
def _recomputed_class(cls: type[nn.Module], recompute: Recompute) -> type[nn.Module]:
    """A class with the name of ``cls``, which reports show; one per class, so that equal modules share a class."""
    return type(cls.__name__, (_Recomputed, cls), {"__module__": cls.__module__, "_recompute": recompute})


def _modules_with_forward(model: nn.Module, source: str) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{source}: expected a torch.nn.Module, got {type(model).__name__}")
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise PolicyError(f"{source}: expected a model that is not sharded yet, got a unit at {path!r}")
    if isinstance(model, _CONTAINERS):
        raise PolicyError(f"{source}: expected a model with a forward, got {type(model).__name__}")
    return {path: module for path, module in model.named_modules() if not isinstance(module, _CONTAINERS)}


def _check_main_weights(policy: ShardingPolicy, model: nn.Module) -> None:
    wanted = _named(policy.precision.main_dtype)
    if wanted is None:
        return
    for name, param in model.named_parameters():
        wide = param.dtype == torch.float64
        trained = param.requires_grad and param.is_floating_point()
        if trained and wide != (wanted == torch.float64):
            raise PolicyError(
                f"{policy.source}: [precision] main: expected {wanted} main weights, got {name} in {param.dtype}; cast "
                f"the model first, model.to({wanted})"
            )


def _check_ties(policy: ShardingPolicy, units: dict[str, nn.Module]) -> None:
    inner = {id(module) for module in units.values()}
    owners: dict[int, tuple[str, str]] = {}
    for unit, module in units.items():
        for name, param in _own_parameters(module, unit, inner, set()):
            owner, first = owners.setdefault(id(param), (unit, name))
            if owner != unit:
                raise PolicyError(
                    f"{policy.source}: expected tied weights inside one unit, got {first!r} of unit {owner!r} tied to "
                    f"{name!r} of unit {unit!r}"
                )


def _own_parameters(
    module: nn.Module, path: str, inner: Collection[int], seen: set[int]
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters below ``module`` that no inner unit owns, with their names in the model."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, param in module.named_parameters(path, recurse=False):
        yield name, param
    for name, child in module.named_children():
        if id(child) not in inner:
            yield from _own_parameters(child, f"{path}.{name}".lstrip("."), inner, seen)


def _mesh(policy: ShardingPolicy, mesh: DeviceMesh | None, device_type: str | None) -> DeviceMesh:
    if not dist.is_initialized():
        raise PolicyError(
            f"{policy.source}: expected a process group, got none; call torch.distributed.init_process_group first "
            "(also for one process)"
        )
    if mesh is None:
        sizes = policy.mesh_sizes(dist.get_world_size())
        on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
        device = device_type or ("cuda" if on_gpu else "cpu")
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if device_type is not None:
        raise PolicyError(f"{policy.source}: expected mesh or device_type, got both")
    sizes = policy.mesh_sizes(mesh.size())
    names = mesh.mesh_dim_names
    allowed = (tuple(sizes),) if policy.model_axes else (None, tuple(sizes))
    if names not in allowed or tuple(mesh.shape) != tuple(sizes.values()):
        raise PolicyError(
            f"{policy.source}: [mesh]: expected a mesh of {sizes}, got shape {tuple(mesh.shape)}, axes {names}"
        )
    return mesh


def _mixed_precision(policy: ShardingPolicy, unit: UnitPolicy) -> MixedPrecisionPolicy:
    chosen = policy.precision
    return MixedPrecisionPolicy(
        param_dtype=_named(chosen.compute_dtype),
        reduce_dtype=_named(chosen.reduce_dtype),
        grad_dtype=_named(chosen.grad_dtype),
        gather_dtype=chosen.gather,
        main_dtype=_named(chosen.main_dtype),
        store_param_remainders=chosen.store_param_remainders and not unit.chosen.shard_parameters,
    )


def _named(dtype: str | None) -> torch.dtype | None:
    named: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    return named
