"""Gradients of one global batch, in both engines: microbatches, accumulation, and what is reduced
when.

::

    once a step       hold: weights that are whole, or coarser than at rest, are gathered
    each microbatch   forward and backward of the model; what a strategy shards is gathered and reduced inside (unit.py)
    once a step       finish: what was accumulated is reduced the rest of the way, and divided by all that was summed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_impl.comm.collectives import fence
from jax_impl.modules.device_values import mark_after, mark_before, variables_after
from jax_impl.modules.seal import check_seals
from jax_impl.modules.uneven_means import check_means
from jax_impl.runtime.groups.memory_kinds import as_before, in_host, on_device
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.variables import (
    Variables,
    check_rows,
    check_variables,
    of_all_devices,
    of_this_device,
)
from jax_impl.runtime.program.pipeline import pipeline
from jax_impl.runtime.step.forward import (
    AllCollectors,
    AllSources,
    call_model,
    collectors,
    finish,
    hold,
    ways_of,
)
from jax_impl.runtime.step.losses import Divisors, LossParts, as_parts, sum_over_devices, twice_as_many

# Of an nnx model, or a pytree of parameters, and rows, and then inputs that every device has whole:
# a mean, or (sum, weight); with ``has_aux`` a pair with aux.
Loss = Callable[..., Any]
Batch = Any
Shared = tuple[Any, ...]
GradDivisor = float | Mapping[str, float] | None
Gradients = Callable[..., tuple[Any, Buffers, Variables]]
LossFunction = Callable[..., LossParts]
StepGradients = Callable[..., tuple[LossParts, Buffers, Variables]]


def make_gradients(
    plan: ShardingPlan,
    loss_fn: Loss,
    microbatches: int = 1,
    *,
    equal_parts: bool = False,
    has_aux: bool = False,
    grad_divisor: GradDivisor = None,
) -> Gradients:
    """``(weights, batch, variables=None, shared=()) -> (loss, gradients, variables)``, not jitted.

    ``batch`` as ``shard_batch`` places it. ``shared``: a tuple of inputs that every device has whole, such as a key or
    a teacher's weights. ``loss_fn(model, microbatch, *shared)`` returns a mean over the microbatch's rows, each with
    the same weight, or ``(sum, weight)``: loss and gradients are then the sum over the whole batch, divided by its
    weight, on any number of ranks and microbatches. Gradients are arrays like the trainable weights, in the grad dtype.
    ``has_aux``: ``loss_fn`` returns ``(loss, aux)``, and ``loss`` of the result is ``(loss, aux)``, too. ``aux`` is a
    pytree of statistics; over ranks and microbatches floating-point ones are averaged like the loss, integers and bools
    are summed. A value for each row is refused, unless there is one part only.

    A trap: ``sum(losses * mask) / sum(mask)`` weights tokens by what else is in their part, since parts with unequal
    masks count equally. Return ``(sum(losses * mask), sum(mask))``. A loss that is divided by a sum over the batch is
    refused, unless there is one part only (the pjit engine with one microbatch, or one device), or ``equal_parts`` says
    that every part has the same sum. What is refused is a quotient that shows in the traced program; a loss may hide
    one.

    ``grad_divisor``: what the sum over all parts (devices x microbatches; in the pjit engine microbatches) is divided
    by, loss and gradients, instead of their number. With 1 they are sums: ``loss_fn`` then returns a sum over its rows,
    which means the same in both engines. A mapping has divisors of the gradients of some units, by patterns of their
    paths, ``{"layers/*/experts": 4.0}``; all else is divided as without it. See ``losses.py``.

    ``loss_fn`` is traced twice, once to check it. Raises ``ValueError`` there for such a quotient, for a weight that
    depends on the model, and for weights of a unit that are used outside of its calls; at once for a ``grad_divisor``
    that is no positive number or whose pattern matches no unit.
    """
    function = unchecked_gradients(plan, loss_fn, microbatches, has_aux, grad_divisor)

    def gradients(
        weights: Buffers, batch: Batch, variables: Variables | None = None, shared: Shared = ()
    ) -> tuple[Any, Buffers, Variables]:
        arguments = (weights, batch, variables or {}, shared)

        def trace(batch: Batch) -> Any:
            return jax.make_jaxpr(function)(weights, batch, *arguments[2:])

        program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        check_program(plan, program, trace, batch, microbatches, equal_parts)

        def aux_of(batch: Batch) -> Any:
            return function(weights, batch, *arguments[2:])[0].aux

        check_aux(plan, aux_of, shapes[0].aux, batch, microbatches)
        loss, grads, variables = function(*arguments)
        return (loss.value, loss.aux) if has_aux else loss.value, grads, variables

    return gradients


def unchecked_gradients(
    plan: ShardingPlan,
    loss_fn: Loss,
    microbatches: int,
    has_aux: bool = False,
    grad_divisor: GradDivisor = None,
) -> StepGradients:
    """``make_gradients`` with all arguments required, whose caller reads the traced program (``check_program``).

    The function takes ``to_host`` as well: whether gradients are to lie in the host's memory, of a plan that
    ``brings_units``.
    """
    computed = _shard_map if plan.engine == "shard_map" else _pjit
    divisors = Divisors.of(plan, microbatches, grad_divisor)

    def parts(model: Any, rows: Any, *shared: Any) -> LossParts:
        return as_parts(loss_fn(model, rows, *shared), has_aux)

    functions = [computed(plan, parts, microbatches, divisors, to_host) for to_host in (False, True)]

    def gradients(
        weights: Buffers, batch: Batch, variables: Variables, shared: Shared, to_host: bool = False
    ) -> tuple[LossParts, Buffers, Variables]:
        loss, grads, changed = functions[to_host](weights, batch, on_device(variables), shared)
        return loss, grads, as_before(changed, variables)

    return gradients


def check_program(
    plan: ShardingPlan,
    program: Any,
    trace: Callable[[Batch], Any],
    batch: Batch,
    microbatches: int,
    equal_parts: bool,
) -> None:
    """Raises ``ValueError`` for a closed jaxpr of ``unchecked_gradients`` whose numbers would not be what they seem.

    ``trace``: gives the jaxpr for another batch.
    """
    check_seals(program)
    parts = microbatches * (plan.data_ranks if plan.engine == "shard_map" else 1)
    check_means(program, equal_parts=equal_parts or parts == 1)
    after, read = variables_after(program)
    if plan.data_ranks > 1:
        own_rows = plan.engine == "shard_map"
        with_more_rows = (lambda: trace(twice_as_many(batch))) if own_rows else None
        check_variables(plan.variables, after, plan.axes, with_more_rows)
        check_rows(plan.variables, read, jax.tree.leaves(batch)[0].shape[0] // microbatches)


def check_aux(
    plan: ShardingPlan, aux_of: Callable[[Batch], Any], aux: Any, batch: Batch, microbatches: int
) -> None:
    """Raises ``ValueError`` for statistics that are rows of the batch, whose mean or sum over parts says nothing.

    ``aux_of``: makes a batch's aux, the values that a loss function returns with its loss. ``aux``: the aux of
    ``batch``, or its shapes.
    """
    parts = microbatches * (plan.data_ranks if plan.engine == "shard_map" else 1)
    rows = {leaf.shape[0] // parts for leaf in jax.tree.leaves(batch)}
    if parts == 1 or not any(leaf.shape[:1] and leaf.shape[0] in rows for leaf in jax.tree.leaves(aux)):
        return
    try:
        later = jax.tree.leaves(jax.eval_shape(aux_of, twice_as_many(batch)))
    except Exception:
        # A loss for just so many rows: no other number can be traced, so nothing is known.
        return
    leaves = zip(jax.tree.leaves_with_path(aux), later, strict=True)
    wrong = [path for (path, leaf), more in leaves if leaf.shape and more.shape[0] == 2 * leaf.shape[0]]
    if wrong:
        raise ValueError(
            f"loss: expected statistics as aux, which are averaged (integers: summed) over {parts} parts of the "
            f"batch, got a value for each row in aux{jax.tree_util.keystr(wrong[0])}: return a mean over them, or use "
            "make_eval_step, which returns rows"
        )


def _shard_map(
    plan: ShardingPlan, loss_fn: LossFunction, microbatches: int, divisors: Divisors, to_host: bool
) -> StepGradients:
    def local(
        weights: Buffers, batch: Batch, before: Variables, shared: Shared
    ) -> tuple[LossParts, Buffers, Variables]:
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        own = mark_before(of_this_device(before, plan.axes))
        if not plan.brings_units:
            weights = on_device(weights)
        loss, variables, gradients = _accumulate(
            plan, loss_fn, hold(plan, weights), own, parts, shared, microbatches
        )
        finished = finish(plan, gradients)
        if plan.chained or not to_host:
            # The loss's own collectives come after those of the gradients: on simulated devices two
            # in flight meet. Towards the host there is no fence, since each gradient leaves when it
            # is reduced only where nothing waits for all of them.
            loss, finished = fence((loss, finished))
        loss = sum_over_devices(loss, plan.axes.names)
        variables, loss = of_all_devices(plan.variables, before, mark_after(variables), plan.axes, loss)
        loss, finished = divisors.divide(loss, finished)
        return loss, in_host(finished) if to_host else finished, variables

    specs = plan.data_specs
    trained = {key: specs[key] for key in specs if key in plan.trainable}
    step: StepGradients = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(specs, plan.axes.batch_spec, plan.variable_specs, PartitionSpec()),
        out_specs=(PartitionSpec(), trained, plan.variable_specs),
        axis_names=set(plan.axes.names),
        # With the check on, explicit sums are done a second time: gradients under no_shard were
        # exactly 8 times too large on 8 devices, and Adam, which knows no scale, hid it from the
        # losses.
        check_vma=False,
    )
    if not plan.model_axes.names:
        return step

    def placed(*arguments: Any) -> tuple[LossParts, Buffers, Variables]:
        loss, gradients, variables = step(*arguments)
        # What is automatic on model axes would lie as the compiler likes.
        lying = {key: plan.sharding(key) for key in gradients}
        whole = {path: plan.variable_sharding(path) for path in variables}
        return lax.with_sharding_constraint((loss, gradients, variables), (plan.replicated, lying, whole))

    return placed


def _pjit(
    plan: ShardingPlan, loss_fn: LossFunction, microbatches: int, divisors: Divisors, _to_host: bool
) -> StepGradients:
    rows = NamedSharding(plan.mesh, PartitionSpec(None, *plan.axes.batch_spec))

    def part(x: jax.Array) -> jax.Array:
        # Each device's rows are cut into parts, as in the other engine, so that none changes its
        # device.
        by_device = x.reshape(plan.data_ranks, microbatches, -1, *x.shape[1:])
        return lax.with_sharding_constraint(
            by_device.swapaxes(0, 1).reshape(microbatches, -1, *x.shape[1:]), rows
        )

    def whole(
        weights: Buffers, batch: Batch, before: Variables, shared: Shared
    ) -> tuple[LossParts, Buffers, Variables]:
        parts = jax.tree.map(part, batch)
        sources = hold(plan, on_device(weights))
        loss, variables, gradients = _accumulate(plan, loss_fn, sources, before, parts, shared, microbatches)
        # Else XLA may leave statistics cut like the activations that they come from, and the next
        # step would be compiled anew, for another sharding.
        variables = {
            path: lax.with_sharding_constraint(value, plan.variable_sharding(path))
            for path, value in variables.items()
        }
        return *divisors.divide(loss, finish(plan, gradients)), variables

    return whole


def _accumulate(
    plan: ShardingPlan,
    loss_fn: LossFunction,
    sources: AllSources,
    variables: Variables,
    parts: Batch,
    shared: Shared,
    microbatches: int,
) -> tuple[LossParts, Variables, AllCollectors]:
    """Loss and gradients summed over the microbatches ``parts [K, ...]``; variables pass from one to the next."""

    def one_microbatch(rows: Batch, variables: Variables) -> tuple[LossParts, Variables, AllCollectors]:
        def loss(held: AllCollectors) -> tuple[jax.Array, tuple[LossParts, Variables]]:
            sums, changed = call_model(plan, held, sources, variables, loss_fn, rows, shared)
            return sums.value, (sums, changed)

        differentiated = jax.value_and_grad(loss, has_aux=True)
        if plan.prefetch and any(unit.module.layers is not None for unit in plan.units.values()):
            differentiated = pipeline(differentiated, ways_of(plan))
        (_, (sums, variables)), gradients = differentiated(collectors(plan))
        return sums, variables, gradients

    first = jax.tree.map(lambda x: x[0], parts)
    if microbatches == 1:
        return one_microbatch(first, variables)
    # Zeros for the first sum, in place of a first microbatch outside of the loop: the program then
    # has the model once, not twice.
    shapes = jax.eval_shape(one_microbatch, first, variables)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], shapes[2]))

    def add(carried: Any, rows: Batch) -> tuple[Any, None]:
        total, variables = carried
        loss, variables, gradients = one_microbatch(rows, variables)
        return (jax.tree.map(jnp.add, total, (loss, gradients)), variables), None

    ((loss, gradients), variables), _ = lax.scan(add, (zeros, variables), parts)
    return loss, variables, gradients
