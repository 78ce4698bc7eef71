"""The inputs of a step: the train state, a batch that is cut over devices, and inputs that are whole on each device.

::

    batch rows     r0 r1 r2 r3 r4 r5 r6 r7     8 rows, 2 devices x 2 microbatches
    device         |--- 0 ---| |--- 1 ---|
    microbatch     | 0 | | 1 | | 0 | | 1 |

    6 rows         r0 r1 r2 r3 r4 r5 r5 r5     ``pad_batch``: the last row again, not counted:
    counted         1  1  1  1  1  1  0  0     weight 0 in a loss that returns (sum, weight)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from bridge.core.sharding.policy.optimizer_state import together
from jax_impl.comm.mesh import check_context
from jax_impl.optimizer.logical import fit_to_plan, warn_of_whole_moments
from jax_impl.optimizer.offload import Offload
from jax_impl.runtime.groups.memory_kinds import HOST, in_memory, move, on_device
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.variables import Variables

# Limit in bytes for a device's moments that wait for their transfer to host memory.
_AT_ONCE = 1 << 28


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """``weights``: main weights, arrays by key. ``opt_state``: the optimizer state, with moments in equal arrays.

    ``variables``: the model's other variables (batch statistics, random streams), by path.
    """

    weights: Buffers
    opt_state: Any
    variables: Variables = field(default_factory=dict)

    def placed(self, plan: ShardingPlan) -> TrainState:
        """The same with ``opt_state`` on the plan's devices: other arrays and numbers are placed as in a new state."""
        devices = set(plan.mesh.devices.flat)

        def is_placed(leaf: Any) -> bool:
            traced = isinstance(leaf, jax.core.Tracer)
            return traced or (isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices)

        def place(leaf: Any, sharding: NamedSharding) -> Any:
            if is_placed(leaf):
                return leaf
            # A copy, because a step may donate the state.
            value = jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf, jnp.result_type(leaf))
            return jax.device_put(value, sharding)

        if all(map(is_placed, jax.tree.leaves(self.opt_state))):
            return self
        opt_state = jax.tree.map(place, self.opt_state, shardings_of(plan, self.opt_state))
        return replace(self, opt_state=opt_state)


def init_state(
    plan: ShardingPlan,
    weights: Buffers,
    optimizer: optax.GradientTransformation,
    variables: Mapping[str, jax.Array] | None = None,
    *,
    offload: Offload | None = None,
) -> TrainState:
    """The state before the first step; moments are created sharded, and frozen weights have none.

    ``variables``: the model's variables other than parameters; by default from the model that ``fully_shard`` got.
    Raises ``ValueError`` if they are not the plan's, or if ``plan_sharding`` made the plan and none are given: pass
    ``variable_leaves(model)``. A ``RuntimeWarning`` names parameters whose moments are whole on every device, because
    the optimizer looks at shapes and the number of shards divides no dimension.

    ``offload``: the part of the state that is in host memory from the start, such as ``Offload(moments=0.5)``; a device
    never holds more than 256 MiB of this part at once. Offloaded weights are copies: drop the given ones.
    """
    check_context()
    if variables is None:
        # Copies, because a program of the whole step may donate the whole state.
        variables = {path: jnp.copy(value) for path, value in (plan.given_variables or {}).items()}
    _check(offload)
    opt_state = initial_moments(plan, weights, optimizer, offload)
    warn_of_whole_moments(plan, opt_state)
    if offload is not None and offload.main_weights:
        weights = {key: move(array, HOST) for key, array in weights.items()}
    return TrainState(weights, opt_state, place_variables(plan, variables))


def _check(offload: Offload | None) -> None:
    if not isinstance(offload, Offload | None):
        raise TypeError(
            f"offload: expected None or jax_impl.Offload, such as Offload(moments=0.5), got {offload!r}"
        )


def initial_moments(
    plan: ShardingPlan,
    weights: Buffers,
    optimizer: optax.GradientTransformation,
    offload: Offload | None = None,
) -> Any:
    """The optimizer state before the first step, created sharded."""
    init = fit_to_plan(plan, optimizer).init

    def on_devices(weights: Buffers) -> Any:
        return init(on_device(weights))

    trained = trainable(plan, weights)
    shapes = jax.eval_shape(init, trained)
    shardings = shardings_of(plan, shapes)
    if offload is None:
        return jax.jit(on_devices, out_shardings=shardings)(trained)
    leaves, placements = jax.tree.leaves(shapes), jax.tree.leaves(shardings)
    memory = jax.tree.leaves(offload.kinds(plan, shapes)[1])
    moments: dict[int, jax.Array] = {}
    for numbers in _batches(leaves, placements, memory):

        def some(weights: Buffers, numbers: Sequence[int] = numbers) -> list[jax.Array]:
            every = jax.tree.leaves(on_devices(weights))
            return [every[number] for number in numbers]

        born = jax.jit(some, out_shardings=[placements[number] for number in numbers])(trained)
        # Wait before the next moments are created.
        moments |= jax.block_until_ready(
            {n: move(array, memory[n]) for n, array in zip(numbers, born, strict=True)}
        )
    return jax.tree.unflatten(jax.tree.structure(shapes), [moments[number] for number in range(len(leaves))])


def _batches(
    leaves: Sequence[Any], shardings: Sequence[NamedSharding], memory: Sequence[str]
) -> Iterator[list[int]]:
    """Indices of arrays to create together: first all arrays on devices, then a few host arrays at a time."""
    yield [number for number, memory_kind in enumerate(memory) if not memory_kind]

    def size(number: int) -> int:
        leaf = leaves[number]
        return math.prod(shardings[number].shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)

    yield from together((number for number, memory_kind in enumerate(memory) if memory_kind), size, _AT_ONCE)


def trainable(plan: ShardingPlan, weights: Buffers) -> Buffers:
    """The arrays that an optimizer updates."""
    return {key: array for key, array in weights.items() if key in plan.trainable}


def abstract_state(
    plan: ShardingPlan, optimizer: optax.GradientTransformation, *, offload: Offload | None = None
) -> TrainState:
    """Shapes, dtypes and shardings of ``init_state``'s result, without values.

    For ``TrainStep.lower``, and for ``like`` of ``load_checkpoint``.
    """
    weights: Any = {
        key: jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=plan.sharding(key))
        for key, stored in plan.arrays.items()
    }
    moments = jax.eval_shape(fit_to_plan(plan, optimizer).init, trainable(plan, weights))
    _check(offload)
    own, memory = (Offload(0.0) if offload is None else offload).kinds(plan, moments)
    weights = {key: _abstract(array, array.sharding, own[key]) for key, array in weights.items()}
    opt_state = jax.tree.map(_abstract, moments, shardings_of(plan, moments), memory)
    variables: Any = {
        path: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=plan.variable_sharding(path))
        for path, info in plan.variables.items()
    }
    return TrainState(weights, opt_state, variables)


def _abstract(leaf: Any, sharding: NamedSharding, memory_kind: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=in_memory(sharding, memory_kind))


def shardings_of(plan: ShardingPlan, opt_state: Any) -> Any:
    """The sharding of every leaf of an optimizer state, abstract or not."""
    by_shape = {plan.arrays[key].shape: plan.sharding(key) for key in plan.trainable}

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if (located := plan.locate_buffer(path, leaf)) is not None:
            return plan.sharding(located[0])
        # Moments may have keys other than the weights' keys. A parameter's statistics (adafactor) are whole.
        name = f"/{jax.tree_util.keystr(path, simple=True, separator='/')}/"
        is_of_parameter = any(f"/{key}/" in name for key in (*plan.parameters, *plan.arrays))
        return plan.replicated if is_of_parameter else by_shape.get(np.shape(leaf), plan.replicated)

    return jax.tree.map_with_path(sharding, opt_state)


def place_variables(plan: ShardingPlan, variables: Mapping[str, jax.Array]) -> Variables:
    """Place variables as the plan says; raises ``ValueError`` for variables that are not the plan's."""
    missing = sorted(plan.variables.keys() - variables.keys())
    unexpected = sorted(variables.keys() - plan.variables.keys())
    if missing or unexpected:
        raise ValueError(
            f"variables: expected the model's variables that are not parameters, missing {missing[:5]}, unexpected "
            f"{unexpected[:5]}; jax_impl.variable_leaves(model) returns them"
        )
    for path, info in plan.variables.items():
        if variables[path].shape != info.shape or variables[path].dtype != info.dtype:
            raise ValueError(
                f"variable {path!r}: expected {info.dtype} of shape {info.shape}, got {variables[path].dtype} of shape "
                f"{variables[path].shape}"
            )
    return {
        path: jax.device_put(variables[path], plan.variable_sharding(path))
        if info.rule == "rows"
        else place_whole(plan, variables[path])
        for path, info in plan.variables.items()
    }


def whole_variables(plan: ShardingPlan, variables: Variables) -> Variables:
    """The variables whole on every device; all processes must call this, since rows are gathered."""
    gathered = jax.jit(lambda x: x, out_shardings=plan.replicated)
    return {
        path: gathered(value) if plan.variables[path].rule == "rows" else value
        for path, value in variables.items()
    }


def check_state(plan: ShardingPlan, weights: Buffers, variables: Variables) -> None:
    """Raise ``ValueError`` as ``check_context`` does, for another plan's weights or variables, for donated arrays."""
    check_context()
    if weights.keys() != plan.arrays.keys():
        raise ValueError(f"step: expected weights {list(plan.arrays)[:12]}, got {list(weights)[:12]}")
    for key, array in weights.items():
        plan.check_array(key, array)
    if variables.keys() != plan.variables.keys():
        raise ValueError(
            f"step: expected the model's variables {list(plan.variables)[:12]}, got {list(variables)[:12]}; pass them "
            "to init_state, or to gradients"
        )


Batch = Any


def shard_batch(plan: ShardingPlan, batch: Batch, microbatches: int = 1) -> Batch:
    """Place global arrays ``[B, ...]`` on the mesh: rank r of N gets rows ``[r * B / N, (r + 1) * B / N)``.

    Raises ``ValueError`` unless all arrays have the same B, divisible by ranks x microbatches; use ``pad_batch``
    otherwise. A batch may contain random keys, one per row.
    """
    parts = plan.data_ranks * microbatches
    sizes = _first_dimensions(batch)
    if len(sizes) != 1 or () in sizes or next(iter(sizes))[0] % parts or next(iter(sizes))[0] == 0:
        raise ValueError(
            f"batch: expected arrays of one first dimension, a positive multiple of {parts} ({plan.data_ranks} "
            f"devices x {microbatches} microbatches), got first dimensions {sorted(sizes)}: pad_batch pads a last "
            "batch, and inputs without rows (a key, a step number, another model's weights) come after the batch, as "
            "in step(state, batch, key)"
        )
    return jax.device_put(jax.tree.map(_as_jax_has_it, batch), NamedSharding(plan.mesh, plan.axes.batch_spec))


def _as_jax_has_it(leaf: Any) -> Any:
    """Cast a NumPy array to its dtype in JAX (int32 for int64 unless x64 is on)."""
    # device_put narrows an array once and caches the result: for a reused buffer, it would return the old rows.
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)) if isinstance(leaf, np.ndarray) else leaf


def pad_batch(
    plan: ShardingPlan, batch: Batch, microbatches: int = 1, rows: int | None = None
) -> tuple[Batch, np.ndarray]:
    """Pad a batch to a multiple with copies of its last row. Also returns float32 ``[rows]``: ones for rows that count.

    ::

        rows, counted = pad_batch(plan, rows, rows=256)   # the last batch as large as all others: no second compilation
        step(state, (rows, counted))

        def loss(model, batch):
            rows, counted = batch
            return jnp.sum(losses(model, rows) * counted), jnp.sum(counted)

    Copies of a real row cannot cause a nonfinite loss, as zeros can (``0 * nan`` is NaN). Only the loss ignores the
    copies: batch statistics and load balance see them.

    batch: a pytree of arrays ``[B, ...]``, on the host or on one device. rows: the number of rows after padding, by
    default the next multiple of devices x ``microbatches``.

    Raises ``ValueError`` for arrays with different first dimensions, for no arrays, and for ``rows`` that are fewer
    than the batch's rows or not a multiple.
    """
    sizes = _first_dimensions(batch)
    if len(sizes) != 1 or () in sizes or (0,) in sizes:
        raise ValueError(f"batch: expected arrays of one first dimension, got {sorted(sizes)}")
    ((have,),) = sizes
    parts = plan.data_ranks * microbatches
    target = -(-have // parts) * parts if rows is None else rows
    if target < have or target % parts:
        raise ValueError(
            f"rows: expected a multiple of {parts} ({plan.data_ranks} devices x {microbatches} microbatches) that is "
            f"at least the batch's {have}, got {rows}"
        )

    def padded(leaf: Any) -> Any:
        # Random keys are not NumPy arrays.
        where = np.minimum(np.arange(target), have - 1)
        return leaf[where] if isinstance(leaf, jax.Array) else np.asarray(leaf)[where]

    return jax.tree.map(padded, batch), (np.arange(target) < have).astype(np.float32)


def place_shared(plan: ShardingPlan, shared: tuple[Any, ...]) -> tuple[Any, ...]:
    """Place inputs without rows whole on every device. Raises ``ValueError`` unless they are arrays or numbers."""

    def place(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise ValueError(
                f"input {jax.tree_util.keystr(path)} after the batch: expected an array or a number, got "
                f"{type(leaf).__name__}: let a closure of the loss hold other values"
            )
        return place_whole(plan, leaf if isinstance(leaf, jax.Array | np.ndarray) else jnp.asarray(leaf))

    return jax.tree.map_with_path(place, shared)


def place_whole(plan: ShardingPlan, value: jax.Array | np.ndarray) -> jax.Array:
    """``value`` on every device of the plan."""
    value = _as_jax_has_it(value)
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.device_put(value, plan.replicated)
    # Random keys cannot be put on devices of other processes, but their data can.
    data = jax.device_put(jax.random.key_data(value), plan.replicated)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))


def _first_dimensions(batch: Batch) -> set[tuple[int, ...]]:
    return {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
