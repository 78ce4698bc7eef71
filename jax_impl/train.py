"""The training step: sharded gradients, then the optimizer on the main-weight shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_impl.comm.collectives import fence
from jax_impl.comm.mesh import is_simulated
from jax_impl.optimizer.in_turn import lies_on_host, update_in_turn
from jax_impl.optimizer.logical import fit_to_plan
from jax_impl.optimizer.transformation import MainWeightTransformation
from jax_impl.runtime.groups.memory_kinds import (
    HOST,
    check_not_donated,
    constrain,
    in_memory,
    memory_kinds,
    on_device,
)
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.variables import Variables
from jax_impl.runtime.step.gradients import (
    Batch,
    GradDivisor,
    Loss,
    Shared,
    check_aux,
    check_program,
    unchecked_gradients,
)
from jax_impl.runtime.step.losses import LossParts
from jax_impl.train_state import TrainState, check_state, place_shared, shard_batch, shardings_of, trainable

Metrics = dict[str, Any]
# JAX's error for closed-over arrays in a loop has no public name.
_CLOSED_OVER = "CustomVJPException"


@dataclass(frozen=True)
class StepOptions:
    """See ``make_train_step``."""

    equal_parts: bool
    has_aux: bool
    donate: bool
    wait: bool | None
    grad_divisor: GradDivisor
    metrics: tuple[str, ...]


class TrainStep:
    """``step(state, batch, *shared) -> (state, metrics)``; unless ``donate=False`` the step consumes the given state.

    ``metrics``: "loss"; "weight" if the loss returns ``(sum, weight)``; "aux" with ``has_aux``; and the metrics that
    ``metrics=`` names.

    A step runs two programs, gradients and then the optimizer's update, so that the update reads gradients from memory
    and rounds like a separate update. In one program XLA would contract the update's products differently, and the last
    bits would depend on the model.

    The step is also a pure function: inside ``jax.jit``, ``lax.scan`` and the like it is traced as a part of the
    enclosing program, which decides about donation; ``lower`` returns such a program for a single step.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        loss_fn: Loss,
        optimizer: optax.GradientTransformation,
        microbatches: int,
        options: StepOptions,
    ) -> None:
        if microbatches < 1:
            raise ValueError(f"expected microbatches >= 1, got {microbatches}")
        self._plan = plan
        self._microbatches = microbatches
        self._options = options
        own = isinstance(optimizer, MainWeightTransformation)
        self._optimizer = optimizer.on_plan(plan) if own else optimizer
        self._fitted = fit_to_plan(plan, optimizer)
        self._gradients = jax.jit(
            unchecked_gradients(plan, loss_fn, microbatches, options.has_aux, options.grad_divisor),
            static_argnames="to_host",
        )
        self._checked: set[Any] = set()
        # By the kinds of memory of a state: out_shardings name them, so each combination has its own program.
        self._updates: dict[Any, Callable[..., tuple[Buffers, Any, Metrics]]] = {}

    def gradients(
        self, weights: Buffers, batch: Batch, variables: Variables | None = None, shared: Shared = ()
    ) -> tuple[Any, Buffers]:
        """Loss (with ``has_aux``, ``(loss, aux)``) and gradients of one global batch, without an update."""
        loss, gradients, _ = self._run(weights, batch, variables or {}, shared)
        return (loss.value, loss.aux) if self._options.has_aux else loss.value, gradients

    def __call__(self, state: TrainState, batch: Batch, *shared: Any) -> tuple[TrainState, Metrics]:
        for path, leaf in jax.tree.leaves_with_path(state.opt_state):
            check_not_donated(f"optimizer state {jax.tree_util.keystr(path)}", leaf)
        state = state.placed(self._plan)
        loss, gradients, variables = self._run(
            state.weights, batch, state.variables, shared, to_host=self._sends_gradients(state)
        )
        if _is_traced((state, gradients)):
            *updated, extra = self._update_state(state.weights, state.opt_state, gradients, loss.value)
            shardings = self._plan.shardings, shardings_of(self._plan, state.opt_state)
            weights, opt_state = constrain(tuple(updated), shardings)
        else:
            lying = memory_kinds((state.weights, state.opt_state))
            if lying not in self._updates:
                self._updates[lying] = self._update(state)
            result = self._updates[lying](state.weights, state.opt_state, gradients, loss.value)
            weights, opt_state, extra = settle(self._plan, result, self._options.wait)
        return TrainState(weights, opt_state, variables), {**loss.metrics(self._options.has_aux), **extra}

    def lower(self, state: TrainState, batch: Batch, *shared: Any) -> jax.stages.Lowered:
        """The program of a whole step, for compiling ahead of time, costing or reading.

        All arguments may be shapes (``abstract_state``, ``jax.ShapeDtypeStruct``). Call the compiled program like the
        step. Its update is part of the program, so its last bits may differ from the step's.
        """
        # Donate the whole state: ``init_state`` copies variables, so nothing else holds their memory.
        donated = (0,) if self._options.donate else ()
        return jax.jit(self, donate_argnums=donated).lower(state, batch, *shared)

    def lower_programs(
        self, state: TrainState, batch: Batch, *shared: Any
    ) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """The two programs that a call runs outside other programs: gradients, then the update.

        All arguments are shapes; the batch and ``shared`` include their shardings: rows ``[devices x microbatches x
        rows of a part, ...]`` on ``plan.axes.batch_spec``. Raises ``ValueError`` for a loss that a call would refuse.
        """
        arguments = (state.weights, batch, state.variables, shared)
        to_host = self._sends_gradients(state)
        traced = self._trace_checked(*arguments, to_host=to_host)
        loss, shapes, _ = traced.out_info
        lying = {key: in_memory(self._plan.sharding(key), HOST if to_host else None) for key in shapes}
        gradients: Any = {
            key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=lying[key])
            for key, array in shapes.items()
        }
        whole: Any = jax.ShapeDtypeStruct(loss.value.shape, loss.value.dtype, sharding=self._plan.replicated)
        update = self._update(state).lower(state.weights, state.opt_state, gradients, whole)
        return traced.lower(), update

    def _update(self, state: TrainState) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.weights, state.opt_state))
        # New weights and moments reuse the memory of the old ones, or both would exist at the end.
        donated = (0, 1) if self._options.donate else ()
        return jax.jit(
            self._update_state, donate_argnums=donated, out_shardings=(*shardings, self._plan.replicated)
        )

    def _sends_gradients(self, state: TrainState) -> bool:
        """Whether gradients go to host memory."""
        own = trainable(self._plan, state.weights)
        return self._plan.brings_units and lies_on_host(self._plan, state.opt_state, own)

    def _run(
        self, weights: Buffers, batch: Batch, variables: Variables, shared: Shared, to_host: bool = False
    ) -> tuple[LossParts, Buffers, Variables]:
        check_state(self._plan, weights, variables)
        placed = shard_batch(self._plan, batch, self._microbatches)
        whole = place_shared(self._plan, shared)
        try:
            leaves, structure = jax.tree.flatten((placed, whole))
            traced = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
            if traced not in self._checked:
                program = self._trace_checked(weights, placed, variables, whole, to_host=to_host)

                def aux_of(rows: Batch) -> Any:
                    return self._gradients(weights, rows, variables, whole)[0].aux

                check_aux(self._plan, aux_of, program.out_info[0].aux, placed, self._microbatches)
                self._checked.add(traced)
            result = self._gradients(weights, placed, variables, whole, to_host=to_host)
            return settle(self._plan, result, self._options.wait)
        except Exception as error:
            escaped = isinstance(error, jax.errors.UnexpectedTracerError)
            if not escaped and type(error).__name__ != _CLOSED_OVER:
                raise
            raise ValueError(
                "loss: expected arrays that depend on weights, or on the iteration of a loop, as arguments of a "
                "unit's call, got such an array from a closure, whose gradient the call cannot pass on: pass the "
                "array to call_unit as an argument. An array kept from an earlier trace is refused, too"
            ) from error

    def _trace_checked(
        self, weights: Buffers, batch: Batch, variables: Variables, shared: Shared, *, to_host: bool
    ) -> Any:
        """The traced gradients of a valid loss; raises ``ValueError`` for other losses."""

        # Tracing is half of the work of the first call, which reuses this trace.
        def trace(rows: Batch) -> Any:
            return self._gradients.trace(weights, rows, variables, shared, to_host=to_host)

        traced, equal_parts = trace(batch), self._options.equal_parts
        check_program(
            self._plan, traced.jaxpr, lambda rows: trace(rows).jaxpr, batch, self._microbatches, equal_parts
        )
        return traced

    def _update_state(
        self, weights: Buffers, opt_state: Any, gradients: Buffers, loss: jax.Array
    ) -> tuple[Buffers, Any, Metrics]:
        metrics: Metrics = {}
        if GRAD_NORM in self._options.metrics:
            metrics[GRAD_NORM] = grad_norm(on_device(gradients))
        trained = trainable(self._plan, weights)
        shardings = shardings_of(self._plan, opt_state), {key: self._plan.sharding(key) for key in trained}
        after, trained = update_in_turn(
            self._plan, self._optimize, gradients, opt_state, trained, loss, shardings
        )
        if LEARNING_RATE in self._options.metrics:
            metrics[LEARNING_RATE] = learning_rate(self._optimizer, *on_device((opt_state, after)))
        return {key: trained.get(key, array) for key, array in weights.items()}, after, metrics

    def _optimize(
        self, gradients: Buffers, opt_state: Any, trained: Buffers, loss: jax.Array
    ) -> tuple[Any, Buffers]:
        if isinstance(self._optimizer, MainWeightTransformation):
            weights, opt_state = self._optimizer.apply(gradients, opt_state, trained)
            return opt_state, weights
        updates, opt_state = self._fitted.update(gradients, opt_state, trained, value=loss)
        return opt_state, optax.apply_updates(trained, updates)


def settle(plan: ShardingPlan, result: Any, wait: bool | None = None) -> Any:
    """A program's results, immediately or after waiting for them; by default, wait on simulated devices."""
    # Simulated devices share few threads: concurrent programs can wait for each other's threads forever.
    wait = is_simulated(plan.mesh) if wait is None else wait
    return jax.block_until_ready(result) if wait and not _is_traced(result) else result


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def make_train_step(
    plan: ShardingPlan,
    loss_fn: Loss,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    equal_parts: bool = False,
    has_aux: bool = False,
    donate: bool = True,
    wait: bool | None = None,
    grad_divisor: GradDivisor = None,
    metrics: Sequence[str] = (),
) -> TrainStep:
    """A training step over global batches (see ``shard_batch``), each rank's rows cut into ``microbatches`` parts.

    ``loss_fn(model, rows, *shared)`` returns the mean loss over ``rows`` with equal weights, or ``(sum, weight)`` if
    rows have unequal weights::

        def loss(model, rows):                              # right on any number of devices and microbatches
            losses = token_losses(model(rows["tokens"]), rows)
            return jnp.sum(losses * rows["mask"]), jnp.sum(rows["mask"])

    ``shared`` are the arguments of a step after its batch, ``step(state, batch, key, teacher)``: arrays and numbers
    that every device holds whole, the same in all microbatches. So one random key gives the same numbers to all
    devices; for different numbers put one key per row into the batch: ``jax.random.split(key, rows)``.

    For ``sum(losses * mask) / sum(mask)``, which is refused, ``equal_parts``, ``has_aux`` and ``grad_divisor`` see
    ``make_gradients``. ``metrics``: additional metrics: "grad_norm", of the whole model's gradients as the optimizer
    gets them, and "learning_rate", of ``main_weight_adamw`` or ``optax.inject_hyperparams``. ``donate``: whether a step
    may reuse the memory of the given state. ``wait``: whether a step waits for its results; by default only on
    simulated devices, which need it.

    ``optimizer``: an optax transformation. If it treats each element alike, wherever it is stored, except for sums over
    everything (a global norm), it runs directly on the shards. If it looks at shapes or names, it gets the model's own
    tree of parameters, at the cost of gathering them in each step (``optimizer/logical.py``). Its programs, traced over
    all parameters, decide this. Transformations that accept ``value`` get the loss.

    Raises ``ValueError`` for ``microbatches < 1``, and for an optimizer that needs more than gradients, its state,
    weights and the loss.
    """
    check_metrics(metrics)
    options = StepOptions(equal_parts, has_aux, donate, wait, grad_divisor, tuple(metrics))
    return TrainStep(plan, loss_fn, optimizer, microbatches, options)


GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"
STEP_METRICS = (GRAD_NORM, LEARNING_RATE)


def check_metrics(wanted: Sequence[str]) -> None:
    """Raise ``ValueError`` for a metric that is not in ``STEP_METRICS``, and for a string in place of a list."""
    if isinstance(wanted, str) or any(name not in STEP_METRICS for name in wanted):
        raise ValueError(f"metrics: expected a list of names among {list(STEP_METRICS)}, got {wanted!r}")


def grad_norm(gradients: Buffers) -> jax.Array:
    """The Euclidean norm of all gradients, before an optimizer clips them: float32, or float64 for float64 gradients.

    Padding is zero, so arrays at rest have the same norm as the parameters' gradients.
    """
    squares: Any = jnp.float32(0)
    last: Any = ()
    for array in gradients.values():
        # Collectives run one after another: see forward.hold. At least float32: float16 squares overflow from 256.
        array, last = fence((array, last))
        wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
        last = jnp.sum(wide * wide)
        squares = squares + last
    return jnp.sqrt(squares)


def learning_rate(optimizer: optax.GradientTransformation, before: Any, after: Any) -> jax.Array:
    """The learning rate of the update between two optimizer states.

    Raises ``ValueError`` if the states do not contain it.
    """
    if isinstance(optimizer, MainWeightTransformation):
        rate = optimizer.learning_rate
        return jnp.asarray(rate(before.count) if callable(rate) else rate, jnp.float32)
    # A schedule's own state uses the same key.
    rates = optax.tree_utils.tree_get_all_with_path(
        after, LEARNING_RATE, filtering=lambda _, value: isinstance(value, jax.Array)
    )
    if len(rates) != 1:
        raise ValueError(
            f"metrics: expected an optimizer whose state has one learning rate, got {len(rates)}: build it with "
            "optax.inject_hyperparams(optax.adamw)(learning_rate=schedule), or use main_weight_adamw"
        )
    return jnp.asarray(rates[0][1])
