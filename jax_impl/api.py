"""``fully_shard`` turns a flax nnx model or a pytree into a plan and main weights; ``unshard`` turns them back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from bridge.core.callers import warn_caller
from bridge.core.sharding import ShardingPolicy
from bridge.core.sharding.policy.recompute import why_not_around
from bridge.core.sharding.policy.strategy import ENGINES
from jax_impl.comm.mesh import DataParallelMesh, check_context, is_simulated
from jax_impl.grouping import groups_of
from jax_impl.modules.module_tree import (
    parameter_leaves,
    split_units,
    variable_infos,
    variable_leaves,
    whole_model,
)
from jax_impl.modules.partitioning import cuts_of
from jax_impl.modules.stack import recognized_stacks, stack_lengths
from jax_impl.modules.tree_model import Tree, as_module
from jax_impl.options import ShardingOptions, UnitOptions, resolve, unit_patterns
from jax_impl.runtime.groups.cut_group import CutGroup
from jax_impl.runtime.groups.logical_group import Group
from jax_impl.runtime.groups.memory_kinds import on_device
from jax_impl.runtime.groups.precision import is_integer
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan, UnitPlan
from jax_impl.runtime.groups.variables import with_rules
from jax_impl.train_state import TrainState, whole_variables

_SHARE_TO_WARN_OF = 0.01


def fully_shard(
    model: nnx.Module | Tree,
    mesh: Mesh | None = None,
    policy: ShardingPolicy | str | Path | None = None,
    **options: Unpack[ShardingOptions],
) -> tuple[ShardingPlan, Buffers]:
    """Shard ``model`` over a mesh; return the plan and the main weights.

    ``mesh``: one or two data-parallel axes, then at most two model axes. The model axes cut the parameters that the
    model's annotations, the policy or ``parallel=`` name (``modules/partitioning.py``).

    ``model``: an nnx module, or a pytree of parameters, whose units a loss then calls by ``call_unit``; the model is
    read, not changed. ``policy``: a ``ShardingPolicy``, a policy file or the name of a shipped policy; it gives the
    mesh if ``mesh`` is None. Without a policy the keywords say how to shard, see ``ShardingOptions``.

    Raises ``TypeError`` for unknown keywords, and for ``frozen`` and ``replicated`` of a wrong type; ``ValueError`` for
    contradicting options, a mesh that does not fit, a pattern that matches nothing, tied weights in different units,
    and trainable parameters that are not floating point or have only 8 bits.

    Warns with ``RuntimeWarning`` if parameters have sharding annotations (``nnx.with_partitioning``, linen's
    ``nn.Partitioned``) that name no model axis and therefore have no effect.
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
    cuts = cuts_of(model, stacks, resolved.mesh, policy, options.get("parallel"))
    modules = split_units(model, list(resolved.units), stacks)
    known = {path for module in modules.values() for path in module.parameters}
    _check_granularities(resolved.units.values(), known)
    units = {}
    for path, module in modules.items():
        unit = resolved.units[path]
        if module.inner and (reason := why_not_around(unit.recompute, path, next(iter(module.inner)))):
            raise ValueError(reason)
        groups = groups_of(module, unit, resolved, cuts, engine)
        units[path] = UnitPlan(module, unit.strategy, unit.recompute, groups)
    axes = DataParallelMesh.of(resolved.mesh)
    data_ranks = axes.shards(axes.ndim)
    plan = ShardingPlan(
        resolved.mesh,
        engine,
        units,
        whole_model(model),
        with_rules(variable_infos(model), options.get("variables", {}), list(stacks), data_ranks),
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
            f"pjit engine: {len(plan.whole_parameters)} of {len(sizes)} parameters ({share:.0%} of the elements) have "
            "no dimension that the number of shards divides, so every device holds them whole: "
            f'{plan.whole_parameters[:5]}, see plan.whole_parameters; engine="shard_map" shards any shape',
            RuntimeWarning,
        )


def _check_granularities(units: Iterable[UnitOptions], known: set[str]) -> None:
    for options in units:
        if isinstance(options.granularity, Mapping):
            unknown = [path for path in options.granularity if path not in known]
            if unknown:
                raise ValueError(f"granularity: expected paths of the model's parameters, got {unknown[:5]}")


def shard_weights(plan: ShardingPlan, parameters: Mapping[str, jax.Array]) -> Buffers:
    """Main-weight arrays that hold ``{path: value}``; each device receives only its own shard.

    Floating-point values are cast to the dtype of the main weights, rounded to nearest even. Raises ``ValueError`` that
    names a parameter that is missing, has another shape, or does not fit the plan's integer or bool dtype.
    """
    values: dict[str, np.ndarray] = {}
    for path, info in plan.parameters.items():
        if path not in parameters or parameters[path].shape != info.shape:
            shape = f"shape {parameters[path].shape}" if path in parameters else "none"
            raise ValueError(f"parameter {path!r}: expected values of shape {info.shape}, got {shape}")
        if isinstance(parameters[path], jax.ShapeDtypeStruct):
            raise ValueError(f"parameter {path!r}: expected values, got a shape: plan_sharding takes shapes")
        values[path] = np.asarray(parameters[path])
        if is_integer(info.dtype) and not np.array_equal(values[path], values[path].astype(info.dtype)):
            raise ValueError(
                f"parameter {path!r}: expected values that {info.dtype} can represent, got {values[path].dtype} "
                "values that it cannot"
            )

    def read(path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        return values[path][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    return {key: plan.build_buffer(key, read) for key in plan.arrays}


def unshard(plan: ShardingPlan, buffers: Buffers | TrainState) -> dict[str, jax.Array]:
    """``{path: value}``, whole and replicated on every device, from arrays such as ``state.weights``.

    Gradients and moments contain no frozen parameters, so the result contains none. For a train state the result
    contains its weights and the model's other variables (batch statistics, random streams); ``plan.merge`` takes both.
    """
    check_context()
    if isinstance(buffers, TrainState):
        return {**unshard(plan, buffers.weights), **whole_variables(plan, buffers.variables)}
    whole: dict[str, jax.Array] = {}
    for group in plan.groups:
        if all(key in buffers for key in group.stored):
            # One group at a time: see forward.hold. Each group is gathered by a separate program, so that waiting for
            # one puts its collectives before the collectives of the next.
            arrays = tuple(buffers[key] for key in group.stored)
            leaves = jax.block_until_ready(_gathered(arrays, group, plan.replicated))
            whole.update(zip(group.paths, leaves, strict=True))
    return {path: whole[path] for path in plan.parameters if path in whole}


@partial(jax.jit, static_argnames=("group", "replicated"))
def _gathered(
    arrays: tuple[jax.Array, ...], group: Group, replicated: NamedSharding
) -> tuple[jax.Array, ...]:
    arrays = on_device(arrays)
    if isinstance(group, CutGroup):
        return jax.lax.with_sharding_constraint(group.logical(arrays), replicated)
    return group.logical(tuple(jax.lax.with_sharding_constraint(array, replicated) for array in arrays))
