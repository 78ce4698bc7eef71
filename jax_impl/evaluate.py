"""A step that only goes forward: losses of a whole data set, logits, samples, from weights that stay sharded.

Each unit's weights are gathered for its call and dropped after it, as in training, and nothing is kept for a backward::

    fn returns                        the step returns
    mean, or (sum, weight)            metrics of the whole batch, as a training step has them: "loss", "weight", "aux"
    arrays with its rows first        the same of all rows of the batch, cut over the devices as the batch is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_impl.batch import Batch, pad_batch, place_shared, shard_batch
from jax_impl.modules.seal import check_seals
from jax_impl.modules.uneven_means import check_means
from jax_impl.runtime.divisors import Divisors
from jax_impl.runtime.forward import call_model, collectors, hold, ways_of
from jax_impl.runtime.gradients import Shared
from jax_impl.runtime.losses import LossParts, as_parts, is_loss, sum_over_devices
from jax_impl.runtime.memory_kinds import on_device
from jax_impl.runtime.pipeline import pipelined
from jax_impl.runtime.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.variables import Variables, of_this_device
from jax_impl.train import settled
from jax_impl.train_state import TrainState, check_state

# Of a batch: its loss, or what it has for each row.
Evaluated = tuple[LossParts | None, Any]


class EvalStep:
    """``evaluate(state, batch, *shared)``; see ``make_eval_step``."""

    def __init__(self, plan: ShardingPlan, fn: Callable[..., Any], has_aux: bool, equal_parts: bool) -> None:
        self._plan, self._fn = plan, fn
        self._has_aux, self._equal_parts = has_aux, equal_parts
        # Whether it is a loss, by the shapes of what was checked.
        self._checked: dict[Any, bool] = {}

    def __call__(self, state: TrainState | Buffers, batch: Batch, *shared: Any) -> Any:
        weights, variables = _parts_of(state)
        check_state(self._plan, weights, variables)
        rows, filled, real = self._filled(batch)
        given = (weights, shard_batch(self._plan, filled), variables, place_shared(self._plan, shared))
        leaves, structure = jax.tree.flatten((given[1], given[3]))
        traced = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if traced not in self._checked:
            program = self._program.trace(*given)
            self._check(program.jaxpr)
            self._checked[traced] = program.out_info[0] is not None
        if self._checked[traced] and rows != real:
            raise ValueError(
                f"batch: expected a multiple of {self._plan.data_ranks} rows for a loss, got {real}: fill the batch "
                "by pad_batch, and let the loss return (sum, weight) of the rows that count"
            )
        loss, by_row = settled(self._plan, self._program(*given))
        if loss is None:
            return by_row if rows == real else jax.tree.map(lambda x: x[:real], by_row)
        weight = {} if loss.weight is None else {"weight": loss.weight}
        return {"loss": loss.value, **weight, **({"aux": loss.aux} if self._has_aux else {})}

    def lower(self, state: TrainState | Buffers, batch: Batch, *shared: Any) -> jax.stages.Lowered:
        """The program, to be compiled ahead, costed or read. ``state`` and the rest may be shapes; rows must divide."""
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
            in_specs=(plan.data_specs, plan.axes.batch_spec, PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(), plan.axes.batch_spec),
            axis_names=set(plan.axes.names),
            # As in training: no reduction happens that is not written.
            check_vma=False,
        )

        def placed(*given: Any) -> Evaluated:
            loss, by_row = local(*given)
            # What is automatic on model axes would lie as the compiler likes.
            return lax.with_sharding_constraint(loss, plan.replicated), self._in_rows(by_row)

        run = placed if plan.model_axes.names else local
        return jax.jit(program)

    def _local(self, weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Evaluated:
        own = of_this_device(variables, self._plan.axes)
        loss, by_row = self._forward(weights, batch, own, shared)
        return None if loss is None else self._mean(sum_over_devices(loss, self._plan.axes.names)), by_row

    def _whole(self, weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Evaluated:
        loss, by_row = self._forward(weights, batch, variables, shared)
        return None if loss is None else self._mean(loss), self._in_rows(by_row)

    def _in_rows(self, by_row: Any) -> Any:
        rows = NamedSharding(self._plan.mesh, self._plan.axes.batch_spec)
        return lax.with_sharding_constraint(by_row, rows)

    def _forward(self, weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Evaluated:
        plan = self._plan

        def call(weights: Buffers, batch: Batch, variables: Variables, shared: Shared) -> Any:
            held = hold(plan, weights)
            return call_model(plan, collectors(plan), held, variables, self._fn, batch, shared)[0]

        if plan.prefetch:
            call = pipelined(call, ways_of(plan, forward=True))
        returned = call(weights, batch, variables, shared)
        if self._has_aux or is_loss(returned):
            return as_parts(returned, self._has_aux), None
        rows = jax.tree.leaves(batch)[0].shape[0]
        wrong = {
            jax.tree_util.keystr(path): jnp.shape(leaf)
            for path, leaf in jax.tree.leaves_with_path(returned)
            if jnp.shape(leaf)[:1] != (rows,)
        }
        if wrong:
            raise ValueError(
                f"fn: expected a loss (a scalar, or (sum, weight)), or arrays with the {rows} rows that it got as "
                f"first dimension, got shapes {wrong}: statistics of the batch go beside a loss with has_aux=True"
            )
        return None, returned

    def _mean(self, loss: LossParts) -> LossParts:
        return Divisors.of(self._plan, 1, None).divided(loss, {})[0]

    def _check(self, program: Any) -> None:
        check_seals(program)
        one_part = self._plan.engine == "pjit" or self._plan.data_ranks == 1
        check_means(program, equal_parts=self._equal_parts or one_part)

    def _filled(self, batch: Batch) -> tuple[int, Batch, int]:
        """Rows after padding, the padded batch, and rows before."""
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if len(sizes) != 1 or () in sizes or (0,) in sizes:
            # shard_batch refuses it in words.
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
    plan: ShardingPlan, fn: Callable[..., Any], *, has_aux: bool = False, equal_parts: bool = False
) -> EvalStep:
    """``evaluate(state, batch, *shared)``: ``fn(model, rows, *shared)`` on all rows, forward only, nothing donated.

    ``fn`` returns a loss as for ``make_train_step``, and ``evaluate`` the metrics of the batch; or a pytree of arrays
    that have its rows as first dimension (logits ``[rows, T, V]``, samples, caches), and ``evaluate`` returns those of
    the whole batch. Then any number of rows will do: missing ones are filled up and cut off again::

        validate = make_eval_step(plan, loss)
        metrics = validate(state, rows)                              # {"loss": ...}
        logits = make_eval_step(plan, lambda model, tokens: model(tokens)[:, -1])
        for _ in range(20):                                          # greedy, one token a call
            tokens = jnp.concatenate([tokens, logits(state, tokens).argmax(-1)[:, None]], axis=1)

    A loop may also be inside ``fn`` (``lax.fori_loop``), where each pass gathers each unit's weights anew.

    state: a train state, or weights by key for a model without other variables. Variables are read: what the model
        changes (batch statistics) is dropped. Random streams differ by device, as in training; ``model.eval()`` in
        ``fn`` turns dropout off. shared: arrays and numbers that every device has whole.

    Raises ``ValueError`` in the first call for what is refused in training, for outputs that are neither a loss nor
    rows, and for a loss over rows that the number of devices does not divide.
    """
    return EvalStep(plan, fn, has_aux, equal_parts)
