"""``fully_shard``: from a flax nnx model, or a pytree, to a plan and its main weights; and back."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from bridge.callers import warn_caller
from bridge.sharding import ShardingPolicy, Strategy, plan_layout
from bridge.sharding.recompute import why_not_around
from jax_impl.comm.collectives import Wire
from jax_impl.comm.mesh import DataParallelMesh, is_simulated, is_tpu
from jax_impl.modules.annotations import warn_of_annotations
from jax_impl.modules.module_tree import (
    UnitModule,
    parameter_leaves,
    split_units,
    variable_infos,
    variable_leaves,
    whole_model,
)
from jax_impl.modules.stack_lengths import recognized_stacks, stack_lengths
from jax_impl.modules.tree_model import Tree, as_module
from jax_impl.options import Frozen, ShardingOptions, UnitOptions, resolve, unit_patterns, within
from jax_impl.runtime.flat_group import FlatGroup
from jax_impl.runtime.logical_group import LogicalGroup, logical_array
from jax_impl.runtime.memory_kinds import on_device
from jax_impl.runtime.precision import Precision, main_dtype
from jax_impl.runtime.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.unit_plan import Group, UnitPlan
from jax_impl.train_state import TrainState

ENGINES = ("shard_map", "pjit")
_SHARE_TO_WARN_OF = 0.01


def fully_shard(
    model: nnx.Module | Tree,
    mesh: Mesh | None = None,
    policy: ShardingPolicy | str | Path | None = None,
    **options: Unpack[ShardingOptions],
) -> tuple[ShardingPlan, Buffers]:
    """Shard ``model`` over a mesh of one or two data-parallel axes: the plan, and the main weights in it.

    ``model``: an nnx module, or a pytree of parameters, in which a loss then finds units as what ``call_unit`` takes;
    it is read, not changed. ``policy``: a ``ShardingPolicy``, or a file or shipped name of one; it gives the mesh where
    none is given. Without one the keywords say what is wanted, see ``ShardingOptions``.

    Raises ``ValueError`` for unknown or contradicting options, a mesh that does not fit, a pattern that matches
    nothing, tied weights in different units, parameters that are not floating point, and trainable ones of 8 bits.

    Warns with ``RuntimeWarning`` of parameters with sharding annotations (``nnx.with_partitioning``, linen's
    ``nn.Partitioned``), which have no effect.
    """
    model = as_module(model)
    plan = replace(plan_sharding(model, mesh, policy, **options), given_variables=variable_leaves(model))
    return plan, shard_weights(plan, parameter_leaves(model))


def plan_sharding(
    model: nnx.Module | Tree,
    mesh: Mesh | None = None,
    policy: ShardingPolicy | str | Path | None = None,
    **options: Unpack[ShardingOptions],
) -> ShardingPlan:
    """``fully_shard`` without values: ``model`` may be abstract, from ``nnx.eval_shape`` or ``jax.eval_shape``."""
    unknown = sorted(options.keys() - ShardingOptions.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"fully_shard: expected keywords among {list(ShardingOptions.__annotations__)}, got {unknown}"
        )
    model = as_module(model)
    warn_of_annotations(model)
    engine = options.get("engine", "shard_map")
    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if policy is not None and not isinstance(policy, ShardingPolicy):
        policy = ShardingPolicy.load(policy)
    if "stacked" in options:
        stacks = stack_lengths(model, options["stacked"])
    else:
        stacks = recognized_stacks(model, unit_patterns(policy, options))
    resolved = resolve(model, stacks, mesh, policy, options)
    modules = split_units(model, list(resolved.units), stacks)
    known = {path for module in modules.values() for path in module.parameters}
    _check_granularities(resolved.units.values(), known)
    frozen = _frozen_paths(model, options.get("frozen", ()))
    units = {}
    for path, module in modules.items():
        unit = resolved.units[path]
        if module.inner and (reason := why_not_around(unit.recompute, path, next(iter(module.inner)))):
            raise ValueError(reason)
        wired = _wired(resolved.mesh, resolved.precision, module, frozen)
        groups = tuple(_groups(module, unit, wired, resolved.mesh if engine == "pjit" else None))
        units[path] = UnitPlan(module, unit.strategy, unit.recompute, groups)
    plan = ShardingPlan(
        resolved.mesh,
        engine,
        units,
        whole_model(model),
        variable_infos(model),
        prefetch=_prefetch(options.get("prefetch"), policy, resolved.mesh),
    )
    _warn_of_whole_parameters(plan)
    return plan


def _prefetch(asked: int | None, policy: ShardingPolicy | None, mesh: Mesh) -> int:
    if asked is None and policy is not None:
        asked = policy.prefetch
    if asked is None:
        return 0 if is_simulated(mesh) else 1
    if type(asked) is not int or asked not in (0, 1):
        raise ValueError(f"prefetch: expected 0, 1 or None (the default), got {asked!r}")
    return asked


def _warn_of_whole_parameters(plan: ShardingPlan) -> None:
    sizes = {path: math.prod(info.shape) for path, info in plan.parameters.items()}
    share = sum(sizes[path] for path in plan.whole_parameters) / max(1, sum(sizes.values()))
    if share > _SHARE_TO_WARN_OF:
        warn_caller(
            f"pjit engine: no dimension of {len(plan.whole_parameters)} of {len(sizes)} parameters, {share:.0%} of the "
            f"elements, divides by the number of shards, so they are whole everywhere: {plan.whole_parameters[:5]}, "
            'see plan.whole_parameters; engine="shard_map" shards any shape',
            RuntimeWarning,
        )


def _groups(
    module: UnitModule,
    options: UnitOptions,
    wired: Mapping[tuple[bool, Wire], Sequence[int]],
    mesh: Mesh | None,
) -> Iterator[Group]:
    """Flat groups, or logical ones on ``mesh``."""
    for (trainable, wire), own in wired.items():
        paths = tuple(module.parameters[i] for i in own)
        shapes = [module.shapes[i] for i in own]
        if mesh is not None:
            yield _logical_group(module, paths, shapes, options.strategy, wire, trainable, mesh)
            continue
        names = dict(zip(paths, (module.names[i] for i in own), strict=True))
        chosen = within(options, paths, names)
        layout = plan_layout(
            dict(zip(names.values(), shapes, strict=True)),
            wire.axes.shards(options.strategy.optimizer),
            granularity=chosen.granularity,
            rows=chosen.rows,
            align=chosen.align,
        )
        kept = "" if wire.main == np.float32 else f", {wire.main.name}"
        key = module.path if trainable else f"{module.path} (frozen{kept})"
        yield FlatGroup(key, module.path, paths, layout, wire, options.strategy, trainable, module.layers)


def _logical_group(
    module: UnitModule,
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    strategy: Strategy,
    wire: Wire,
    trainable: bool,
    mesh: Mesh,
) -> LogicalGroup:
    stack = () if module.layers is None else (module.layers,)
    arrays = tuple(
        logical_array(path, (*stack, *shape), wire, strategy, module.layers)
        for path, shape in zip(paths, shapes, strict=True)
    )
    return LogicalGroup(module.path, arrays, mesh, wire, strategy, trainable, module.layers)


def _wired(
    mesh: Mesh, precision: Precision, module: UnitModule, frozen: frozenset[str]
) -> dict[tuple[bool, Wire], list[int]]:
    """The numbers of a unit's parameters by group: the trainable one, then a frozen one of each dtype."""
    mains: dict[tuple[bool, np.dtype], list[int]] = {}
    for i, (path, dtype) in enumerate(zip(module.parameters, module.dtypes, strict=True)):
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 8:
            raise ValueError(f"parameter {path!r}: expected a floating dtype of 8 bits or more, got {dtype}")
        trainable = path not in frozen
        if trainable and jnp.finfo(dtype).bits < 16:
            raise ValueError(
                f"parameter {path!r}: expected 16 bits or more for a parameter that is trained, got {dtype}: freeze it "
                f"(frozen=[{path!r}]), which keeps it as it is, or give it as float32"
            )
        mains.setdefault((trainable, main_dtype(dtype) if trainable else dtype), []).append(i)
    trained = {dtype: module.parameters[own[0]] for (trainable, dtype), own in mains.items() if trainable}
    if len(trained) > 1:
        found = ", ".join(f"{dtype} for {path!r}" for dtype, path in trained.items())
        raise ValueError(f"unit {module.path!r}: expected main weights of one dtype, got {found}")
    return {
        (trainable, _wire(mesh, precision, main)): mains[trainable, main]
        for trainable, main in sorted(mains, key=lambda kind: not kind[0])
    }


def _wire(mesh: Mesh, precision: Precision, main: np.dtype) -> Wire:
    dtypes = (main, precision.compute(main), precision.reduce(main), precision.grad(main))
    return Wire(DataParallelMesh.of(mesh), *dtypes, in_rows=is_tpu(mesh))


def _check_granularities(units: Iterable[UnitOptions], known: set[str]) -> None:
    for options in units:
        if isinstance(options.granularity, Mapping):
            unknown = [path for path in options.granularity if path not in known]
            if unknown:
                raise ValueError(f"granularity: expected paths of the model's parameters, got {unknown[:5]}")


def _frozen_paths(model: nnx.Module, frozen: Frozen) -> frozenset[str]:
    """Raises ``ValueError`` for a pattern that matches no parameter."""
    parameters = list(parameter_leaves(model))
    if callable(frozen) or isinstance(frozen, type):
        matches = nnx.filterlib.to_predicate(frozen)
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return frozenset("/".join(map(str, key)) for key, variable in flat if matches(key, variable))
    found: set[str] = set()
    for pattern in frozen:
        matching = fnmatch.filter(parameters, pattern)
        if not matching:
            raise ValueError(
                f"frozen: expected patterns of parameter paths, but {pattern!r} matches none of {parameters[:12]}"
            )
        found.update(matching)
    return frozenset(found)


def shard_weights(plan: ShardingPlan, parameters: Mapping[str, jax.Array]) -> Buffers:
    """Main-weight arrays holding ``{path: value}``; each device receives its own shard only.

    Raises ``ValueError`` naming a parameter that is missing or has another shape.
    """
    values: dict[str, np.ndarray] = {}
    for path, info in plan.parameters.items():
        if path not in parameters or parameters[path].shape != info.shape:
            found = f"shape {parameters[path].shape}" if path in parameters else "none"
            raise ValueError(f"parameter {path!r}: expected values of shape {info.shape}, got {found}")
        if isinstance(parameters[path], jax.ShapeDtypeStruct):
            raise ValueError(f"parameter {path!r}: expected values, got a shape: plan_sharding needs no more")
        values[path] = np.asarray(parameters[path])

    def read(path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        return values[path][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    return {key: plan.build_buffer(key, read) for key in plan.arrays}


def unshard(plan: ShardingPlan, buffers: Buffers | TrainState) -> dict[str, jax.Array]:
    """``{path: value}``, whole and replicated on every device, from arrays such as ``state.weights``.

    Gradients and moments have no frozen parameters, and so the result has none. Of a train state: its weights, and what
    else the model has (batch statistics, random streams), which ``plan.merge`` takes apart again.
    """
    if isinstance(buffers, TrainState):
        return {**unshard(plan, buffers.weights), **buffers.variables}
    whole: dict[str, jax.Array] = {}
    for unit in plan.units.values():
        for group in unit.groups:
            if all(key in buffers for key in group.stored):
                # One group at a time: see forward.hold.
                arrays = tuple(buffers[key] for key in group.stored)
                leaves = jax.block_until_ready(_gathered(arrays, group, plan.replicated))
                whole.update(zip(group.paths, leaves, strict=True))
    return {path: whole[path] for path in plan.parameters if path in whole}


@partial(jax.jit, static_argnames=("group", "replicated"))
def _gathered(
    arrays: tuple[jax.Array, ...], group: Group, replicated: NamedSharding
) -> tuple[jax.Array, ...]:
    return group.logical(
        tuple(jax.lax.with_sharding_constraint(array, replicated) for array in on_device(arrays))
    )
