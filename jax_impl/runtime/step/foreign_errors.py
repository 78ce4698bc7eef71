"""Explanations of some JAX and flax errors in a loss over a sharded model."""

from __future__ import annotations

from flax import nnx

from jax_impl.modules.seal import line_in
from jax_impl.modules.stack import unnamed_stack
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

# Errors of JAX if a function with custom derivatives is differentiated twice, or in forward mode.
_DERIVATIVES = (
    "Linearization failed to produce known values",
    "forward-mode differentiation (jvp) to a custom_vjp",
)
_CONSTRAINTS = (
    "with_sharding_constraint can only refer to Auto axes",
    "with_sharding_constraint requires a non-empty",
)
_SHAPES = ("Incompatible types for broadcasting", "ncompatible shapes", "requires contracting dimensions")


def explain(error: Exception, plan: ShardingPlan) -> str | None:
    """The cause and the fix; None for an error that needs no explanation."""
    message = str(error)
    if "Triggering __jax_array__() during abstractification" in message:
        return (
            "loss: expected parameters of a unit only inside the unit: call the unit, one of its methods or "
            f"jax_impl.call_unit(function, unit, ...), got another use{line_in(error)} ({error})"
        )
    if "unit_parameter.Unit" in message:
        return (
            "loss: expected no library or renamed function to combine a unit's parameters with another tree (a mask, "
            f"weights of another unit or model){line_in(error)}: use jax.tree.map, jax_impl.call_unit(function, unit, "
            f"tree) inside the unit, or fully_shard(..., frozen=[...]) ({message.splitlines()[0]})"
        )
    if any(part in message for part in _DERIVATIVES):
        units = [path for path in plan.units if path][:3]
        return (
            "loss: expected only first derivatives by weights, got a derivative inside the loss (jax.grad, jax.jvp, "
            f"jax.hessian by its inputs) that passes through a unit, such as {units}: the result would miss the part "
            "through the unit's weights. Choose units that this derivative does not pass through: fully_shard(..., "
            f"units=[]) ({error})"
        )
    if any(part in message for part in _CONSTRAINTS):
        axes = list(plan.axes.names)
        if plan.engine == "shard_map":
            return (
                f"with_sharding_constraint: expected no data-parallel axis {axes} in a loss of engine='shard_map', "
                "where each device computes with its own rows: use fully_shard(..., engine='pjit'), which follows "
                f"such constraints, or remove the constraint if it cuts only rows ({error})"
            )
        return (
            "with_sharding_constraint: expected a mesh with the PartitionSpec: jax.sharding.NamedSharding(mesh, spec), "
            f"or jax.set_mesh(mesh) around the step, with the mesh that fully_shard got ({error})"
        )
    caches = [path for path, info in plan.variables.items() if issubclass(info.cls, nnx.Cache)]
    if caches and plan.engine == "shard_map" and any(part in message for part in _SHAPES):
        return (
            f"variables {caches[:3]} (Cache): expected rows of the batch as first dimension, after a stack's layers, "
            "since each device has the cache of its own rows; fully_shard(..., engine='pjit') accepts caches with "
            f"rows in another dimension ({error})"
        )
    return (
        unnamed_stack(error, [unit.module for unit in plan.units.values()])
        if isinstance(error, ValueError)
        else None
    )
