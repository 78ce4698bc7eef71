"""``fully_shard``: from a flax nnx model to a plan and its main weights; and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jax_impl.buffer import unpack
from jax_impl.collective import Wire
from jax_impl.granularity import Granularity
from jax_impl.layout import Layout, plan_layout
from jax_impl.mesh import checked_mesh
from jax_impl.module_tree import UnitModule, parameter_leaves, split_units, whole_model
from jax_impl.plan import Buffers, ShardingPlan, UnitPlan
from jax_impl.precision import Precision, main_dtype
from jax_impl.strategy import strategy_named


def fully_shard(
    model: nnx.Module,
    mesh: Mesh,
    *,
    strategy: str = "optim_grads_params",
    units: Sequence[str] = ("layers/*",),
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    granularity: Granularity = "row",
    rows: int = 1,
) -> tuple[ShardingPlan, Buffers]:
    """Shard ``model`` over the ``"dp"`` axis of ``mesh``: the plan, and the main weights in it.

    The model itself is read, not changed. ``units`` are patterns of module paths; each matching module becomes a unit
    of its own, and the root owns what is left. ``granularity``: one for all parameters, or by parameter path, such as
    ``{"layers/0/mlp/up/kernel": "block(32)"}``, where paths left out have rows. Precisions: see ``Precision``; layouts:
    see ``plan_layout``.

    Raises ``ValueError`` for an unknown strategy, dtype, granularity or parameter path, a mesh without exactly the axis
    ``"dp"``, a pattern that matches nothing, tied weights in different units, and variables that are no floating
    ``nnx.Param``.
    """
    plan = plan_sharding(
        model,
        mesh,
        strategy=strategy,
        units=units,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        granularity=granularity,
        rows=rows,
    )
    return plan, shard_weights(plan, parameter_leaves(model))


def plan_sharding(
    model: nnx.Module,
    mesh: Mesh,
    *,
    strategy: str = "optim_grads_params",
    units: Sequence[str] = ("layers/*",),
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    granularity: Granularity = "row",
    rows: int = 1,
) -> ShardingPlan:
    """``fully_shard`` without values: ``model`` may be abstract, from ``nnx.eval_shape``."""
    chosen = strategy_named(strategy)
    precision = Precision(param_dtype, reduce_dtype)
    mesh = checked_mesh(mesh)
    num_shards = int(mesh.devices.size) if chosen.shards_state else 1
    modules = split_units(model, units)
    if isinstance(granularity, Mapping):
        known = {path for module in modules.values() for path in module.parameters}
        unknown = [path for path in granularity if path not in known]
        if unknown:
            raise ValueError(f"granularity: expected paths of the model's parameters, got {unknown[:5]}")
    plans = {}
    for path, module in modules.items():
        main = _main_dtype(module)
        shapes = dict(zip(module.parameters, module.shapes, strict=True))
        layout = plan_layout(shapes, num_shards, granularity=_within(granularity, module), rows=rows)
        plans[path] = UnitPlan(module, layout, Wire(main, precision.compute(main), precision.reduce(main)))
    return ShardingPlan(mesh, chosen, plans, whole_model(model))


def _within(granularity: Granularity, module: UnitModule) -> Granularity:
    if not isinstance(granularity, Mapping):
        return granularity
    return {path: granularity[path] for path in module.parameters if path in granularity}


def _main_dtype(module: UnitModule) -> np.dtype:
    for path, dtype in zip(module.parameters, module.dtypes, strict=True):
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"parameter {path!r}: expected a floating dtype, got {dtype}")
    mains = {main_dtype(dtype): path for path, dtype in zip(module.parameters, module.dtypes, strict=True)}
    if len(mains) > 1:
        found = ", ".join(f"{dtype} for {path!r}" for dtype, path in mains.items())
        raise ValueError(f"unit {module.path!r}: expected main weights of one dtype, got {found}")
    return next(iter(mains), jnp.dtype(jnp.float32))


def shard_weights(plan: ShardingPlan, parameters: Mapping[str, jax.Array]) -> Buffers:
    """Main-weight buffers holding ``{path: value}``; each device receives its own shard only.

    Raises ``ValueError`` naming a parameter that is missing or has another shape.
    """
    values: dict[str, np.ndarray] = {}
    for path, info in plan.parameters.items():
        if path not in parameters or parameters[path].shape != info.shape:
            found = f"shape {parameters[path].shape}" if path in parameters else "none"
            raise ValueError(f"parameter {path!r}: expected values of shape {info.shape}, got {found}")
        values[path] = np.asarray(parameters[path])

    def read(path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        return values[path][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    return {unit: plan.build_buffer(unit, read) for unit in plan.units}


def unshard(plan: ShardingPlan, buffers: Buffers) -> dict[str, jax.Array]:
    """``{path: value}``, whole and replicated on every device, from buffers such as ``state.weights``."""
    whole: dict[str, jax.Array] = {}
    for unit, unit_plan in plan.units.items():
        # One unit at a time: see one_after_another.
        leaves = jax.block_until_ready(_gathered(buffers[unit], unit_plan.layout, plan.replicated))
        whole.update(zip(unit_plan.module.parameters, leaves, strict=True))
    return {path: whole[path] for path in plan.parameters}


@partial(jax.jit, static_argnames=("layout", "replicated"))
def _gathered(flat: jax.Array, layout: Layout, replicated: NamedSharding) -> tuple[jax.Array, ...]:
    return unpack(layout, jax.lax.with_sharding_constraint(flat, replicated))
