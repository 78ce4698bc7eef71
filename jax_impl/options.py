"""Resolve keywords or a policy into the options of each unit."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from bridge.core.sharding import (
    DEFAULT_ALIGN,
    Align,
    Granularity,
    Placements,
    PolicyError,
    ShardingPolicy,
    Strategy,
    UnitPolicy,
    check_align,
    check_axes,
    strategy_named,
)
from bridge.core.sharding.policy.precision_policy import GIVEN
from bridge.core.sharding.policy.recompute import SELECTIVE, Recompute, is_recompute
from bridge.core.sharding.policy.strategy import Engine, StrategyName
from jax_impl.comm.mesh import DataParallelMesh, checked_mesh, data_parallel_mesh
from jax_impl.modules.module_tree import ROOT, joined, matches, module_paths, parameter_leaves
from jax_impl.modules.repeated_blocks import repeated_blocks
from jax_impl.runtime.groups.precision import Precision
from jax_impl.runtime.groups.variables import Rules

Chosen = Sequence[str] | Callable[[tuple[Any, ...], Any], bool] | type[nnx.Variable]
"""Path patterns of parameters, or an nnx filter."""


class ShardingOptions(TypedDict, total=False):
    """Keywords of ``fully_shard`` and ``plan_sharding``.

    strategy: see ``bridge.core.sharding.policy.strategy``; default "optim_grads_params", which is HSDP on two axes.
    placements: the strategy spelled out for each mesh axis, instead of a strategy name.
    units: patterns of module paths, matched part by part ("layers/*"). Each matching module becomes a unit, and the
        root owns the rest. Default: the blocks that the model repeats (``layers/*``, ``blocks/*``, ``h/*``,
        ``Block_*``, ...; ``modules/repeated_blocks.py`` has the rule). ``[]`` makes the root the only unit.
    param_dtype, reduce_dtype, grad_dtype: "bfloat16", ``jnp.bfloat16``; see ``Precision``.
    main_dtype: the dtype of trainable weights at rest. Default: "float32", which keeps float64 parameters as float64.
        "bfloat16" and "float16" apply to all weights, which are rounded once, when they are sharded. "float64" needs a
        float64 model. None keeps each parameter's own dtype.
    gather_dtype: "mxfp8" or "float8_e4m3fn": matrices and stacks of matrices are quantized for the gather; see
        ``Precision``.
    granularity: one value for all parameters, or values by parameter path, such as ``{"layers/0/mlp/up/kernel":
        "block(32)"}``; other paths then use rows. ``rows``: the rows of a "block". See ``plan_layout``.
    align: in the shard_map engine, every shard is a multiple of this many elements; or "auto". See ``plan_layout``.
    recompute: units save only their inputs, and backward computes their activations again. The root does this only if a
        policy says so; then everything inside runs forward once more. "dots_saveable" or
        "dots_with_no_batch_dims_saveable", names of ``jax.checkpoint_policies``: such products are saved, too.

    With a policy, only ``units`` and the following options are allowed. ``units`` replaces the policy's own patterns,
    and ``prefetch`` the policy's value:

    stacked: paths of modules whose parameters have a leading axis over equal layers that the model scans, or maps as
        members of an ensemble. Default: nnx modules named by units like "layers/*" are recognized if flax's own layers
        inside show the axis. Other modules, and all modules of pytrees and linen, must be named.
    parallel: the parameters that model axes of the mesh cut: for each pattern of modules or parameters
        ("layers/*/mlp/up") a style ("colwise", "rowwise" or "expert") or a ``PartitionSpec`` of a layer's dimensions;
        see ``modules/partitioning.py``. Replaces the entries of a policy.
    frozen: parameters without gradient and moments, in their own dtype, which may be an integer dtype or bool: patterns
        of parameter paths ("embed/*"), or an nnx filter.
    replicated: parameters that every device holds whole, as with "no_shard", for any strategy of their unit. They are
        never gathered; their gradients are averaged, and their moments are also whole. Named like ``frozen``. A
        parameter that is both replicated and frozen is what other libraries call ignored: only the user's program
        changes or sends it.
    variables: how a variable that is not a parameter is combined over devices ("shard_map"), by pattern of paths or
        type: ``{"codebook/counts": "sum"}``; "mean", "sum" (of the increments from rows), "max", or "rows" (one row per
        row of the batch, cut like the batch). See ``runtime/groups/variables.py``.
    engine: "shard_map" or "pjit".
    prefetch: 1 lets a unit's gather run during the computation of the previous unit, and reductions during later
        computation, at the cost of a second unit's weights and gradients in memory; 0 lets nothing run during a
        transfer. None: the policy's value; else 1 on accelerators, and 0 on simulated devices, where prefetch saves no
        time. See ``runtime/unit/order.py``, and ``runtime/program/pipeline.py`` for scanned layers.
    """

    strategy: StrategyName
    placements: Placements
    units: Sequence[str]
    main_dtype: DTypeLike | None
    param_dtype: DTypeLike | None
    reduce_dtype: DTypeLike | None
    grad_dtype: DTypeLike | None
    gather_dtype: DTypeLike | None
    granularity: Granularity
    rows: int
    align: Align
    recompute: Recompute
    stacked: Sequence[str]
    parallel: Mapping[str, str | PartitionSpec]
    frozen: Chosen
    replicated: Chosen
    variables: Rules
    engine: Engine
    prefetch: int | None


_BESIDE_A_POLICY = ("units", "stacked", "parallel", "frozen", "replicated", "variables", "engine", "prefetch")


@dataclass(frozen=True)
class UnitOptions:
    """The options of one unit."""

    strategy: Strategy
    recompute: Recompute
    granularity: Granularity
    rows: int = 1
    align: Align = DEFAULT_ALIGN


@dataclass(frozen=True)
class Resolved:
    """Mesh, precision, options by unit path (including the root), and paths of parameters."""

    mesh: Mesh
    precision: Precision
    units: Mapping[str, UnitOptions]
    frozen: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()


def unit_patterns(policy: ShardingPolicy | None, options: ShardingOptions) -> list[str]:
    """The requested patterns of module paths, or the usual ones if none are requested."""
    if "units" in options:
        return list(options["units"])
    if policy is not None:
        return [unit.match.replace(".", "/") for unit in policy.units]
    return ["layers/*", "blocks/*", "h/*"]


def resolve(
    model: nnx.Module,
    stacks: Mapping[str, int],
    mesh: Mesh | None,
    policy: ShardingPolicy | None,
    options: ShardingOptions,
) -> Resolved:
    """Resolve the options. Raises ``ValueError`` for options that do not fit the model, the mesh or each other."""
    frozen = chosen_parameters(model, options.get("frozen", ()), "frozen")
    replicated = chosen_parameters(model, options.get("replicated", ()), "replicated")
    paths = module_paths(model, stacks)
    if policy is None:
        if mesh is None:
            raise ValueError("fully_shard: expected a mesh, or a policy with a mesh, got neither")
        resolved = _by_keywords(checked_mesh(mesh), model, paths, options)
    else:
        keywords = [name for name in options if name not in _BESIDE_A_POLICY]
        if keywords:
            raise ValueError(f"fully_shard: expected a policy or keywords, got a policy and {keywords}")
        trained = {path: value for path, value in parameter_leaves(model).items() if path not in frozen}
        _check_main(policy, {path: value.dtype for path, value in trained.items()})
        resolved = _by_policy(policy, mesh, paths, options.get("units"))
    return replace(resolved, frozen=frozen, replicated=replicated)


def _by_keywords(
    mesh: Mesh, model: nnx.Module, paths: Mapping[str, str], options: ShardingOptions
) -> Resolved:
    placements = options.get("placements")
    if placements is None:
        strategy = strategy_named(options.get("strategy", "optim_grads_params"))
    elif "strategy" in options:
        raise ValueError(f"expected strategy or placements, got both ({options['strategy']!r}, {placements})")
    else:
        strategy = placements.strategy
    check_axes(strategy, placements, DataParallelMesh.of(mesh).ndim)
    check_align(options.get("align", DEFAULT_ALIGN))
    recompute = options.get("recompute", False)
    if not is_recompute(recompute):
        raise ValueError(
            f"recompute: expected True, False or one of {', '.join(SELECTIVE)}, got {recompute!r}; to save other "
            "activations, use jax.checkpoint with a policy inside the model's units"
        )
    unit = UnitOptions(
        strategy,
        recompute,
        options.get("granularity", "row"),
        options.get("rows", 1),
        options.get("align", DEFAULT_ALIGN),
    )
    precision = Precision.of(
        options.get("param_dtype"),
        options.get("reduce_dtype"),
        options.get("grad_dtype"),
        options.get("gather_dtype"),
        options.get("main_dtype", "float32"),
    )
    patterns = options.get("units")
    dotted = _repeated(model, paths) if patterns is None else _matching(paths, patterns)
    chosen = dict.fromkeys(dotted, unit)
    # Recomputing the root would run the whole model's forward a third time.
    root = replace(unit, recompute=False)
    return Resolved(mesh, precision, {**_by_module(chosen, paths), ROOT: root})


def _repeated(model: nnx.Module, paths: Mapping[str, str]) -> list[str]:
    blocks = repeated_blocks(paths, parameter_leaves(model))
    if not blocks:
        raise ValueError(
            "units: expected a model with repeated blocks, such as layers/0, layers/1 or Block_0, Block_1, got modules "
            f"{_some(paths)}: choose units=[patterns of these paths], or units=[] for a single unit"
        )
    return blocks


def _some(paths: Mapping[str, str]) -> list[str]:
    return sorted(path.replace(".", "/") for path in paths if path)[:12]


def _matching(paths: Mapping[str, str], patterns: Sequence[str]) -> list[str]:
    if isinstance(patterns, str):
        raise ValueError(f"units: expected a list of patterns, got {patterns!r}: use [{patterns!r}]")
    if len(set(patterns)) != len(patterns):
        raise ValueError(f"units: expected each pattern once, got {list(patterns)}")
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matched = [path for path in paths if path and matches(path.replace(".", "/"), pattern)]
        if not matched:
            raise ValueError(
                f"units: expected patterns of module paths, but {pattern!r} matches none of {_some(paths)}"
            )
        chosen.update(dict.fromkeys(matched))
    return list(chosen)


def _by_policy(
    policy: ShardingPolicy, mesh: Mesh | None, paths: Mapping[str, str], patterns: Sequence[str] | None
) -> Resolved:
    if mesh is None:
        mesh = data_parallel_mesh(policy.mesh_sizes(len(jax.devices())))
    mesh = checked_mesh(mesh)
    expected = policy.mesh_sizes(mesh.devices.size)
    if dict(mesh.shape) != expected:
        raise PolicyError(f"{policy.source}: [mesh]: expected a mesh of {expected}, got {dict(mesh.shape)}")
    asked = policy.precision
    main = None if asked.main == GIVEN else asked.main
    precision = Precision(asked.compute, asked.reduce, asked.grad, asked.gather, main)
    if patterns is None:
        policies = _of_policy(policy, paths)
    else:
        unit, root = _unit_and_root(policy)
        policies = {**dict.fromkeys(_matching(paths, patterns), unit), ROOT: root}
    units = {
        path: UnitOptions(unit.chosen, unit.recompute, unit.granularity, align=policy.align_of(unit))
        for path, unit in policies.items()
    }
    # A root that is a list or dictionary is not among the paths, but is still a unit.
    return Resolved(mesh, precision, {**_by_module(units, paths), ROOT: units[ROOT]})


def _check_main(policy: ShardingPolicy, trained: Mapping[str, np.dtype]) -> None:
    """Raise ``PolicyError`` for trainable parameters from which the policy's main weights cannot be made."""
    main = policy.precision.main
    for path, dtype in trained.items():
        # Parameters that are not floating point are refused elsewhere.
        if main == GIVEN or not jnp.issubdtype(dtype, jnp.floating):
            continue
        if (main == "float64") != (dtype == np.float64):
            raise PolicyError(
                f"{policy.source}: [precision] main: expected parameters for {main} main weights, got {dtype} for "
                f"{path!r}"
            )


def _of_policy(policy: ShardingPolicy, paths: Mapping[str, str]) -> Mapping[str, UnitPolicy]:
    try:
        return policy.units_of(paths)
    except PolicyError as error:
        raise PolicyError(f'{error}; units=["blocks/*"] with a policy replaces its patterns') from None


def _unit_and_root(policy: ShardingPolicy) -> tuple[UnitPolicy, UnitPolicy]:
    """The policy's options for all units, and for the root."""
    root = next(unit for unit in policy.units if not unit.match)
    policies = {replace(unit, match=""): unit for unit in policy.units if unit.match}
    if len(policies) > 1:
        raise PolicyError(
            f"{policy.source}: expected one kind of [[unit]] in addition to the root's if units= gives the patterns, "
            f"got {len(policies)} kinds, for {', '.join(repr(unit.match) for unit in policies.values())}: change the "
            "matches in a copy of the policy"
        )
    return next(iter(policies.values()), root), root


def _by_module(units: Mapping[str, UnitOptions], paths: Mapping[str, str]) -> dict[str, UnitOptions]:
    """Options by path in the model. A stack's layers are one module, so they must be units of one kind, or none."""
    by_path: dict[str, UnitOptions | None] = {}
    first: dict[str, str] = {}
    for dotted, path in paths.items():
        options = units.get(dotted)
        if path in by_path and by_path[path] != options:
            raise ValueError(
                f"units: expected one policy for all layers of the stack {path!r}, since they are scanned, got "
                f"{_words(by_path[path])} for {first[path]!r} and {_words(options)} for {dotted!r}"
            )
        by_path[path] = options
        first.setdefault(path, dotted)
    return {path: options for path, options in by_path.items() if options is not None}


def _words(options: UnitOptions | None) -> str:
    if options is None:
        return "no unit"
    return f"{options.strategy.name}, {options.granularity}, align {options.align}"


def within(options: UnitOptions, parameters: Iterable[str], names: Mapping[str, str]) -> UnitOptions:
    """The options with granularities of only these ``parameters``, by their ``names`` in a layout."""
    granularity = options.granularity
    if not isinstance(granularity, Mapping):
        return options
    chosen = {names[path]: granularity[path] for path in parameters if path in granularity}
    return replace(options, granularity=chosen)


def chosen_parameters(model: nnx.Module, chosen: Chosen, option: str) -> frozenset[str]:
    """Paths of parameters. Raises ``ValueError`` that names the ``option`` if a pattern or a filter matches nothing.

    Raises ``TypeError`` for anything except patterns or a filter.
    """
    if isinstance(chosen, str):
        raise TypeError(
            f"{option}: expected a list of patterns, or an nnx filter, got one string: use [{chosen!r}]"
        )
    if callable(chosen) or isinstance(chosen, type):
        chooses = nnx.filterlib.to_predicate(chosen)
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        taken = frozenset(joined(key) for key, variable in flat if chooses(key, variable))
        if not taken:
            raise ValueError(
                f"{option}: expected a filter of parameters, but {chosen!r:.120} matches none of "
                f"{[joined(key) for key, _ in flat][:12]}; omit the option to choose none"
            )
        return taken
    patterns: tuple[Any, ...] = tuple(chosen) if isinstance(chosen, Iterable) else (chosen,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{option}: expected a list of patterns, or an nnx filter, got {chosen!r}")
    parameters = list(parameter_leaves(model))
    paths: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(parameters, pattern)
        if not matching:
            raise ValueError(
                f"{option}: expected patterns of parameter paths, but {pattern!r} matches none of {parameters[:12]}"
            )
        paths.update(matching)
    return frozenset(paths)
