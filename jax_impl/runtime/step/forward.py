"""The model's forward pass as a function of the sources of each unit's weights, and explanations of errors in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_impl.comm.collectives import fence
from jax_impl.comm.mesh import is_gpu, is_simulated
from jax_impl.modules.interception import catch_calls
from jax_impl.modules.module_tree import ROOT
from jax_impl.modules.seal import line_in, mark_numbers, no_elements, seal, witnessed, witnessed_constants
from jax_impl.modules.stack import unnamed_stack
from jax_impl.modules.tree_model import as_given
from jax_impl.modules.uneven_means import ROWS
from jax_impl.modules.unit_parameter import Arguments, Run, UnitRun, Values, origin_of, unit_parameters
from jax_impl.runtime.groups.logical_group import Group
from jax_impl.runtime.groups.memory_kinds import is_on_device, on_device
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.program.level import Ways
from jax_impl.runtime.step.outputs import WATCHING, layer_numbers, look_at_output
from jax_impl.runtime.unit.order import Order
from jax_impl.runtime.unit.unit import Collectors, Sources, UnitCall

# By unit path.
AllCollectors = dict[str, Collectors]
AllSources = dict[str, Sources]


def scope_of(path: str) -> str:
    """A unit's name in profiles and in XLA's text."""
    return path or "(root)"


def hold(plan: ShardingPlan, weights: Buffers) -> AllSources:
    """The sources of weights that all microbatches of one step use.

    Each collective starts when the previous one is done: independent collectives can meet under one rendezvous key in
    the CPU simulator, which then aborts or hangs. Collectives start in the order in which forward needs the weights, so
    that later ones can run during forward.
    """
    last: Any = ()
    sources: AllSources = {}
    for path in _in_forward(plan):
        unit = plan.units[path]
        held = []
        for group in unit.groups:
            arrays = tuple(weights[key] for key in group.stored)
            if not group.holds_at_rest:
                arrays = on_device(arrays)
            if not group.sends_once:
                held.append(group.hold(arrays))
                continue
            # Wait for the previous collective: with all units gathered at once, steps of "optim_grads" aborted in 3 of
            # 3 runs of 21 steps on 8 simulated devices; with this wait, 3 of 3 runs succeeded.
            arrays, last = fence((arrays, last))
            with jax.named_scope(scope_of(path)), jax.named_scope("gather"):
                last = group.hold(arrays)
            held.append(last)
        # Until the unit's call nothing else may use the sources: their gradient is dropped (seal.py).
        sources[path] = seal(path, tuple(held))
        if WATCHING.value and unit.module.layers is not None:
            sources[path] = (*sources[path], (layer_numbers(unit.module.layers),))
    return sources


def collectors(plan: ShardingPlan) -> AllCollectors:
    """Zeros with respect to which a step differentiates."""
    return {path: tuple(group.collectors() for group in unit.groups) for path, unit in plan.units.items()}


def derived_collectors(plan: ShardingPlan, weights: Buffers) -> AllCollectors:
    """``collectors`` that pass their gradients on to ``weights``, for ``jax.grad``; frozen ones get zeros."""

    def backward(_: None, cotangents: AllCollectors) -> tuple[Any]:
        by_key: Any = dict.fromkeys(plan.arrays)
        for key, gradient in finish(plan, cotangents).items():
            stored: Any = plan.arrays[key]
            # shard_map adds the cotangents of a weight's equal copies.
            manual = plan.engine == "shard_map"
            copies = plan.data_ranks // plan.axes.shards(stored.strategy.optimizer) if manual else 1
            by_key[key] = (gradient / copies).astype(stored.dtype)
        return (by_key,)

    zeros = jax.custom_vjp(lambda _: collectors(plan))
    zeros.defvjp(lambda _: (collectors(plan), None), backward)
    return zeros(weights)


def finish(plan: ShardingPlan, gradients: AllCollectors) -> Buffers:
    """Gradients accumulated over microbatches -> gradients sharded as at rest.

    Collectives run one after another, as in ``hold``, in the order in which backward finishes the units.
    """
    finished: Buffers = {}
    last: Any = ()
    for path in reversed(_in_forward(plan)):
        for group, collected in zip(plan.units[path].groups, gradients[path], strict=True):
            if group.trainable:
                # As in ``hold``.
                collected, last = fence((collected, last))
                with jax.named_scope(scope_of(path)), jax.named_scope("reduce"):
                    last = group.finish(collected)
                finished.update(zip(group.stored, last, strict=True))
    return finished


def call_model(
    plan: ShardingPlan,
    collectors: AllCollectors,
    sources: AllSources,
    variables: Mapping[str, jax.Array],
    run: Callable[..., Any],
    rows: Any,
    shared: tuple[Any, ...],
) -> tuple[Any, dict[str, jax.Array]]:
    """``run(model, rows, *shared)`` and the model's other variables after it.

    The loss is inside the root unit, because the end of the model also needs the root's weights.
    """
    root = plan.units[ROOT].module
    own = [variables[path] for path in root.variables]
    held = {path: (collectors[path], sources[path]) for path in plan.units}

    def call(values: Values, arguments: Arguments) -> tuple[Any, Sequence[Any]]:
        variables, (rows, *shared), _ = arguments
        own = root.sealed_constants()
        module = own.made(values, variables)
        try:
            output = run(as_given(module), mark_numbers(rows, ROWS), *shared)
            output = witnessed_constants(output, own.changed_constants(module))
            return output, root.changed_variables(module)
        except (ValueError, RuntimeError, TypeError) as error:
            hint = explain(error, plan)
            if hint is None:
                raise
            raise ValueError(hint) from error

    order = Order(
        plan.prefetch,
        plan.chained,
        gates_reductions=plan.engine == "shard_map",
        model_axes=bool(plan.model_axes.names),
    )
    output, changed = _call_unit(plan, order, ROOT, held, call, (own, (rows, *shared), {}))
    return output, dict(zip(root.variables, changed, strict=True))


def ways_of(plan: ShardingPlan, *, forward: bool = False) -> Ways:
    """The options for rewriting a step's program. ``forward``: without backward."""
    written = plan.engine == "shard_map"
    # GSPMD loses the sharding of an array with a layout constraint, so there are no layout constraints if XLA shards.
    row_major = written and is_gpu(plan.mesh) and not plan.model_axes.names
    return Ways(plan.chained, forward, reductions=written, row_major=row_major)


def _call_unit(
    plan: ShardingPlan,
    order: Order,
    path: str,
    held: Mapping[str, tuple[Collectors, Sources]],
    run: Run,
    arguments: Arguments,
    witnesses: Sequence[jax.Array] = (),
) -> tuple[Any, Sequence[Any]]:
    """``run`` with the parameters of unit ``path``; ``held``: arrays of this unit and all units inside."""
    unit = plan.units[path]
    _refuse_nnx_objects(path, arguments[1:])
    arrays, rebuild = _split_arrays(arguments)

    def apply(
        leaves: Sequence[Sequence[jax.Array]], inner: Mapping[str, Any], arrays: Any, layer: Any
    ) -> Any:
        arguments = rebuild(arrays)
        fixed = {below: (mine, _without_gradient(below, its)) for below, (mine, its) in inner.items()}
        runs = {below: _unit_run(plan, order, below, fixed) for below in unit.module.inner}
        own = _in_model_order(unit.groups, leaves, unit.module.parameters)
        # Here, because backward may run this function again after the model has returned.
        with catch_calls({plan.units[below].module.cls for below in _units_inside(plan, ROOT)}):
            output, after = run(unit.module.values(own, runs), arguments)
        if WATCHING.value:
            look_at_output(plan, path, layer, _split_arrays(arguments[1:])[0], output)
        changed[:] = [i for i, value in enumerate(after) if value is not arguments[0][i]]
        # Outside the model everything is an array.
        results, rebuilding[0] = (output, None) if path == ROOT else _split_output(path, output)
        # Variables keep their gradients: a loss may add values that units store in variables, such as router losses.
        return results, [after[i] for i in changed]

    changed: list[int] = []
    rebuilding: list[Any] = [None]
    inner = {below: held[below] for below in _units_inside(plan, path)}
    collectors, sources = held[path]
    # While a watch is open, the layer's number follows the groups' sources.
    ((layer,),) = sources[len(unit.groups) :] or ((np.int32(-1),),)
    # Compiled for H100s, steps without recomputation need 0.58 to 0.77 times the memory of a step written by hand with
    # this, and 0.7 to 1.1 times without it. Simulated devices keep JAX's own residuals.
    derives = not is_simulated(plan.mesh)
    call = UnitCall(scope_of(path), apply, unit.groups, unit.recompute, order, derives)
    output, values = witnessed(call(collectors, sources[: len(unit.groups)], inner, arrays, layer), witnesses)
    # A variable that the unit only reads stays the same object: nnx forbids setting it in a loop around the call.
    after = list(arguments[0])
    for i, value in zip(changed, values, strict=True):
        after[i] = value
    return output if rebuilding[0] is None else rebuilding[0](output), after


def _without_gradient(path: str, sources: Sources) -> Sources:
    def stopped(x: jax.Array) -> jax.Array:
        # For arrays over which a loop runs, JAX creates zero gradients on the device, even if the arrays are on the
        # host. These arrays are sealed again, because a loss may also stop gradients for other reasons; sealing arrays
        # on the device would store an extra copy.
        return x if is_on_device(x) else seal(path, jax.lax.stop_gradient(x))

    return jax.tree.map(stopped, sources)


def _in_model_order(
    groups: Sequence[Group], leaves: Sequence[Sequence[jax.Array]], parameters: Sequence[str]
) -> list[jax.Array]:
    by_path: dict[str, jax.Array] = {}
    for group, values in zip(groups, leaves, strict=True):
        # Otherwise residuals for a frozen weight's gradient would be saved.
        values = values if group.trainable else jax.lax.stop_gradient(values)
        by_path.update(zip(group.paths, values, strict=True))
    return [by_path[path] for path in parameters]


def _unit_run(
    plan: ShardingPlan, order: Order, path: str, held: Mapping[str, tuple[Collectors, Sources]]
) -> UnitRun:
    """The object that calls a unit, with the arrays of this unit and all units inside."""
    arrays, tree = jax.tree.flatten({below: held[below] for below in [path, *_units_inside(plan, path)]})

    def call(
        run: Run, arrays: Sequence[jax.Array], witnesses: Sequence[jax.Array], arguments: Arguments
    ) -> tuple[Any, Sequence[Any]]:
        own = jax.tree.unflatten(tree, arrays)
        weights = [own[below][1][: len(plan.units[below].groups)] for below in own]
        # Witness the results, not the sources: sources that pass through a call are new arrays, which loops would save
        # for backward.
        whole = [*map(no_elements, jax.tree.leaves(weights)[:1]), *witnesses]
        return _call_unit(plan, order, path, own, run, arguments, whole)

    return UnitRun(path, plan.units[path].module.layers, arrays, call)


def _in_forward(plan: ShardingPlan) -> list[str]:
    """Paths of all units, each before the units inside it."""
    return [ROOT, *_units_inside(plan, ROOT)]


def _units_inside(plan: ShardingPlan, path: str) -> Iterator[str]:
    for below in plan.units[path].module.inner:
        yield below
        yield from _units_inside(plan, below)


def _refuse_nnx_objects(path: str, arguments: Any) -> None:
    for parameter in unit_parameters(arguments):
        raise ValueError(
            f"unit {path!r}: expected arrays and plain values as arguments, got unit "
            f"{origin_of(parameter).unit.path!r}: a unit can use only the weights of units inside it"
        )
    for leaf in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable)):
        if isinstance(leaf, nnx.Pytree | nnx.Variable):
            raise ValueError(
                f"unit {path!r}: expected arrays and plain values as arguments, got {type(leaf).__name__}, whose "
                "changes inside the unit would be lost: store the object in the model (nnx.Dropout(..., rngs=rngs)), "
                "or choose units that are not called with it"
            )


def _split_arrays(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """The arrays of ``tree``, and a function that puts other arrays in their places; flags stay Python values."""
    leaves, treedef = jax.tree.flatten(tree)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def rebuild(arrays: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            filled[i] = array
        return jax.tree.unflatten(treedef, filled)

    return [leaves[i] for i in where], rebuild


def _split_output(path: str, output: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    for parameter in unit_parameters(output):
        raise ValueError(
            f"unit {path!r}: expected arrays and plain values as a result, got a result that contains {parameter!r}"
        )
    return _split_arrays(output)


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
