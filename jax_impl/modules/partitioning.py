"""Decide which model axes cut which parameters, from a policy or ``parallel=``, and from annotations in the model.

::

    policy, [[parallel]]   match = "layers.*.mlp.up", axis = "tp", style = "colwise"
    parallel=              {"layers/*/mlp/up": "colwise", "layers/*/mlp/down/kernel": PartitionSpec("tp", None)}
    the model              nnx.with_partitioning(init, (None, "tp")), linen's nn.Partitioned, logical names with rules

Dimensions are counted within one layer, also for a stack. A style's dimension depends on the role of the parameter
(``bridge.core.sharding.policy.parallel``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx
from flax.core import meta
from flax.linen import get_logical_axis_rules
from jax.sharding import Mesh, PartitionSpec

from bridge.core.callers import warn_caller
from bridge.core.sharding import ShardingPolicy
from bridge.core.sharding.policy.mesh_axes import EXPERT_AXES, is_model_axis
from bridge.core.sharding.policy.parallel import Cut, ParallelPolicy, check_cuts, entries_of, styled_dimension
from bridge.core.sharding.policy.unit_policy import matches
from bridge.core.text import first_of
from jax_impl.comm.mesh import ModelAxes
from jax_impl.modules.module_tree import dotted_paths, joined, layers_at, module_paths, parameter_leaves
from jax_impl.modules.tree_model import given_node

Parallel = Mapping[str, str | PartitionSpec]
Cuts = dict[str, tuple[Cut, ...]]


def cuts_of(
    model: nnx.Module,
    stacks: Mapping[str, int],
    mesh: Mesh,
    policy: ShardingPolicy | None,
    parallel: Parallel | None,
) -> Cuts:
    """The cuts of parameters over model axes of ``mesh``, by path. Warns about annotations without effect.

    Raises ``ValueError`` that names a parameter whose axes or dimensions do not fit, or a model axis that cuts nothing.
    """
    axes = ModelAxes.of(mesh)
    if not axes.names:
        if parallel:
            raise ValueError(f"parallel: expected a mesh with model axes, got {dict(mesh.shape)}")
        warn_of_annotations(model)
        return {}
    shapes = {
        path: tuple(value.shape[layers_at(path, stacks) is not None :])
        for path, value in parameter_leaves(model).items()
    }
    by_path: dict[str, dict[Cut, None]] = {path: {} for path in shapes}
    for source in (
        _of_annotations(model, stacks, mesh, shapes),
        _of_entries(_entries(policy, parallel, axes), model, stacks, shapes, policy, parallel),
        _of_specs(parallel or {}, model, stacks, shapes, mesh),
    ):
        for path, cut in source:
            by_path[path][cut] = None
    order = axes.names.index
    cuts = {path: tuple(sorted(own, key=lambda cut: order(cut.axis))) for path, own in by_path.items() if own}
    for path, own in cuts.items():
        check_cuts(f"parameter {path!r}", shapes[path], own, axes.by_name)
    _check_axes(axes, cuts)
    return cuts


def _check_axes(axes: ModelAxes, cuts: Cuts) -> None:
    used = {cut.axis for own in cuts.values() for cut in own}
    for name in axes.names:
        if name not in used:
            raise ValueError(
                f"mesh: the model axis {name!r} cuts no parameter, so all its devices would do the same work; "
                f'expected a policy with [[parallel]] axis = "{name}", parallel={{"layers/*/mlp/up": "colwise"}}, or '
                "a model with sharding annotations (nnx.with_partitioning). Rename the axis (for example to 'dp') if "
                "the axis is data-parallel"
            )


def _of_annotations(
    model: nnx.Module, stacks: Mapping[str, int], mesh: Mesh, shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Cut]]:
    unknown: dict[str, Any] = {}
    for path, names in annotations_of(model):
        entries = _entries_of_a_layer(path, names, layers_at(path, stacks), len(shapes[path]), mesh)
        for dimension, entry in enumerate(entries):
            for name in entry if isinstance(entry, tuple) else (entry,):
                if name is None:
                    continue
                if name not in mesh.axis_names:
                    unknown[path] = names
                    continue
                if not is_model_axis(name):
                    raise ValueError(
                        f"parameter {path!r}: expected an annotation that names model axes only, got {names}, where "
                        f"{name!r} is a data-parallel axis: strategies shard over data-parallel axes, so remove the "
                        "name"
                    )
                yield path, Cut(name, dimension)
    warn_of_annotations(model, unknown)


def _entries_of_a_layer(path: str, names: Any, layers: int | None, ndim: int, mesh: Mesh) -> tuple[Any, ...]:
    """The annotation without the stack's axis, if the annotation includes that axis."""
    entries = tuple(names)
    if layers is None or len(entries) == ndim:
        return entries
    if len(entries) != ndim + 1:
        raise ValueError(
            f"parameter {path!r} of a stack: expected an annotation with a name or None for each of {ndim} "
            f"dimensions, or of {ndim + 1} including the layers, got {names}"
        )
    if entries[0] in mesh.axis_names:
        raise ValueError(
            f"parameter {path!r} of a stack: expected no axis of the mesh for the layer dimension, since layers are "
            f"scanned, got {names}"
        )
    return entries[1:]


def _entries(
    policy: ShardingPolicy | None, parallel: Parallel | None, axes: ModelAxes
) -> tuple[ParallelPolicy, ...]:
    """The entries that have a style; ``parallel`` replaces the policy's entries."""
    if parallel is None:
        return () if policy is None else policy.parallel
    styles = {pattern: style for pattern, style in parallel.items() if not isinstance(style, PartitionSpec)}
    return tuple(
        ParallelPolicy((pattern.replace("/", "."),), _axis_for(pattern, style, axes), style)
        for pattern, style in styles.items()
    )


def _axis_for(pattern: str, style: str, axes: ModelAxes) -> str:
    """The model axis to which a style applies: the axis for experts or the other axis; a single axis in any case."""
    for_experts = [name for name in axes.names if (name.lower() in EXPERT_AXES) == (style == "expert")]
    meant = list(axes.names) if len(axes.names) == 1 else for_experts
    if len(meant) != 1:
        raise ValueError(
            f"parallel: expected one model axis to which {style!r} of {pattern!r} can apply, got {list(axes.names)}: "
            "name the axis in a PartitionSpec"
        )
    return meant[0]


def _of_entries(
    entries: Sequence[ParallelPolicy],
    model: nnx.Module,
    stacks: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    policy: ShardingPolicy | None,
    parallel: Parallel | None,
) -> Iterator[tuple[str, Cut]]:
    source = "parallel" if parallel is not None or policy is None else policy.source
    names = _dotted(model, stacks, shapes)
    matched = entries_of(entries, names, source)
    roles = _roles(model)
    by_name: dict[str, dict[str, dict[Cut, None]]] = {}
    for dotted, path in names.items():
        for entry in matched.get(dotted, ()):
            for below in _parameters(dotted, path, names, shapes):
                role, shape = roles[names[below]], shapes[names[below]]
                if role == "kernel" and len(shape) > 3 and entry.style in ("colwise", "rowwise"):
                    # In linen and other pytrees, nothing marks an array as a convolution's kernel.
                    raise ValueError(
                        f"{source}: [[parallel]]: {below}: expected dimension = N for a kernel of shape "
                        f"{tuple(shape)}, whose input and output dimensions are unknown, got style {entry.style!r}"
                    )
                dimension = _dimension(entry, role, len(shape))
                if dimension is not None:
                    own = by_name.setdefault(names[below], {}).setdefault(below, {})
                    own[Cut(entry.axis, dimension, entry.fused)] = None
    for path, layers in by_name.items():
        _check_layers(path, list(layers.values()), layers_at(path, stacks))
        for cut in next(iter(layers.values())):
            # For a contiguous cut of a fused dimension, the compiler adds the necessary communication.
            yield path, Cut(cut.axis, cut.dimension)


def _dotted(model: nnx.Module, stacks: Mapping[str, int], shapes: Iterable[str]) -> dict[str, str]:
    """Dotted path -> path of all modules and parameters, with stacks layer by layer."""
    by_dotted = module_paths(model, stacks)
    for path in shapes:
        by_dotted.update(dict.fromkeys(dotted_paths(path, stacks), path))
    return by_dotted


def _parameters(
    dotted: str, path: str, names: Mapping[str, str], shapes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Dotted paths of the parameter itself, or of a module's parameters."""
    if path in shapes:
        return [dotted]
    return [name for name, below in names.items() if below in shapes and name.startswith(f"{dotted}.")]


def _check_layers(path: str, layers: Sequence[Mapping[Cut, None]], expected: int | None) -> None:
    if expected is not None and (
        len(layers) != expected or any(own.keys() != layers[0].keys() for own in layers)
    ):
        raise ValueError(
            f"parameter {path!r}: expected equal cuts of all {expected} layers of a stack, since layers are scanned, "
            f"got cuts of {len(layers)} layers: use a pattern like layers.*"
        )


def _of_specs(
    parallel: Parallel,
    model: nnx.Module,
    stacks: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    mesh: Mesh,
) -> Iterator[tuple[str, Cut]]:
    names = _dotted(model, stacks, shapes)
    for pattern, spec in parallel.items():
        if not isinstance(spec, PartitionSpec):
            continue
        matched = [name for name in names if matches(pattern.replace("/", "."), name)]
        if not matched:
            raise ValueError(
                f"parallel: expected patterns of modules or parameters, but {pattern!r} matches none of "
                f"{list(shapes)[:12]}"
            )
        for name in matched:
            for below in _parameters(name, names[name], names, shapes):
                for dimension, entry in enumerate(spec):
                    for axis in entry if isinstance(entry, tuple) else (entry,):
                        if axis is not None and (axis not in mesh.axis_names or not is_model_axis(axis)):
                            raise ValueError(
                                f"parallel: {pattern!r}: expected model axes of the mesh "
                                f"{list(ModelAxes.of(mesh).names)}, got {axis!r}"
                            )
                        if axis is not None:
                            yield names[below], Cut(axis, dimension)


def _roles(model: nnx.Module) -> dict[str, str]:
    """The role of each parameter: "convolution", "embedding", "bias" or "kernel"."""
    roles = {}
    for key, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param):
                roles[joined((*key, name))] = _role(module, name)
        if isinstance(module, nnx.List):
            for number, value in enumerate(module):
                if isinstance(value, nnx.Param):
                    roles[joined((*key, number))] = "kernel"
        if given_node(module, meta.AxisMetadata) is not None:
            roles[joined((*key, "value"))] = _role(module, str(key[-1]))
    return {path: roles.get(path, "kernel") for path in parameter_leaves(model)}


def _role(module: nnx.Module, name: str) -> str:
    if name in ("bias", "embedding"):
        return name
    return "convolution" if isinstance(module, nnx.Conv | nnx.ConvTranspose) else "kernel"


def _dimension(entry: ParallelPolicy, role: str, ndim: int) -> int | None:
    """The dimension of a parameter that an entry cuts; None for a parameter that stays whole."""
    if entry.dimension is not None:
        return entry.dimension if entry.dimension < ndim else None
    assert entry.style is not None
    return styled_dimension(entry.style, role, ndim)


def warn_of_annotations(model: nnx.Module, annotated: Mapping[str, Any] | None = None) -> None:
    """Warn with ``RuntimeWarning`` about parameters, by path, whose annotations name an axis without effect.

    ``annotated``: names by path; None: all parameters with an axis name for one of their dimensions.
    """
    if annotated is None:
        listed = (*_of_variables(model, {}), *_of_boxes(model, {}))
        annotated = {path: names for path, names in listed if _names_an_axis(names)}
    if not annotated:
        return
    shown = first_of([f"{path!r} {names}" for path, names in annotated.items()])
    warn_caller(
        f"model: {len(annotated)} parameters have sharding annotations that have no effect: {shown}; jax_impl cuts "
        "parameters over the data-parallel axes of the mesh, and over its model axes (tp, ep, ...) if annotations "
        "name these. Remove the annotations, so that nothing relies on them: omit nnx.with_partitioning, or pass "
        "flax.linen.meta.unbox(params)",
        RuntimeWarning,
    )


def annotations_of(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Path and axis names of each annotated parameter, with logical names replaced by flax's rules.

    The rules come from the variable or box, or from an enclosing ``flax.linen.logical_axis_rules``.
    """
    rules = dict(get_logical_axis_rules())
    for path, names in _of_variables(model, rules):
        if _names_an_axis(names):
            yield path, names
    for path, names in _of_boxes(model, rules):
        if _names_an_axis(names):
            yield f"{path}/value" if path else "value", names


def _of_variables(model: nnx.Module, rules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        metadata = variable.get_metadata()
        # A NamedSharding stores its names in a spec.
        names = metadata.get("out_sharding")
        names = getattr(names, "spec", names)
        yield (joined(path), _replaced(names, {**rules, **dict(metadata.get("sharding_rules") or ())}))


def _of_boxes(model: nnx.Module, rules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, module in nnx.iter_modules(model):
        box = given_node(module, meta.AxisMetadata)
        if box is not None:
            own = {**rules, **dict(getattr(box, "rules", None) or ())}
            yield joined(path), _replaced(getattr(box, "names", None), own)


def _replaced(names: Any, rules: Mapping[str, Any]) -> Any:
    if names is None or not rules:
        return names
    return tuple(rules.get(name, name) if isinstance(name, str) else name for name in names)


def _names_an_axis(names: Any) -> bool:
    return names is not None and any(name is not None for name in names)
