"""What a step is given besides its state: a batch that is cut over the devices, and inputs that are whole on each.

::

    batch rows     r0 r1 r2 r3 r4 r5 r6 r7     8 rows, 2 devices x 2 microbatches
    device         |--- 0 ---| |--- 1 ---|
    microbatch     | 0 | | 1 | | 0 | | 1 |

    6 rows         r0 r1 r2 r3 r4 r5 r5 r5     ``pad_batch``: the last row again, not counted:
    counted         1  1  1  1  1  1  0  0     weight 0 in a loss that returns (sum, weight)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_impl.runtime.groups.sharding_plan import ShardingPlan

Batch = Any


def shard_batch(plan: ShardingPlan, batch: Batch, microbatches: int = 1) -> Batch:
    """Place global arrays ``[B, ...]`` on the mesh: rank r of N gets rows ``[r * B / N, (r + 1) * B / N)``.

    Raises ``ValueError`` unless all arrays have the same B, divisible by ranks x microbatches; ``pad_batch`` makes it
    so. Keys of random numbers, one a row, may be in it.
    """
    parts = plan.data_ranks * microbatches
    sizes = _first_dimensions(batch)
    if len(sizes) != 1 or () in sizes or next(iter(sizes))[0] % parts or next(iter(sizes))[0] == 0:
        raise ValueError(
            f"batch: expected arrays of one first dimension, a positive multiple of {parts} ({plan.data_ranks} "
            f"devices x {microbatches} microbatches), got first dimensions {sorted(sizes)}: pad_batch fills up a last "
            "batch, and what has no rows (a key, a step number, another model's weights) comes after the batch, as in "
            "step(state, batch, key)"
        )
    return jax.device_put(jax.tree.map(_as_jax_has_it, batch), NamedSharding(plan.mesh, plan.axes.batch_spec))


def _as_jax_has_it(leaf: Any) -> Any:
    """A NumPy array in the dtype that it gets in JAX (int32 for int64 unless x64 is on)."""
    # device_put narrows an array once and remembers the result: of a loader's buffer that is filled anew, the old rows.
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)) if isinstance(leaf, np.ndarray) else leaf


def pad_batch(
    plan: ShardingPlan, batch: Batch, microbatches: int = 1, rows: int | None = None
) -> tuple[Batch, np.ndarray]:
    """A batch that divides, by copies of its last row, and which rows count: float32 ``[rows]``, ones and zeros.

    ::

        rows, counted = pad_batch(plan, rows, rows=256)   # the last batch as large as all others: no second compilation
        step(state, (rows, counted))

        def loss(model, batch):
            rows, counted = batch
            return jnp.sum(losses(model, rows) * counted), jnp.sum(counted)

    Copies of a real row cannot give a loss that is not finite, as zeros can (``0 * nan`` is NaN). They are rows for
    everything but the loss: batch statistics and load balance see them.

    batch: a pytree of arrays ``[B, ...]``, on the host or on one device. rows: after padding; default the next multiple
    of devices x ``microbatches``.

    Raises ``ValueError`` for arrays of several first dimensions, for none, and for ``rows`` that are fewer than the
    batch has or do not divide.
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
        # Random keys are no NumPy arrays.
        where = np.minimum(np.arange(target), have - 1)
        return leaf[where] if isinstance(leaf, jax.Array) else np.asarray(leaf)[where]

    return jax.tree.map(padded, batch), (np.arange(target) < have).astype(np.float32)


def place_shared(plan: ShardingPlan, shared: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs that are no rows, whole on every device; ``ValueError`` for what is neither array nor number."""

    def place(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise ValueError(
                f"input {jax.tree_util.keystr(path)} after the batch: expected an array or a number, got "
                f"{type(leaf).__name__}: a function of the loss may hold other values"
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
