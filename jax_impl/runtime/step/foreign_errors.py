"""What some errors of JAX and flax mean in a loss over a sharded model."""

from __future__ import annotations

from flax import nnx

from jax_impl.modules.seal import line_in
from jax_impl.modules.stack import unnamed_stack
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

# Of JAX, where a function of derivatives of its own is differentiated twice, or forward.
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
    """What is wrong, and the way out; None for an error that says it."""
    message = str(error)
    if "Triggering __jax_array__() during abstractification" in message:
        return (
            "loss: expected parameters of a unit inside of the unit only: call the unit, a method of it or "
            f"jax_impl.call_unit(function, unit, ...), got another use{line_in(error)} ({error})"
        )
    if "unit_parameter.Unit" in message:
        return (
            "loss: expected a unit's parameters not to be put together with another tree (a mask, weights of another "
            f"unit or model) by a library or under another name{line_in(error)}: say it by jax.tree.map, inside of "
            "the unit by jax_impl.call_unit(function, unit, tree), or by fully_shard(..., frozen=[...]) "
            f"({message.splitlines()[0]})"
        )
    if any(part in message for part in _DERIVATIVES):
        units = [path for path in plan.units if path][:3]
        return (
            "loss: expected first derivatives by weights only, got a derivative inside of the loss (jax.grad, jax.jvp, "
            f"jax.hessian by its inputs) that goes through a unit, such as {units}: it would miss what goes through "
            f"the unit's weights. Choose no units that it goes through: fully_shard(..., units=[]) ({error})"
        )
    if any(part in message for part in _CONSTRAINTS):
        axes = list(plan.axes.names)
        if plan.engine == "shard_map":
            return (
                f"with_sharding_constraint: expected no data-parallel axis {axes} in a loss of engine='shard_map', "
                "where each device computes with its own rows: fully_shard(..., engine='pjit') follows them, and "
                f"where only rows are cut the constraint can be left out ({error})"
            )
        return (
            "with_sharding_constraint: expected a mesh with the PartitionSpec: jax.sharding.NamedSharding(mesh, spec), "
            f"or jax.set_mesh(mesh) around the step, with the mesh that fully_shard got ({error})"
        )
    caches = [path for path, info in plan.variables.items() if issubclass(info.cls, nnx.Cache)]
    if caches and plan.engine == "shard_map" and any(part in message for part in _SHAPES):
        return (
            f"variables {caches[:3]} (Cache): expected rows of the batch as first dimension, behind that of a stack's "
            "layers, since each device has those of its own rows; fully_shard(..., engine='pjit') takes caches whose "
            f"rows lie elsewhere ({error})"
        )
    return (
        unnamed_stack(error, [unit.module for unit in plan.units.values()])
        if isinstance(error, ValueError)
        else None
    )
