"""The model's forward pass as a function of what a step holds of each unit's weights."""

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
from jax_impl.modules.seal import no_elements, seal, witnessed, witnessed_constants
from jax_impl.modules.tree_model import as_given
from jax_impl.modules.uneven_means import mark_rows
from jax_impl.modules.unit_parameter import Arguments, Run, UnitRun, Values, origin_of, unit_parameters
from jax_impl.runtime.groups.logical_group import Group
from jax_impl.runtime.groups.memory_kinds import is_on_device, on_device
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.program.level import Ways
from jax_impl.runtime.step.foreign_errors import explain
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
    """What all microbatches of one step use of the weights at rest.

    Each collective starts when the one before is done: independent ones can meet under one rendezvous key in the CPU
    simulator, which then aborts or hangs. They start in the order in which forward needs the weights, so that the
    later ones can run during it.
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
            # After the collective before: with all units gathered at once, a step of "optim_grads"
            # aborted in 3 of 3 runs of 21 steps on 8 simulated devices, and ran in 3 of 3 so.
            arrays, last = fence((arrays, last))
            with jax.named_scope(scope_of(path)), jax.named_scope("gather"):
                last = group.hold(arrays)
            held.append(last)
        # From here to the unit's call nothing else may use them: their gradient is dropped
        # (seal.py).
        sources[path] = seal(path, tuple(held))
        if WATCHING.value and unit.module.layers is not None:
            sources[path] = (*sources[path], (layer_numbers(unit.module.layers),))
    return sources


def collectors(plan: ShardingPlan) -> AllCollectors:
    """Zeros to differentiate by."""
    return {path: tuple(group.collectors() for group in unit.groups) for path, unit in plan.units.items()}


def finish(plan: ShardingPlan, gradients: AllCollectors) -> Buffers:
    """What was accumulated over microbatches -> gradients as at rest.

    Collectives one after another, as in ``hold``, in the order in which backward is done with the units.
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

    The loss is inside the root unit, whose weights the end of the model needs too.
    """
    root = plan.units[ROOT].module
    own = [variables[path] for path in root.variables]
    held = {path: (collectors[path], sources[path]) for path in plan.units}

    def call(values: Values, arguments: Arguments) -> tuple[Any, Sequence[Any]]:
        variables, (rows, *shared), _ = arguments
        own = root.sealed_constants()
        module = own.made(values, variables)
        try:
            output = run(as_given(module), mark_rows(rows), *shared)
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
    """How the program of a step is written. ``forward``: without backward."""
    written = plan.engine == "shard_map"
    # GSPMD loses the sharding of an array with a layout constraint, so where XLA shards there is
    # none.
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
    """``run`` with the parameters of unit ``path``; ``held`` of it and all units inside."""
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
        # Here, since backward may come back to it when the model is done.
        with catch_calls({plan.units[below].module.cls for below in _units_inside(plan, ROOT)}):
            output, after = run(unit.module.values(own, runs), arguments)
        if WATCHING.value:
            look_at_output(plan, path, layer, _split_arrays(arguments[1:])[0], output)
        changed[:] = [i for i, value in enumerate(after) if value is not arguments[0][i]]
        # Outside of the model everything is an array.
        results, rebuilding[0] = (output, None) if path == ROOT else _split_output(path, output)
        # With their gradients: a loss may add what units leave in variables, such as losses of
        # routers.
        return results, [after[i] for i in changed]

    changed: list[int] = []
    rebuilding: list[Any] = [None]
    inner = {below: held[below] for below in _units_inside(plan, path)}
    collectors, sources = held[path]
    # What comes after the groups' sources, while a watch is open, is the number of the layer.
    ((layer,),) = sources[len(unit.groups) :] or ((np.int32(-1),),)
    # On H100s steps without recomputation so need 0.58 to 0.77 of the memory of a step by hand,
    # without it 0.7 to 1.1. Simulated devices keep what JAX saves.
    derives = not is_simulated(plan.mesh)
    call = UnitCall(scope_of(path), apply, unit.groups, unit.recompute, order, derives)
    output, values = witnessed(call(collectors, sources[: len(unit.groups)], inner, arrays, layer), witnesses)
    # What a unit only reads stays the same object: in a loop around the call nnx forbids to set it.
    after = list(arguments[0])
    for i, value in zip(changed, values, strict=True):
        after[i] = value
    return output if rebuilding[0] is None else rebuilding[0](output), after


def _without_gradient(path: str, sources: Sources) -> Sources:
    def stopped(x: jax.Array) -> jax.Array:
        # Of arrays that a loop is over, JAX makes zero gradients on the device, wherever the arrays
        # lie. These are sealed anew, since a loss may stop gradients for another reason; a seal on
        # others would be a copy to save.
        return x if is_on_device(x) else seal(path, jax.lax.stop_gradient(x))

    return jax.tree.map(stopped, sources)


def _in_model_order(
    groups: Sequence[Group], leaves: Sequence[Sequence[jax.Array]], parameters: Sequence[str]
) -> list[jax.Array]:
    by_path: dict[str, jax.Array] = {}
    for group, values in zip(groups, leaves, strict=True):
        # Else what a frozen weight's gradient needs would be saved.
        values = values if group.trainable else jax.lax.stop_gradient(values)
        by_path.update(zip(group.paths, values, strict=True))
    return [by_path[path] for path in parameters]


def _unit_run(
    plan: ShardingPlan, order: Order, path: str, held: Mapping[str, tuple[Collectors, Sources]]
) -> UnitRun:
    """How a unit is called, with its arrays and those of all units inside."""
    arrays, tree = jax.tree.flatten({below: held[below] for below in [path, *_units_inside(plan, path)]})

    def call(
        run: Run, arrays: Sequence[jax.Array], witnesses: Sequence[jax.Array], arguments: Arguments
    ) -> tuple[Any, Sequence[Any]]:
        own = jax.tree.unflatten(tree, arrays)
        weights = [own[below][1][: len(plan.units[below].groups)] for below in own]
        # Of the results, since sources that pass a call are new arrays, which loops would save for
        # backward.
        whole = [*map(no_elements, jax.tree.leaves(weights)[:1]), *witnesses]
        return _call_unit(plan, order, path, own, run, arguments, whole)

    return UnitRun(path, plan.units[path].module.layers, arrays, call)


def _in_forward(plan: ShardingPlan) -> list[str]:
    """Paths of all units, each before the units inside of it."""
    return [ROOT, *_units_inside(plan, ROOT)]


def _units_inside(plan: ShardingPlan, path: str) -> Iterator[str]:
    for below in plan.units[path].module.inner:
        yield below
        yield from _units_inside(plan, below)


def _refuse_nnx_objects(path: str, arguments: Any) -> None:
    for parameter in unit_parameters(arguments):
        raise ValueError(
            f"unit {path!r}: expected arrays and plain values as arguments, got unit "
            f"{origin_of(parameter).unit.path!r}: a unit can use the weights of units inside of it only"
        )
    for leaf in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable)):
        if isinstance(leaf, nnx.Pytree | nnx.Variable):
            raise ValueError(
                f"unit {path!r}: expected arrays and plain values as arguments, got {type(leaf).__name__}, whose "
                "changes inside of the unit would be lost: let the model hold it (nnx.Dropout(..., rngs=rngs)), or "
                "choose units that are not called with it"
            )


def _split_arrays(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """The arrays of ``tree``, and how to put others in their places: flags and the like stay Python values."""
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
            f"unit {path!r}: expected arrays and plain values as a result, got one that holds {parameter!r}"
        )
    return _split_arrays(output)
