"""The training step: microbatched, sharded gradients, then the optimizer on the main-weight shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_impl.buffer import pack
from jax_impl.collective import fence, one_after_another
from jax_impl.forward import call_model, hold
from jax_impl.mesh import AXIS, is_simulated
from jax_impl.optimizer import MainWeightTransformation
from jax_impl.plan import Buffers, ShardingPlan
from jax_impl.precision import divide_exactly

Loss = Callable[[nnx.Module, Any], jax.Array]
Batch = Any
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """``weights``: main weights, one flat array a unit. ``opt_state``: the optimizer's, moments in equal arrays."""

    weights: Buffers
    opt_state: Any


def init_state(plan: ShardingPlan, weights: Buffers, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; moments are born sharded."""
    # By shape alone: a transformation may keep moments under other keys than the weights'.
    shapes = {buffer.shape for buffer in weights.values()}
    shardings = jax.tree.map(
        lambda leaf: plan.sharding if leaf.shape in shapes else plan.replicated,
        jax.eval_shape(optimizer.init, weights),
    )
    return TrainState(weights, jax.jit(optimizer.init, out_shardings=shardings)(weights))


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
    return jax.device_put(batch, NamedSharding(plan.mesh, PartitionSpec(AXIS)))


def make_gradients(
    plan: ShardingPlan, loss_fn: Loss, microbatches: int = 1
) -> Callable[[Buffers, Batch], tuple[jax.Array, Buffers]]:
    """``(weights, batch) -> (loss, gradients)``, not jitted; ``batch`` as ``shard_batch`` places it.

    ``loss_fn(model, microbatch)`` is a mean over the microbatch's rows. Loss and gradients are means over all ranks
    and microbatches; gradients are buffers like the weights, in the main dtype.
    """

    def local(weights: Buffers, batch: Batch) -> tuple[jax.Array, Buffers]:
        varied, fixed = hold(plan, weights)

        def one(rows: Batch) -> tuple[jax.Array, Any]:
            loss, gradients = jax.value_and_grad(
                lambda varied: call_model(plan, varied, fixed, loss_fn, rows)
            )(varied)
            return loss, {
                name: jax.tree.map(lambda x, main=plan.units[name].wire.main: x.astype(main), gradient)
                for name, gradient in gradients.items()
            }

        loss, gradients = _sum_microbatches(one, batch, microbatches)
        loss, gradients = fence((loss, _reduce_whole(plan, gradients)))
        count = plan.num_devices * microbatches
        return jax.tree.map(partial(divide_exactly, divisor=count), (lax.psum(loss, AXIS), gradients))

    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(plan.spec, PartitionSpec(AXIS)),
        out_specs=(PartitionSpec(), plan.spec),
        # With the check on, explicit sums are done a second time: gradients come out N times too large.
        check_vma=False,
    )


def _sum_microbatches(
    one: Callable[[Batch], tuple[jax.Array, Any]], batch: Batch, microbatches: int
) -> tuple[jax.Array, Any]:
    """Loss and gradients summed over the contiguous parts of this rank's rows."""
    if microbatches == 1:
        return one(batch)
    parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first))

    def add(total: Any, rows: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(rows)), None

    return lax.scan(add, zeros, parts)[0]


def _reduce_whole(plan: ShardingPlan, gradients: Mapping[str, Any]) -> Buffers:
    """Sum over ranks what was accumulated whole; shards were summed in each unit's backward already."""
    if plan.strategy.shards_gradients:
        return dict(gradients)
    units = [plan.units[name] for name in gradients]
    packed = [pack(unit.layout, leaves) for unit, leaves in zip(units, gradients.values(), strict=True)]
    scatters = plan.strategy.shards_state
    reductions = [unit.wire.reduce_scatter if scatters else unit.wire.all_reduce for unit in units]
    return dict(zip(gradients, one_after_another(reductions, packed), strict=True))


class TrainStep:
    """``step(state, batch) -> (state, {"loss": scalar})``; the given state is donated and must not be used again.

    Two programs: gradients, then the optimizer's update, so that the update sees gradients in memory and rounds like
    one that is run on its own.
    """

    def __init__(
        self, plan: ShardingPlan, loss_fn: Loss, optimizer: optax.GradientTransformation, microbatches: int
    ) -> None:
        if microbatches < 1:
            raise ValueError(f"expected microbatches >= 1, got {microbatches}")
        self._plan = plan
        self._microbatches = microbatches
        self._optimizer = optimizer
        self._gradients = jax.jit(make_gradients(plan, loss_fn, microbatches))
        self._update: Callable[[TrainState, Buffers], TrainState] | None = None

    def gradients(self, weights: Buffers, batch: Batch) -> tuple[jax.Array, Buffers]:
        """Mean loss and mean gradients of one global batch, without an update."""
        return self._settled(self._gradients(weights, shard_batch(self._plan, batch, self._microbatches)))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, gradients = self.gradients(state.weights, batch)
        if self._update is None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
            self._update = jax.jit(self._updated, donate_argnums=0, out_shardings=shardings)
        return self._settled(self._update(state, gradients)), {"loss": loss}

    def _updated(self, state: TrainState, gradients: Buffers) -> TrainState:
        optimizer = self._optimizer
        if isinstance(optimizer, MainWeightTransformation):
            return TrainState(*optimizer.apply(gradients, state.opt_state, state.weights))
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.weights)
        return TrainState(optax.apply_updates(state.weights, updates), opt_state)

    def _settled(self, result: Any) -> Any:
        # Simulated devices share few threads: programs in flight together can wait for each other's for ever.
        return jax.block_until_ready(result) if is_simulated(self._plan.mesh) else result


def make_train_step(
    plan: ShardingPlan, loss_fn: Loss, optimizer: optax.GradientTransformation, *, microbatches: int = 1
) -> TrainStep:
    """A training step over global batches (see ``shard_batch``), each rank's rows cut into ``microbatches`` parts.

    ``loss_fn(model, rows)`` gives the mean loss over ``rows``. ``optimizer`` is any optax transformation; it sees one
    flat array a unit, not parameters. Raises ``ValueError`` for ``microbatches < 1``.
    """
    return TrainStep(plan, loss_fn, optimizer, microbatches)
