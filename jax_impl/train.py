"""The training step: sharded gradients, then the optimizer on the main-weight shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from jax_impl.comm.mesh import is_simulated
from jax_impl.optimizer.logical import fitted
from jax_impl.optimizer.main_weight_adamw import MainWeightTransformation
from jax_impl.runtime.gradients import Batch, Loss, check_program, unchecked_gradients
from jax_impl.runtime.losses import LossParts
from jax_impl.runtime.sharding_plan import Buffers, ShardingPlan, check_not_donated
from jax_impl.runtime.variables import Variables

Metrics = dict[str, Any]
# JAX's error for it in a loop has no public name.
_CLOSED_OVER = "CustomVJPException"


@dataclass(frozen=True)
class StepOptions:
    """See ``make_train_step``."""

    equal_parts: bool
    has_aux: bool
    donate: bool
    wait: bool | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """``weights``: main weights, arrays by key. ``opt_state``: the optimizer's, moments in equal arrays.

    ``variables``: what else the model has (batch statistics, random streams), by path.
    """

    weights: Buffers
    opt_state: Any
    variables: Variables = field(default_factory=dict)


def init_state(
    plan: ShardingPlan,
    weights: Buffers,
    optimizer: optax.GradientTransformation,
    variables: Mapping[str, jax.Array] | None = None,
) -> TrainState:
    """The state before the first step; moments are born sharded, and frozen weights have none.

    ``variables``: ``variable_leaves(model)`` of a model that has variables other than parameters. Raises ``ValueError``
    when they are missing, or others than the plan's.
    """
    opt_state = _placed(plan, fitted(plan, optimizer).init, trainable(plan, weights))
    return TrainState(weights, opt_state, place_variables(plan, variables or {}))


def trainable(plan: ShardingPlan, weights: Buffers) -> Buffers:
    """The arrays that an optimizer sees."""
    return {key: array for key, array in weights.items() if key in plan.trainable}


def abstract_state(plan: ShardingPlan, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of ``init_state``'s result, without values: what ``TrainStep.lower`` needs."""
    weights: Any = {
        key: jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=plan.sharding(key))
        for key, stored in plan.arrays.items()
    }
    moments = jax.eval_shape(fitted(plan, optimizer).init, trainable(plan, weights))
    opt_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        moments,
        _shardings(plan, moments),
    )
    variables: Any = {
        path: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=plan.replicated)
        for path, info in plan.variables.items()
    }
    return TrainState(weights, opt_state, variables)


def _placed(plan: ShardingPlan, init: Callable[[Buffers], Any], weights: Buffers) -> Any:
    shardings = _shardings(plan, jax.eval_shape(init, weights))
    return jax.jit(init, out_shardings=shardings)(weights)


def _shardings(plan: ShardingPlan, opt_state: Any) -> Any:
    by_shape = {plan.arrays[key].shape: plan.sharding(key) for key in plan.trainable}

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        located = plan.locate_buffer(path, leaf)
        if located is not None:
            return plan.sharding(located[0])
        # A transformation may keep moments under other keys than the weights'.
        return by_shape.get(leaf.shape, plan.replicated)

    return jax.tree.map_with_path(sharding, opt_state)


def place_variables(plan: ShardingPlan, variables: Mapping[str, jax.Array]) -> Variables:
    """Whole on every device of the plan; raises ``ValueError`` for other variables than the plan's."""
    missing, unexpected = (
        sorted(plan.variables.keys() - variables.keys()),
        sorted(variables.keys() - plan.variables.keys()),
    )
    if missing or unexpected:
        raise ValueError(
            f"variables: expected those of the model that are no parameters, missing {missing[:5]}, unexpected "
            f"{unexpected[:5]}; jax_impl.variable_leaves(model) gives them"
        )
    for path, info in plan.variables.items():
        if variables[path].shape != info.shape or variables[path].dtype != info.dtype:
            raise ValueError(
                f"variable {path!r}: expected {info.dtype} of shape {info.shape}, got {variables[path].dtype} of shape "
                f"{variables[path].shape}"
            )
    return {path: _whole(plan, variables[path]) for path in plan.variables}


def _whole(plan: ShardingPlan, value: jax.Array) -> jax.Array:
    """``value`` on every device of the plan."""
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.device_put(value, plan.replicated)
    # Random keys cannot be put on devices of other processes, but their data can.
    data = jax.device_put(jax.random.key_data(value), plan.replicated)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))


def shard_batch(plan: ShardingPlan, batch: Batch, microbatches: int = 1) -> Batch:
    """Place global arrays ``[B, ...]`` on the mesh: rank r of N gets rows ``[r * B / N, (r + 1) * B / N)``.

    Raises ``ValueError`` unless all arrays have the same B, divisible by ranks x microbatches.
    """
    parts = plan.num_devices * microbatches
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes or next(iter(sizes))[0] % parts or next(iter(sizes))[0] == 0:
        raise ValueError(
            f"batch: expected arrays of one first dimension, a positive multiple of {parts} ({plan.num_devices} "
            f"devices x {microbatches} microbatches), got first dimensions {sorted(sizes)}"
        )
    return jax.device_put(batch, NamedSharding(plan.mesh, plan.axes.batch_spec))


class TrainStep:
    """``step(state, batch) -> (state, metrics)``; unless ``donate=False`` the given state must not be used again.

    ``metrics``: "loss"; "weight" where the loss returns ``(sum, weight)``; "aux" with ``has_aux``.

    Two programs: gradients, then the optimizer's update, so that the update sees gradients in memory and rounds like
    one that is run on its own. In one program XLA would contract the update's products differently, and the last bits
    would depend on the model.

    The step is a pure function as well: inside of ``jax.jit``, ``lax.scan`` and the like it is traced as a part of the
    one program around it, which decides about donation; ``lower`` gives that program of a step alone.
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
        self._optimizer = optimizer
        self._fitted = fitted(plan, optimizer)
        self._gradients = jax.jit(unchecked_gradients(plan, loss_fn, microbatches, options.has_aux))
        self._checked: set[Any] = set()
        self._update: Callable[..., tuple[Buffers, Any]] | None = None

    def gradients(
        self, weights: Buffers, batch: Batch, variables: Variables | None = None
    ) -> tuple[Any, Buffers]:
        """Loss and gradients of one global batch, without an update; ``(loss, aux)`` and gradients with ``has_aux``."""
        loss, found, _ = self._run(weights, batch, variables or {})
        return (loss.value, loss.aux) if self._options.has_aux else loss.value, found

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        for path, leaf in jax.tree.leaves_with_path(state.opt_state):
            check_not_donated(f"optimizer state {jax.tree_util.keystr(path)}", leaf)
        loss, gradients, variables = self._run(state.weights, batch, state.variables)
        if _is_traced((state, gradients)):
            shardings = self._plan.shardings, _shardings(self._plan, state.opt_state)
            updated = self._updated(state.weights, state.opt_state, gradients, loss.value)
            weights, opt_state = jax.lax.with_sharding_constraint(updated, shardings)
        else:
            if self._update is None:
                shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.weights, state.opt_state))
                donated = (0, 1) if self._options.donate else ()
                self._update = jax.jit(self._updated, donate_argnums=donated, out_shardings=shardings)
            weights, opt_state = self._settled(
                self._update(state.weights, state.opt_state, gradients, loss.value)
            )
        return TrainState(weights, opt_state, variables), self._metrics(loss)

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """The program of a whole step, to be compiled ahead, costed or read.

        ``state`` and ``batch`` may be shapes (``abstract_state``, ``jax.ShapeDtypeStruct``). The compiled program is
        called as the step is. Its update is a part of the program, so its last bits may be others than the step's own.
        """
        donated = (0,) if self._options.donate else ()
        return jax.jit(self, donate_argnums=donated).lower(state, batch)

    def _metrics(self, loss: LossParts) -> Metrics:
        metrics: Metrics = {"loss": loss.value}
        if loss.weight is not None:
            metrics["weight"] = loss.weight
        if self._options.has_aux:
            metrics["aux"] = loss.aux
        return metrics

    def _run(
        self, weights: Buffers, batch: Batch, variables: Variables
    ) -> tuple[LossParts, Buffers, Variables]:
        self._check(weights, variables)
        placed = shard_batch(self._plan, batch, self._microbatches)
        try:
            leaves, structure = jax.tree.flatten(placed)
            traced = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
            if traced not in self._checked:
                # Tracing is half of what the first call does, and remembered for it.
                program = self._gradients.trace(weights, placed, variables).jaxpr
                check_program(self._plan, program, self._microbatches, self._options.equal_parts)
                self._checked.add(traced)
            return self._settled(self._gradients(weights, placed, variables))
        except Exception as error:
            if (
                not isinstance(error, jax.errors.UnexpectedTracerError)
                and type(error).__name__ != _CLOSED_OVER
            ):
                raise
            raise ValueError(
                "loss: expected arrays that depend on weights, or on the passes of a loop, as arguments of a unit's "
                "call, got one from around the function (a closure), whose gradient the call cannot pass on: give "
                "it to call_unit as an argument. An array kept from an earlier trace is refused, too"
            ) from error

    def _check(self, weights: Buffers, variables: Variables) -> None:
        plan = self._plan
        if weights.keys() != plan.arrays.keys():
            raise ValueError(f"step: expected weights {list(plan.arrays)[:12]}, got {list(weights)[:12]}")
        for key, array in weights.items():
            plan.check_array(key, array)
        if variables.keys() != plan.variables.keys():
            raise ValueError(
                f"step: expected the model's variables {list(plan.variables)[:12]}, got {list(variables)[:12]}; give "
                "them to init_state, or to gradients"
            )

    def _updated(
        self, weights: Buffers, opt_state: Any, gradients: Buffers, loss: jax.Array
    ) -> tuple[Buffers, Any]:
        trained = trainable(self._plan, weights)
        if isinstance(self._optimizer, MainWeightTransformation):
            trained, opt_state = self._optimizer.apply(gradients, opt_state, trained)
        else:
            updates, opt_state = self._fitted.update(gradients, opt_state, trained, value=loss)
            trained = optax.apply_updates(trained, updates)
        return {key: trained.get(key, array) for key, array in weights.items()}, opt_state

    def _settled(self, result: Any) -> Any:
        wait = self._options.wait
        # Simulated devices share few threads: programs in flight together can wait for each other's for ever.
        wait = is_simulated(self._plan.mesh) if wait is None else wait
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
) -> TrainStep:
    """A training step over global batches (see ``shard_batch``), each rank's rows cut into ``microbatches`` parts.

    ``loss_fn(model, rows)`` returns the mean loss over ``rows``, each with the same weight, or ``(sum, weight)`` where
    rows have unequal weights::

        def loss(model, rows):                              # right on any number of devices and microbatches
            losses = token_losses(model(rows["tokens"]), rows)
            return jnp.sum(losses * rows["mask"]), jnp.sum(rows["mask"])

    For ``sum(losses * mask) / sum(mask)``, which is refused, ``equal_parts`` and ``has_aux`` see ``make_gradients``.
    ``donate``: whether a step may take the memory of the state that it is given. ``wait``: whether a step returns when
    its results are there; by default only on simulated devices, which need it.

    ``optimizer``: an optax transformation. One that does the same to each element wherever the element lies, but for
    sums over everything (a global norm), runs on the shards as they are. One that looks at shapes or names is given the
    model's own tree of parameters, at the cost of bringing them together in each step (``optimizer/logical.py``). A
    trial on small random numbers tells which. Transformations that ask for ``value`` get the loss.

    Raises ``ValueError`` for ``microbatches < 1``, and for an optimizer that needs more than gradients, its state,
    weights and the loss.
    """
    return TrainStep(plan, loss_fn, optimizer, microbatches, StepOptions(equal_parts, has_aux, donate, wait))
