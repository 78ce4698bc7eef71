"""Gradients of one global batch, in both engines: microbatches, accumulation, and the order of reductions.

::

    once per step     hold: gather weights that stay whole, or coarser than at rest, during the step
    each microbatch   forward and backward of the model, with the gathers and reductions of sharded weights (unit.py)
    once per step     finish: reduce the accumulated gradients to the shards at rest, and divide by the total
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

# Takes an nnx model or a pytree of parameters, rows, and further inputs that every device holds whole; returns a mean
# or (sum, weight), with ``has_aux`` paired with aux.
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

    ``batch``: placed by ``shard_batch``. ``shared``: a tuple of inputs that every device holds whole, such as a key or
    a teacher's weights. ``loss_fn(model, microbatch, *shared)`` returns a mean over the microbatch's rows with equal
    weights, or ``(sum, weight)``: loss and gradients are then the sum over the whole batch, divided by its weight, for
    any number of ranks and microbatches. Gradients are arrays like the trainable weights, in the grad dtype.
    ``has_aux``: ``loss_fn`` returns ``(loss, aux)``, and ``loss`` of the result is also ``(loss, aux)``. ``aux`` is a
    pytree of statistics; over ranks and microbatches, floating-point statistics are averaged like the loss, and
    integers and bools are summed. A value for each row is refused, unless there is only one part.

    A trap: in ``sum(losses * mask) / sum(mask)`` a token's weight depends on the other tokens of its part, since parts
    with unequal masks count equally. Return ``(sum(losses * mask), sum(mask))``. A loss that is divided by a sum over
    the batch is refused, unless there is only one part (the pjit engine with one microbatch, or one device), or
    ``equal_parts`` says that every part has the same sum. Only a quotient that is visible in the traced program is
    refused; a loss may hide one.

    ``grad_divisor``: divides the sum of losses and gradients over all parts (devices x microbatches; in the pjit engine
    microbatches), instead of the number of parts. With 1, loss and gradients are sums: ``loss_fn`` then returns a sum
    over its rows, which means the same in both engines. A mapping gives divisors for the gradients of some units, by
    patterns of their paths, ``{"layers/*/experts": 4.0}``; everything else is divided as usual. See ``losses.py``.

    ``loss_fn`` is traced twice, once for checks. The check raises ``ValueError`` for such a quotient, for a weight that
    depends on the model, and for weights of a unit that are used outside its calls. A ``grad_divisor`` that is not a
    positive number, or whose pattern matches no unit, raises immediately.
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
    """``make_gradients`` without checks; the caller checks the traced program (``check_program``).

    The function also takes ``to_host``: whether to put gradients into host memory, for a plan that ``brings_units``.
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
    """Raise ``ValueError`` for a closed jaxpr of ``unchecked_gradients`` whose results would be silently wrong.

    ``trace``: returns the jaxpr for another batch.
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
    """Raise ``ValueError`` for statistics that are rows of the batch, whose mean or sum over parts is meaningless.

    ``aux_of``: computes the aux that a loss function returns for a batch. ``aux``: the aux of ``batch``, or its shapes.
    """
    parts = microbatches * (plan.data_ranks if plan.engine == "shard_map" else 1)
    rows = {leaf.shape[0] // parts for leaf in jax.tree.leaves(batch)}
    if parts == 1 or not any(leaf.shape[:1] and leaf.shape[0] in rows for leaf in jax.tree.leaves(aux)):
        return
    try:
        later = jax.tree.leaves(jax.eval_shape(aux_of, twice_as_many(batch)))
    except Exception:
        # The loss works only for this number of rows, so nothing can be checked.
        return
    leaves = zip(jax.tree.leaves_with_path(aux), later, strict=True)
    wrong = [path for (path, leaf), more in leaves if leaf.shape and more.shape[0] == 2 * leaf.shape[0]]
    if wrong:
        raise ValueError(
            f"loss: expected statistics as aux, which are averaged (integers: summed) over {parts} parts of the "
            f"batch, got a value for each row in aux{jax.tree_util.keystr(wrong[0])}: return a mean over the rows, or "
            "use make_eval_step, which returns rows"
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
            # The loss's own collectives come after the gradients' collectives: on simulated devices, two collectives in
            # flight can meet. With gradients in host memory there is no fence: each gradient can leave as soon as it is
            # reduced only if nothing waits for all gradients.
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
        # With the check on, JAX repeats explicit sums: gradients under no_shard were exactly 8 times too large on 8
        # devices, and the losses did not show the error, because Adam is invariant to scale.
        check_vma=False,
    )
    if not plan.model_axes.names:
        return step

    def placed(
        weights: Buffers, batch: Batch, before: Variables, shared: Shared
    ) -> tuple[LossParts, Buffers, Variables]:
        # On model axes the compiler would choose the sharding of the results.
        loss, gradients, variables = step(weights, batch, plan.constrain_variables(before), shared)
        lying = {key: plan.sharding(key) for key in gradients}
        loss, gradients = lax.with_sharding_constraint((loss, gradients), (plan.replicated, lying))
        return loss, gradients, plan.constrain_variables(variables)

    return placed


def _pjit(
    plan: ShardingPlan, loss_fn: LossFunction, microbatches: int, divisors: Divisors, _to_host: bool
) -> StepGradients:
    rows = NamedSharding(plan.mesh, PartitionSpec(None, *plan.axes.batch_spec))

    def part(x: jax.Array) -> jax.Array:
        # Each device's rows are cut into parts, as in the other engine, so that no row moves to another device.
        by_device = x.reshape(plan.data_ranks, microbatches, -1, *x.shape[1:])
        return lax.with_sharding_constraint(
            by_device.swapaxes(0, 1).reshape(microbatches, -1, *x.shape[1:]), rows
        )

    def whole(
        weights: Buffers, batch: Batch, before: Variables, shared: Shared
    ) -> tuple[LossParts, Buffers, Variables]:
        parts = jax.tree.map(part, batch)
        sources = hold(plan, on_device(weights))
        # Otherwise XLA may leave statistics cut like their activations, and the next step would be compiled again.
        own = plan.constrain_variables(before)
        loss, variables, gradients = _accumulate(plan, loss_fn, sources, own, parts, shared, microbatches)
        return *divisors.divide(loss, finish(plan, gradients)), plan.constrain_variables(variables)

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
    """Loss and gradients summed over the microbatches ``parts [K, ...]``; each gets the previous one's variables."""

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
    # Start the sum with zeros, not with a microbatch outside the loop: the program then contains the model only once.
    shapes = jax.eval_shape(one_microbatch, first, variables)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], shapes[2]))

    def add(carried: Any, rows: Batch) -> tuple[Any, None]:
        total, variables = carried
        loss, variables, gradients = one_microbatch(rows, variables)
        return (jax.tree.map(jnp.add, total, (loss, gradients)), variables), None

    ((loss, gradients), variables), _ = lax.scan(add, (zeros, variables), parts)
    return loss, variables, gradients
