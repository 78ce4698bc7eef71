"""A forward-only step: losses of a whole data set, logits or samples, from weights that stay sharded.

As in training, each unit's weights are gathered for its call and dropped after the call; nothing is kept for a
backward::

    fn returns                        the step returns
    mean, or (sum, weight)            metrics of the whole batch, as from a training step: "loss", "weight", "aux"
    arrays with its rows first        the same for all rows of the batch, cut over the devices like the batch

With ``mutable=True`` the step also returns variables that the model changes (decode caches, batch statistics).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_impl.modules.device_values import mark_after, mark_before, variables_after
from jax_impl.modules.seal import check_seals
from jax_impl.modules.uneven_means import check_means
from jax_impl.modules.unit_parameter import unit_parameters
from jax_impl.runtime.groups.memory_kinds import on_device
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.variables import (
    Variables,
    check_rows,
    check_variables,
    of_all_devices,
    of_this_device,
)
from jax_impl.runtime.program.pipeline import pipeline
from jax_impl.runtime.step.forward import call_model, derived_collectors, hold, ways_of
from jax_impl.runtime.step.gradients import Shared
from jax_impl.runtime.step.losses import (
    Divisors,
    LossParts,
    as_parts,
    is_loss,
    sum_over_devices,
    twice_as_many,
)
from jax_impl.train import settle
from jax_impl.train_state import Batch, TrainState, check_state, pad_batch, place_shared, shard_batch

# The result for a batch: its loss, or its values for each row; and the variables after the batch.
Evaluated = tuple[LossParts | None, Any, Variables]


class _NoRowsError(ValueError):
    """The results are neither a loss nor rows. ``shapes``: the shapes of the results, by key path."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], rows: str) -> None:
        self.shapes = shapes
        super().__init__(
            f"fn: expected a loss (a scalar, or (sum, weight)), or arrays whose first dimension is the {rows} of its "
            f"input, got shapes {shapes}: return statistics of the batch with a loss and has_aux=True"
        )


class EvalStep:
    """``evaluate(state, batch, *shared)``; see ``make_eval_step``."""

    def __init__(
        self,
        plan: ShardingPlan,
        fn: Callable[..., Any],
        has_aux: bool,
        equal_parts: bool,
        mutable: bool | None,
    ) -> None:
        self._plan, self._fn = plan, fn
        self._has_aux, self._equal_parts, self._mutable = has_aux, equal_parts, mutable
        # Whether the result is a loss, by the shapes of the checked inputs.
        self._checked: dict[Any, bool] = {}

    def __call__(self, state: TrainState | Buffers, batch: Batch, *shared: Any) -> Any:
        weights, variables = _parts_of(state)
        check_state(self._plan, weights, variables)
        rows, filled, real = self._filled(batch)
        arguments = (weights, shard_batch(self._plan, filled), variables, place_shared(self._plan, shared))
        leaves, structure = jax.tree.flatten((arguments[1], arguments[3]))
        traced = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if traced not in self._checked:
            program = self._program.trace(*arguments)
            self._check(program.jaxpr, arguments)
            if program.out_info[0] is None:
                self._check_results(arguments)
            self._checked[traced] = program.out_info[0] is not None
        if self._mutable and rows != real:
            raise ValueError(
                f"batch: expected a multiple of {self._plan.data_ranks} rows for mutable=True, got {real}: padding "
                "rows would change the state; pad with pad_batch if you want that"
            )
        if self._checked[traced] and rows != real:
            raise ValueError(
                f"batch: expected a multiple of {self._plan.data_ranks} rows for a loss, got {real}: pad the batch "
                "with pad_batch, and let the loss return (sum, weight) of the real rows"
            )
        loss, by_row, changed = settle(self._plan, self._program(*arguments))
        by_row = by_row if rows == real else jax.tree.map(lambda x: x[:real], by_row)
        returned = by_row if loss is None else loss.metrics(self._has_aux)
        if not self._mutable:
            return returned
        return returned, replace(state, variables=changed) if isinstance(state, TrainState) else state

    def lower(self, state: TrainState | Buffers, batch: Batch, *shared: Any) -> jax.stages.Lowered:
        """The program, as ``TrainStep.lower``; arguments may be shapes, and the devices must divide the rows."""
        return jax.jit(self).lower(state, batch, *shared)

    @cached_property
    def _program(self) -> Any:
        plan = self._plan

        def program(weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Evaluated:
            return run(on_device(weights), batch, on_device(variables), shared)

        run: Any = self._whole
        if plan.engine == "pjit":
            return jax.jit(program)
        local: Any = jax.shard_map(
            self._local,
            mesh=plan.mesh,
            in_specs=(plan.data_specs, plan.axes.batch_spec, plan.variable_specs, PartitionSpec()),
            out_specs=(
                PartitionSpec(),
                plan.axes.batch_spec,
                plan.variable_specs if self._mutable else PartitionSpec(),
            ),
            axis_names=set(plan.axes.names),
            # As in training: JAX adds no implicit reduction, so nothing is summed twice.
            check_vma=False,
        )

        def placed(weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Evaluated:
            loss, by_row, changed = local(weights, batch, plan.constrain_variables(variables), shared)
            # On model axes the compiler would choose the sharding of the results.
            whole = lax.with_sharding_constraint(loss, plan.replicated)
            return whole, self._in_rows(by_row), plan.constrain_variables(changed)

        run = placed if plan.model_axes.names else local
        return jax.jit(program)

    def _local(self, weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Evaluated:
        plan = self._plan
        own = of_this_device(variables, plan.axes)
        loss, by_row, after = self._forward(weights, batch, own, shared)
        if loss is not None:
            loss = sum_over_devices(loss, plan.axes.names)
        if self._mutable:
            after, (loss, by_row) = of_all_devices(
                plan.variables, variables, after, plan.axes, (loss, by_row)
            )
        return None if loss is None else self._mean(loss), by_row, after if self._mutable else {}

    def _whole(self, weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Evaluated:
        plan = self._plan
        loss, by_row, after = self._forward(weights, batch, plan.constrain_variables(variables), shared)
        changed = plan.constrain_variables(after) if self._mutable else {}
        return None if loss is None else self._mean(loss), self._in_rows(by_row), changed

    def _in_rows(self, by_row: Any) -> Any:
        rows = NamedSharding(self._plan.mesh, self._plan.axes.batch_spec)
        return lax.with_sharding_constraint(by_row, rows)

    def _forward(self, weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Evaluated:
        plan = self._plan

        def call(weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Any:
            held = derived_collectors(plan, weights), hold(plan, weights)
            variables = mark_before(variables)
            returned, after = call_model(plan, *held, variables, self._fn, batch, shared)
            return returned, mark_after(after)

        run: Any = call
        if plan.prefetch:
            # A derivative of the rewritten program would miss what the units themselves derive.
            run = jax.custom_vjp(pipeline(call, ways_of(plan, forward=True)))
            run.defvjp(lambda *arguments: jax.vjp(call, *arguments), lambda vjp, cotangent: vjp(cotangent))
        returned, after = run(weights, batch, variables, shared)
        if self._has_aux or is_loss(returned):
            return as_parts(returned, self._has_aux, trained=False), None, after
        for parameter in unit_parameters(returned):
            raise ValueError(f"fn: expected results, got a parameter of a unit: {parameter!r}")
        rows = jax.tree.leaves(batch)[0].shape[0]
        wrong = {
            jax.tree_util.keystr(path): jnp.shape(leaf)
            for path, leaf in jax.tree.leaves_with_path(returned)
            if jnp.shape(leaf)[:1] != (rows,)
        }
        if wrong:
            raise _NoRowsError(wrong, f"{rows} rows")
        return None, returned, after

    def _mean(self, loss: LossParts) -> LossParts:
        return Divisors.of(self._plan, 1, None).divide(loss, {})[0]

    def _check(self, program: Any, arguments: tuple[Any, ...]) -> None:
        plan = self._plan
        check_seals(program)
        one_part = plan.engine == "pjit" or plan.data_ranks == 1
        check_means(program, equal_parts=self._equal_parts or one_part)
        after, read = variables_after(program)
        if self._mutable and not one_part:

            def with_more_rows() -> Any:
                weights, batch, *rest = arguments
                return self._program.trace(weights, twice_as_many(batch), *rest).jaxpr

            check_variables(plan.variables, after, plan.axes, with_more_rows)
        if plan.data_ranks > 1:
            check_rows(plan.variables, read, jax.tree.leaves(arguments[1])[0].shape[0])
        changed = [
            path
            for path, value in after.items()
            if not value.same and not issubclass(plan.variables[path].cls, nnx.RngState)
        ]
        if self._mutable is None and changed:
            raise ValueError(
                f"fn: expected a model that changes none of its variables, got one that changes {changed[:5]} "
                f"({plan.variables[changed[0]].cls.__name__}): use make_eval_step(..., mutable=True), which returns "
                "(result, state), or mutable=False, which drops the changes; model.eval() in fn keeps batch "
                "statistics unchanged"
            )

    def _check_results(self, arguments: tuple[Any, ...]) -> None:
        """Raises ``ValueError`` for results whose first dimension equals the number of rows only by chance."""
        weights, batch, *rest = arguments
        try:
            if self._plan.data_ranks > 1:
                jax.eval_shape(self._program, weights, twice_as_many(batch), *rest)
        except _NoRowsError as error:
            # For this batch, a first dimension equals the number of rows by chance.
            raise _NoRowsError(error.shapes, "rows (any number of them)") from None
        except Exception:
            # The function works only for this number of rows, like a decode cache.
            return

    def _filled(self, batch: Batch) -> tuple[int, Batch, int]:
        """Rows after padding, the padded batch, and rows before."""
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if len(sizes) != 1 or () in sizes or (0,) in sizes:
            # shard_batch refuses this with an error message.
            return 0, batch, 0
        ((real,),) = sizes
        if real % self._plan.data_ranks == 0:
            return real, batch, real
        filled, counted = pad_batch(self._plan, batch)
        return len(counted), filled, real


def _parts_of(state: TrainState | Buffers) -> tuple[Buffers, Variables]:
    if isinstance(state, TrainState):
        return state.weights, state.variables
    if not isinstance(state, Mapping):
        raise ValueError(f"state: expected a TrainState or weights by key, got {type(state).__name__}")
    return state, {}


def make_eval_step(
    plan: ShardingPlan,
    fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    equal_parts: bool = False,
    mutable: bool | None = None,
) -> EvalStep:
    """``evaluate(state, batch, *shared)`` runs ``fn(model, rows, *shared)`` on all rows, forward only; no donation.

    If ``fn`` returns a loss as for ``make_train_step``, ``evaluate`` returns the metrics of the batch. If ``fn``
    returns a pytree of arrays with its rows as first dimension (logits ``[rows, T, V]``, samples, caches), ``evaluate``
    returns these arrays for the whole batch. Then any number of rows works: ``evaluate`` pads the batch and cuts the
    padding off the result::

        validate = make_eval_step(plan, loss)
        metrics = validate(state, rows)                              # {"loss": ...}
        logits = make_eval_step(plan, lambda model, tokens: model(tokens)[:, -1])
        for _ in range(20):                                          # greedy, one token a call
            tokens = jnp.concatenate([tokens, logits(state, tokens).argmax(-1)[:, None]], axis=1)

    ``fn`` may also contain a loop (``lax.fori_loop``); each iteration gathers each unit's weights again.

    ``mutable=True``: ``evaluate`` returns ``(result, state)``, and the new state has the variables that the model
    changed. So a decode cache of flax works token by token; each device keeps the cache of its own rows::

        decode = make_eval_step(plan, lambda model, token: model(token)[:, -1], mutable=True)
        for _ in range(20):                                          # nnx.MultiHeadAttention(decode=True), init_cache
            logits, state = decode(state, token)
            token = logits.argmax(-1)[:, None]

    ``mutable=False`` drops the changes; by default a model that changes variables is refused. ``jax.grad`` of
    ``evaluate`` by weights is the gradient of training, in the plan's dtypes, and zero for frozen weights.

    state: a train state, or weights by key for a model without other variables. Random streams differ by device, as in
        training, and start from the state's streams: the next call draws other numbers only with ``mutable=True``.
        ``model.eval()`` in ``fn`` turns dropout off. shared: arrays and numbers that every device holds whole.

    The first call raises ``ValueError`` for everything that training refuses, for outputs that are neither a loss nor
    rows, for a loss over rows that the number of devices does not divide, and for changed variables as above.
    """
    return EvalStep(plan, fn, has_aux, equal_parts, mutable)
