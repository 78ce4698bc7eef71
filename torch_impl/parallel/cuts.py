"""The cuts of a policy over model axes: modules, their parameters, and the dimension of each cut.

Everything is checked before a model is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from bridge.core.sharding import Cut, ParallelPolicy, PolicyError, ShardingPolicy, check_cuts
from bridge.core.sharding.policy.parallel import FEATURE_STYLES, styled_dimension
from torch_impl.dtensor.placement import FusedShard
from torch_impl.parallel.modules import (
    ColwiseEmbedding,
    ColwiseLinear,
    ComputesOnParts,
    CutModule,
    OnDTensors,
    RowwiseEmbedding,
    RowwiseLinear,
    cut_module,
)
from torch_impl.runtime.ground.tensor_parallel import TensorParallel, mark

_KINDS: dict[tuple[type[nn.Module] | None, str], type[ComputesOnParts]] = {
    (nn.Linear, "colwise"): ColwiseLinear,
    (nn.Linear, "rowwise"): RowwiseLinear,
    (nn.Embedding, "colwise"): ColwiseEmbedding,
    (nn.Embedding, "rowwise"): RowwiseEmbedding,
}


@dataclass(frozen=True)
class ModuleCuts:
    """One module that computes on cut parameters; ``cuts`` by the parameter's name below the module.

    axes: the model axes over which parameters are cut, in the order of the mesh.
    style: "colwise" or "rowwise" for a linear module or an embedding, else None: the module computes on DTensors.
    gathers: whether a colwise linear module gathers its whole output.
    """

    path: str
    module: nn.Module
    cuts: Mapping[str, tuple[Cut, ...]]
    style: str | None = None
    gathers: bool = False
    axes: tuple[str, ...] = ()


def plan_cuts(policy: ShardingPolicy, model: nn.Module, sizes: Mapping[str, int]) -> list[ModuleCuts]:
    """The cuts of ``policy`` in ``model`` over axes of ``sizes``. Raises PolicyError naming module or parameter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    policy.check_model_axes(_cut_by_model(params.values()))
    entries = policy.parallel_of([*modules, *params])
    by_path: dict[str, ModuleCuts] = {}
    try:
        for path, matched in entries.items():
            if path in modules:
                _add(by_path, _of_module(path, modules[path], matched))
            else:
                owner, _, name = path.rpartition(".")
                _add(by_path, _of_parameter(owner, modules[owner], name, params[path], matched))
        by_path = {path: _in_order(cuts, policy.model_axes) for path, cuts in by_path.items()}
        _check_apart(by_path)
        _check_parameters(by_path.values(), params, sizes)
    except PolicyError as error:
        raise PolicyError(f"{policy.source}: [[parallel]]: {error}") from None
    return [replace(cuts, gathers=_gathers(cuts, by_path)) for cuts in by_path.values()]


def _in_order(module_cuts: ModuleCuts, axes: Iterable[str]) -> ModuleCuts:
    used = {cut.axis for cuts in module_cuts.cuts.values() for cut in cuts}
    return replace(module_cuts, axes=tuple(axis for axis in axes if axis in used))


def apply_cuts(planned: Iterable[ModuleCuts], mesh: DeviceMesh, model: nn.Module) -> None:
    """Mark parameters, so that they are cut when they are sharded, and make modules compute on parts.

    mesh: contains the data-parallel and the model axes, by name.
    """
    for module_cuts in planned:
        axes = mesh[module_cuts.axes]
        part_class = (
            OnDTensors
            if module_cuts.style is None
            else _KINDS[_kind_of(module_cuts.module), module_cuts.style]
        )
        for name, param in module_cuts.module.named_parameters():
            cuts = {cut.axis: cut for cut in module_cuts.cuts.get(name, ())}
            # A bias that is added once is treated like any parameter outside the module.
            if cuts or module_cuts.style is None:
                placements = tuple(_placement(cuts.get(axis)) for axis in module_cuts.axes)
                mark(param, TensorParallel(axes, placements, param.shape, param.stride()))
        fused = next((cut.fused for cuts in module_cuts.cuts.values() for cut in cuts if cut.fused), (1,))
        around = model.get_submodule(module_cuts.path.rpartition(".")[0])
        cut_module(
            module_cuts.module,
            part_class,
            CutModule(module_cuts.path, axes, around, module_cuts.gathers, fused),
        )


def _placement(cut: Cut | None) -> Placement:
    if cut is None:
        return Replicate()
    return FusedShard(cut.dimension, cut.fused) if cut.fused else Shard(cut.dimension)


def _cut_by_model(params: Iterable[nn.Parameter]) -> set[str]:
    return {
        name
        for param in params
        if isinstance(param, DTensor)
        for name, placement in zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=False)
        if not placement.is_replicate()
    }


def _add(by_path: dict[str, ModuleCuts], new: ModuleCuts) -> None:
    """Join cuts of one module when several entries name parameters of it."""
    before = by_path.setdefault(new.path, new)
    if before is not new:
        if before.style is not None or new.style is not None:
            raise PolicyError(
                f"{new.path}: expected a module that is cut either by a style or by its parameters, got both"
            )
        names = [*before.cuts, *new.cuts]
        joined = {name: (*before.cuts.get(name, ()), *new.cuts.get(name, ())) for name in names}
        by_path[new.path] = replace(before, cuts=joined)


def _of_module(path: str, module: nn.Module, entries: Iterable[ParallelPolicy]) -> ModuleCuts:
    entries = tuple(entries)
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        raise PolicyError(f"{path}: expected a module with a forward, got {type(module).__name__}")
    # If two axes cut one linear module, no rank has a part that the other styles could exchange.
    if len(entries) == 1 and entries[0].style in FEATURE_STYLES:
        (entry,) = entries
        return ModuleCuts(path, module, _of_style(path, module, entry), entry.style)
    cuts: dict[str, list[Cut]] = {}
    for entry in entries:
        if entry.style in FEATURE_STYLES:
            own = _of_style(path, module, entry)
        else:
            dimension = entry.dimension or 0
            own = {
                name: (Cut(entry.axis, dimension, entry.fused),)
                for name, param in module.named_parameters()
                if entry.style == "expert" or param.ndim > dimension
            }
            if not own:
                raise PolicyError(f"{path}: expected parameters with dimension {dimension}, got none")
        for name, its in own.items():
            cuts.setdefault(name, []).extend(its)
    return ModuleCuts(path, module, {name: tuple(its) for name, its in cuts.items()})


def _of_parameter(
    path: str, module: nn.Module, name: str, param: nn.Parameter, entries: Iterable[ParallelPolicy]
) -> ModuleCuts:
    for entry in entries:
        if entry.style in FEATURE_STYLES:
            raise PolicyError(
                f"{path}.{name}: expected the path of a module for style {entry.style!r}, got the path of a parameter; "
                f"name {path!r}, or give the dimension instead of a style"
            )
    return ModuleCuts(
        path,
        module,
        {
            name: tuple(
                Cut(cut_entry.axis, cut_entry.dimension or 0, cut_entry.fused) for cut_entry in entries
            )
        },
    )


def _of_style(path: str, module: nn.Module, entry: ParallelPolicy) -> dict[str, tuple[Cut, ...]]:
    module_class = _kind_of(module)
    assert entry.style is not None
    if module_class is None or "forward" in vars(module):
        raise PolicyError(
            f"{path}: expected an unmodified nn.Linear or nn.Embedding forward for style {entry.style!r}, got "
            f"{type(module).__name__}; give the dimension to cut instead of a style (the module then computes on "
            "DTensors), or cut the modules below it"
        )
    if module_class is nn.Embedding:
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                raise PolicyError(
                    f"{path}: expected an embedding without {option}, to cut it over {entry.axis!r}"
                )
        if entry.fused:
            raise PolicyError(f"{path}: fused: expected a linear module, got {type(module).__name__}")
        dimension = styled_dimension(entry.style, "embedding", 2)
        assert dimension is not None
        return {"weight": (Cut(entry.axis, dimension),)}
    kinds = {"weight": "linear"} | ({} if module.bias is None else {"bias": "bias"})
    dimensions = {name: styled_dimension(entry.style, kind, 2) for name, kind in kinds.items()}
    return {
        name: (Cut(entry.axis, dimension, entry.fused),)
        for name, dimension in dimensions.items()
        if dimension is not None
    }


def _kind_of(module: nn.Module) -> type[nn.Module] | None:
    """The class whose forward the module has; None for any other forward."""
    for module_class in (nn.Linear, nn.Embedding):
        if isinstance(module, module_class) and type(module).forward is module_class.forward:
            return module_class
    return None


def _check_apart(by_path: Mapping[str, ModuleCuts]) -> None:
    for path in by_path:
        outer = path.rpartition(".")[0]
        while outer:
            if outer in by_path:
                raise PolicyError(f"expected modules that are not nested, got {path!r} inside {outer!r}")
            outer = outer.rpartition(".")[0]


def _check_parameters(
    planned: Iterable[ModuleCuts], params: Mapping[str, nn.Parameter], sizes: Mapping[str, int]
) -> None:
    places: dict[int, list[str]] = {}
    for name, param in params.items():
        places.setdefault(id(param), []).append(name)
    for module_cuts in planned:
        for name, cuts in module_cuts.cuts.items():
            path = f"{module_cuts.path}.{name}".lstrip(".")
            param = params[path]
            if isinstance(param, DTensor):
                raise PolicyError(
                    f"{path}: expected a plain parameter, got a DTensor placed {param.placements}"
                )
            if len(places[id(param)]) > 1:
                raise PolicyError(
                    f"{path}: expected a parameter of one module, got one tied to {places[id(param)]}"
                )
            check_cuts(path, tuple(param.shape), cuts, sizes)
            if module_cuts.style is None and any(cut.fused for cut in cuts):
                raise PolicyError(
                    f"{path}: fused: expected a linear module that is cut by style, got "
                    f"{type(module_cuts.module).__name__}"
                )


def _gathers(module_cuts: ModuleCuts, by_path: Mapping[str, ModuleCuts]) -> bool:
    """Whether a colwise linear module must gather its whole output: no rowwise sibling follows it."""
    if module_cuts.style != "colwise" or _kind_of(module_cuts.module) is not nn.Linear:
        return False
    around, paths = module_cuts.path.rpartition(".")[0], list(by_path)
    return not any(
        other.style == "rowwise"
        and _kind_of(other.module) is nn.Linear
        and other.axes == module_cuts.axes
        and path.rpartition(".")[0] == around
        for path, other in list(by_path.items())[paths.index(module_cuts.path) + 1 :]
    )
