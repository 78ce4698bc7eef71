"""AdamW on main-weight shards, with the numbers of PyTorch's fused AdamW.

Fed the same gradients, weights and moments come out bit for bit as from ``torch.optim.AdamW(fused=True)`` on CPU
(with ``eps > 0``; a few ulp off where PyTorch's scalar loop handles what whole vectors left of a tensor). That takes
two things: scalars computed in host doubles and rounded once, and products written in the order in which the compiler
contracts them to fused multiply-adds, as there is no way to ask for those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_LONGEST_TABLE = 1 << 22


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdamWState:
    """``count``: int32 scalar, steps done. ``mu``, ``nu``: moments, shaped and sharded like the weights."""

    count: jax.Array
    mu: Any
    nu: Any


class MainWeightTransformation(optax.GradientTransformation):
    """An optax transformation that can also return the new weights themselves.

    ``apply(gradients, state, weights) -> (weights, state)``. Adding optax's ``updates`` to the weights rounds once
    more, which is invisible to training but not to a comparison of bits.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __new__(
        cls, init: Callable[[Any], Any], apply: Callable[[Any, Any, Any], tuple[Any, Any]]
    ) -> MainWeightTransformation:
        def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            if params is None:
                raise ValueError(
                    "main_weight_adamw: expected the weights as third argument of update, got None"
                )
            weights, state = apply(gradients, state, params)
            return jax.tree.map(jnp.subtract, weights, params), state

        self = super().__new__(cls, init, update)
        self.apply = apply
        return self


def main_weight_adamw(
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> MainWeightTransformation:
    """AdamW with decoupled weight decay; defaults are PyTorch's.

    Works on any pytree of float32 or float64 arrays; moments take their dtype. Raises ``ValueError`` for
    hyperparameters out of range.
    """
    hyperparameters = {
        "learning_rate": learning_rate,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    for name in ("b1", "b2"):
        if not 0 <= hyperparameters[name] < 1:
            raise ValueError(f"main_weight_adamw: expected 0 <= {name} < 1, got {hyperparameters[name]}")
        if _vanishing_step(hyperparameters[name], np.dtype(np.float64)) > _LONGEST_TABLE:
            raise ValueError(
                f"main_weight_adamw: expected {name} whose powers vanish within {_LONGEST_TABLE} steps, "
                f"got {hyperparameters[name]}"
            )
    for name in ("learning_rate", "eps", "weight_decay"):
        if not 0 <= hyperparameters[name] < math.inf:
            raise ValueError(f"main_weight_adamw: expected {name} >= 0, got {hyperparameters[name]}")

    def init(weights: Any) -> AdamWState:
        return AdamWState(
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.zeros_like, weights),
            jax.tree.map(jnp.zeros_like, weights),
        )

    def apply(gradients: Any, state: AdamWState, weights: Any) -> tuple[Any, AdamWState]:
        count = state.count + 1
        stepped = jax.tree.map(
            lambda w, m, v, g: _adamw(
                w, m, v, g, _scalars(count, w.dtype, learning_rate, b1, b2), hyperparameters
            ),
            weights,
            state.mu,
            state.nu,
            gradients,
        )
        new_weights, mu, nu = jax.tree.transpose(
            jax.tree.structure(weights), jax.tree.structure((0, 0, 0)), stepped
        )
        return new_weights, AdamWState(count, mu, nu)

    return MainWeightTransformation(init, apply)


def _adamw(
    w: jax.Array,
    m: jax.Array,
    v: jax.Array,
    g: jax.Array,
    scalars: tuple[jax.Array, jax.Array],
    h: Mapping[str, float],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    step_size, correction = scalars
    number = w.dtype.type

    def each(scalar: Any) -> jax.Array:
        # XLA turns division by a scalar into multiplication and drops a factor of one; it cannot see through this.
        return jnp.where(v >= 0, scalar, number(np.nan))

    g = g.astype(w.dtype)
    # The factor of one takes the contraction with the sum below, so that the decay is rounded on its own.
    w = (w * number(1 - h["learning_rate"] * h["weight_decay"])) * each(number(1))
    m = m + number(1 - h["b1"]) * (g - m)
    # The left product is the one that is contracted.
    v = (number(1 - h["b2"]) * g) * g + v * number(h["b2"])
    return w + (-step_size * m) / (jnp.sqrt(v) / each(correction) + number(h["eps"])), m, v


def _scalars(
    count: jax.Array, dtype: np.dtype, learning_rate: float, b1: float, b2: float
) -> tuple[jax.Array, jax.Array]:
    """``lr / (1 - b1 ** t)`` and ``sqrt(1 - b2 ** t)`` for a traced step ``t``, as rounded from host doubles.

    Powers in float32 inside the step would be off by 1e-5 relative in early steps. Both become constant once the
    power is below half an ulp of one, so a table of the steps before that is exact for every step.
    """
    corrections = (
        learning_rate / (1 - _powers(b1, dtype)),
        np.sqrt(1 - _powers(b2, dtype)),
    )
    first, second = (
        jnp.asarray(table.astype(dtype))[jnp.minimum(count, len(table)) - 1] for table in corrections
    )
    return first, second


@functools.cache
def _powers(base: float, dtype: np.dtype) -> np.ndarray:
    """``base ** t`` in float64 for t = 1, 2, ... until ``1 - base ** t`` rounds to one in ``dtype``."""
    return np.array([base**t for t in range(1, _vanishing_step(base, dtype) + 1)])


def _vanishing_step(base: float, dtype: np.dtype) -> int:
    negligible = 2.0 ** -(np.finfo(dtype).nmant + 4)
    return 1 if base == 0 else 1 + math.ceil(math.log(negligible) / math.log(base))
