"""Losses and batches of a JAX model under comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.parity.jax.leaves import describe, is_floating, leaves, map_leaves
from bridge.parity.recorded.recording import call_model, in_rows, probe_values

Loss = Callable[[Any, Any], Any]


def as_batch(batch: Any, dtype: str) -> Any:
    """A batch of NumPy arrays as JAX arrays: floats in ``dtype``, integers as int32, booleans unchanged."""

    def leaf(_: str, array: Any) -> jax.Array:
        if is_floating(array):
            return jnp.asarray(array, dtype)
        return jnp.asarray(array, np.int32 if jnp.issubdtype(array.dtype, jnp.integer) else None)

    return map_leaves(leaf, batch)


def probe(
    model: Any, batch: Any, numbers: Mapping[str, np.ndarray] | None = None, rows: Sequence[int] | None = None
) -> jax.Array:
    """The sum over floating output leaves of leaf times ``numbers``, divided by the root of the leaf's size.

    Computed in the widest dtype of the leaves, at least float32. ``numbers``: by place; default ``probe_values`` of the
    leaves' numbers, for all leaves. ``rows``: the order of the batch's rows, None for the order of ``numbers``.
    """
    total: Any = None
    count = 0
    for where, leaf in leaves(call_model(model, batch)).items():
        if not is_floating(leaf) or not leaf.size or (numbers is not None and where not in numbers):
            continue
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        own = probe_values(str(count), leaf.shape) if numbers is None else numbers[where]
        part = jnp.sum(leaf.astype(wide) * jnp.asarray(in_rows(own, rows) / leaf.size**0.5, wide))
        total, count = part if total is None else total + part, count + 1
    if total is None:
        raise ValueError("loss 'probe': expected an output with floating arrays, found none; pass a loss")
    return total


def next_token(model: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy of ``batch [B, T + 1]``: ``model(tokens [B, T])`` gives logits ``[B, T, V]``."""
    if getattr(batch, "ndim", None) != 2 or is_floating(batch):
        raise ValueError(
            f"loss 'next_token': expected a batch of integer tokens [B, T + 1], got {describe(batch)}"
        )
    output = model(batch[:, :-1])
    logits = getattr(output, "logits", output)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), batch[:, 1:, None], axis=-1)
    return -jnp.mean(chosen)


def as_loss(loss: Loss | str | None) -> Loss:
    """The loss function for a name. Raises ``ValueError`` for unknown names."""
    if callable(loss):
        return loss
    named = {None: probe, "probe": probe, "next_token": next_token}
    if loss not in named:
        raise ValueError(f"loss: expected a function (model, batch), 'next_token' or 'probe', got {loss!r}")
    return named[loss]
