"""Initialize weights sharded: each device computes a model's initial values itself and keeps its own rows.

::

    make()  -> traced once ->  parameters of unit 0 | of unit 1 | ...      on each device, one unit after another
                                   | own rows           | own rows
    at rest                    [shard of "layers/0"] [shard of "layers/1"]

There is no communication, and no whole array is copied to the host or stays on a device. While a unit's parameters are
computed they are whole, unless XLA computes only the needed rows; for a stack, all layers are whole. In the pjit
engine, XLA computes only each device's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from bridge.core.sharding import ShardingPolicy
from jax_impl.api import plan_sharding
from jax_impl.comm.collectives import fence
from jax_impl.modules.module_tree import ROOT, constant_leaves, joined, parameter_leaves, variable_leaves
from jax_impl.modules.seal import jaxpr_of
from jax_impl.modules.tree_model import Tree, as_module
from jax_impl.options import ShardingOptions
from jax_impl.runtime.groups.flat_group import FlatGroup
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.variables import Variables

Values = dict[str, jax.Array]


def init_sharded(
    make: Callable[[], nnx.Module | Tree],
    mesh: Mesh | None = None,
    policy: ShardingPolicy | str | Path | None = None,
    **options: Unpack[ShardingOptions],
) -> tuple[ShardingPlan, Buffers, Variables]:
    """``fully_shard(make(), ...)`` for a model too large for one device or host: plan, main weights, other variables.

    ::

        plan, weights, variables = init_sharded(lambda: Model(config, rngs=nnx.Rngs(0)), mesh, "fsdp")
        plan, weights, _ = init_sharded(lambda: net.init(key, rows)["params"], mesh, units=["Block_*"])
        state = init_state(plan, weights, optimizer, variables)

    make: returns an nnx model or a pytree of parameters, computed by traceable JAX operations. Values from elsewhere (a
        file, a NumPy array) become constants of the program, whole on each device.

    The values equal those of ``make()`` without ``jit``; with flax's initializers they are equal bit for bit on devices
    of ``simulate_devices``. The last bit may differ if the compiler drops barriers (CPUs without ``simulate_devices``),
    and after divisions by a number. The values do not depend on the mesh.

    Raises ``ValueError`` as ``fully_shard`` does.
    """

    def made() -> nnx.Module:
        # With eager sharding, flax would constrain annotated variables on a mesh that may not exist.
        with nnx.use_eager_sharding(False):
            # Convert to a module, which may contain values that are not arrays.
            return as_module(make())

    shapes = nnx.eval_shape(made)
    _check_no_tracers(shapes)
    plan = plan_sharding(shapes, mesh, policy, **options)

    def values() -> tuple[Values, Values]:
        module = made()
        return parameter_leaves(module), variable_leaves(module) | constant_leaves(module)

    values = _op_by_op(values)
    program = _on_shards if plan.engine == "shard_map" else _by_parameter
    weights, others = program(plan, values)()
    return _with_constants(plan, others), weights, {path: others[path] for path in plan.variables}


def _check_no_tracers(model: nnx.Module) -> None:
    for key, value in nnx.iter_graph(model):
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"array {joined(key)!r}: expected a NumPy array or an nnx.Variable, got a plain JAX array, which flax "
                "does not return from the traced make(): create the array with NumPy, or use fully_shard"
            )


def _with_constants(plan: ShardingPlan, values: Values) -> ShardingPlan:
    """A program closes over the constants, so each process has its own copy, which is bound to no device."""
    root = plan.units[ROOT]
    local = {
        joined(constant): np.asarray(values[joined(constant)].addressable_data(0))
        for constant in root.module.constants
    }
    units = {**plan.units, ROOT: replace(root, module=root.module.with_constants(local))}
    return replace(plan, model=plan.model.with_constants(local), units=units)


def _op_by_op(function: Callable[[], Any]) -> Callable[[], Any]:
    """A program with the same results as without ``jit``: XLA may not fuse two operations.

    XLA would first multiply the constants of ``truncated_normal(key) * sqrt(2) * stddev``, which changes the last bits.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)()

    def run() -> Any:
        known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

        def value(operand: Any) -> Any:
            # XLA would turn division by a known divisor into multiplication by its inverse, whose last bit may differ.
            return (
                fence(jnp.asarray(operand.val, operand.aval.dtype))
                if hasattr(operand, "val")
                else known[operand]
            )

        for equation in closed.jaxpr.eqns:
            operands = [value(x) for x in equation.invars]
            known.update(zip(equation.outvars, fence(_bound(closed.jaxpr, equation, operands)), strict=True))
        return jax.tree.unflatten(jax.tree.structure(shapes), [value(x) for x in closed.jaxpr.outvars])

    return run


def _bound(around: Any, equation: Any, values: list[Any]) -> list[Any]:
    """The results of one equation of a jaxpr."""
    if not any(jaxpr_of(x) is not None for x in equation.params.values()):
        results = equation.primitive.bind(*values, **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]
    variables = [(x, v) for x, v in zip(equation.invars, values, strict=True) if not hasattr(x, "val")]
    alone = around.replace(
        constvars=[], invars=[x for x, _ in variables], outvars=equation.outvars, eqns=[equation]
    )
    return list(jaxpr_as_fun(ClosedJaxpr(alone, []))(*(v for _, v in variables)))


def _on_shards(plan: ShardingPlan, values: Callable[[], tuple[Values, Values]]) -> Any:
    def local() -> tuple[Buffers, Values]:
        parameters, variables = values()
        weights: Buffers = {}
        last: Any = ()
        for group in plan.groups:
            assert isinstance(group, FlatGroup)
            # One unit after another, so that only one unit's parameters are whole at a time.
            leaves, last = fence(([parameters[path] for path in group.paths], last))
            last = _own(group, group.at_rest([leaf.astype(group.dtype) for leaf in leaves])[0])
            weights[group.key] = last
        return weights, variables

    specs = {key: stored.spec for key, stored in plan.arrays.items()}
    return jax.jit(
        jax.shard_map(local, mesh=plan.mesh, in_specs=(), out_specs=(specs, PartitionSpec()), check_vma=False)
    )


def _own(group: FlatGroup, whole: jax.Array) -> jax.Array:
    """This device's shard of a whole array."""
    axes = group.spec[-1] if len(group.spec) else None
    if axes is None:
        return whole
    size = group.layout.shard_size
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axes) * size, size, axis=whole.ndim - 1)


def _by_parameter(plan: ShardingPlan, values: Callable[[], tuple[Values, Values]]) -> Any:
    def whole() -> tuple[Buffers, Values]:
        parameters, variables = values()
        return {path: parameters[path].astype(plan.parameters[path].dtype) for path in plan.arrays}, variables

    return jax.jit(whole, out_shardings=(plan.shardings, plan.replicated))
