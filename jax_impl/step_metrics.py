"""What a step tells besides its loss, on request: the gradients' norm and the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_impl.comm.collectives import fence
from jax_impl.optimizer.main_weight_adamw import MainWeightTransformation
from jax_impl.runtime.groups.sharding_plan import Buffers

GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"
STEP_METRICS = (GRAD_NORM, LEARNING_RATE)


def check_metrics(wanted: Sequence[str]) -> None:
    """Raises ``ValueError`` for a metric that is none of ``STEP_METRICS``, and for a string in place of a list."""
    if isinstance(wanted, str) or any(name not in STEP_METRICS for name in wanted):
        raise ValueError(f"metrics: expected a list of names among {list(STEP_METRICS)}, got {wanted!r}")


def grad_norm(gradients: Buffers) -> jax.Array:
    """The Euclidean norm of all gradients, before an optimizer clips them: float32, or float64 for float64 ones.

    Padding is zero, so arrays at rest have the norm of the parameters' gradients.
    """
    squares: Any = jnp.float32(0)
    last: Any = ()
    for array in gradients.values():
        # Its collectives one after another: see forward.hold.
        array, last = fence((array, last))
        wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
        last = jnp.sum(wide * wide)
        squares = squares + last
    return jnp.sqrt(squares)


def learning_rate(optimizer: optax.GradientTransformation, before: Any, after: Any) -> jax.Array:
    """That of the update between two optimizer states.

    Raises ``ValueError`` where the states do not have it.
    """
    if isinstance(optimizer, MainWeightTransformation):
        rate = optimizer.learning_rate
        return jnp.asarray(rate(before.count) if callable(rate) else rate, jnp.float32)
    # A schedule's own state has the same key.
    found = optax.tree_utils.tree_get_all_with_path(
        after, LEARNING_RATE, filtering=lambda _, value: isinstance(value, jax.Array)
    )
    if len(found) != 1:
        raise ValueError(
            f"metrics: expected an optimizer whose state has one learning rate, got {len(found)}: make it by "
            "optax.inject_hyperparams(optax.adamw)(learning_rate=schedule), or use main_weight_adamw"
        )
    return jnp.asarray(found[0][1])
