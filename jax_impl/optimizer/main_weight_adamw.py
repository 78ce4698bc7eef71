"""AdamW on main-weight shards, with the numbers of PyTorch's fused AdamW.

Step ``t`` = 1, 2, ... of every element, the list of ``torch_impl.optimizer.update``. ``[x]`` is a scalar computed in
doubles and rounded once to the dtype of the weights. Every operation rounds; ``fma(x, y, z)`` is ``x * y + z`` rounded
once::

    1   g = the gradient in the dtype of the weights
    2   w = w * [fma(-lr, weight_decay, 1)]
    3   m = fma([1 - b1], g - m, m)                     if [1 - b1] < 0.5, else
        m = fma([1 - b1] - 1, g - m, g)
    4   v = fma([1 - b2] * g, g, v * [b2])              in whole vectors
        v = fma(v, [b2], ([1 - b2] * g) * g)            after a tensor's last whole vector
    5   w = w + (-[lr / (1 - b1**t)] * m) / (sqrt(v) / [sqrt(1 - b2**t)] + [eps])

Fed the same gradients, the compiled step gives the weights and moments of ``torch.optim.AdamW(fused=True)`` on CPU bit
for bit, in float32 and float64, whatever the number of devices and wherever shards begin and end. Bias corrections come
from a table of host doubles that is part of the program, so the step count stays on the device. The equality leans on
how LLVM contracts products; tests hold it. Two things are PyTorch's own:

- The second form of line 4, for what is left of each tensor after whole vectors of 32 bytes: up to 7 elements, in
  float64 3. (So it is with AVX2 and with AVX-512, where the compiler made vectors of this length out of the loop over
  what is left.) A flat array does not say where those are, so all elements take the first form, and there the bits
  part. After 100 steps of 3000 tensors that were nothing but such tails, ``m`` was equal; of ``v`` 83 % differed
  (float64: 86 %), 4 % (8 %) by more than 5 ulp and none by more than 13 (17); of ``w`` 43 % (49 %), by at most 7 ulp of
  the largest value that the weight had had. ``torch_vector_bytes`` gives the second form to arrays that are tensors.
- Numbers too small to be normal: JAX takes them for zero.

What is meant are PyTorch's kernels for AVX2 and AVX-512. The one for lesser CPUs (``ATEN_CPU_CAPABILITY=default``)
contracts fewer products, and its bits are others. No equality is promised where JAX runs on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_impl.optimizer.update import Constants, step_scalars, updated, vanishing_step

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
    more, which is invisible to training but not to a comparison of bits. ``learning_rate``: a number, or a schedule
    over the steps done before.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]
    learning_rate: float | optax.Schedule

    def __new__(
        cls,
        init: Callable[[Any], Any],
        apply: Callable[[Any, Any, Any], tuple[Any, Any]],
        learning_rate: float | optax.Schedule,
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
        self.learning_rate = learning_rate
        return self


def main_weight_adamw(
    learning_rate: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    torch_vector_bytes: int | None = None,
) -> MainWeightTransformation:
    """AdamW with decoupled weight decay; defaults are PyTorch's.

    Works on any pytree of float32 or float64 arrays; moments take their dtype. Gradients are arrays of the same shapes
    in any floating dtype.

    learning_rate: a number, or an optax schedule: a function of the int32 count of steps done before this one that
        gives a scalar, evaluated inside the step. A scalar ``x`` gives the bits that PyTorch gives with
        ``lr=float(x)``; a schedule's own arithmetic rounds in a compiled program otherwise than op by op.
    torch_vector_bytes: what PyTorch's CPU kernel computes at once; 32 in torch 2.13.0, with AVX2 and with AVX-512. Each
        array then has the bits of one tensor, also in its last elements; where arrays end hence shows in the bits.

    Raises ``ValueError`` for hyperparameters out of range; ``init`` and ``update`` do for weights of another dtype,
    ``update`` for gradients of another shape and for a schedule that gives no scalar.
    """
    constants = Constants(b1, b2, eps, weight_decay)
    _check(learning_rate, constants, torch_vector_bytes)

    def init(weights: Any) -> AdamWState:
        _check_weights(weights)
        return AdamWState(
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.zeros_like, weights),
            jax.tree.map(jnp.zeros_like, weights),
        )

    def apply(gradients: Any, state: AdamWState, weights: Any) -> tuple[Any, AdamWState]:
        _check_weights(weights)
        count = state.count + 1
        rate = _scheduled(learning_rate, state.count) if callable(learning_rate) else learning_rate
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(weights)}
        scalars = {dtype: step_scalars(count, dtype, rate, constants) for dtype in dtypes}

        def step(path: Any, w: Any, m: Any, v: Any, g: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            _check_gradient(path, w, g)
            return updated(w, m, v, g, scalars[w.dtype], constants, torch_vector_bytes)

        stepped = jax.tree.map_with_path(step, weights, state.mu, state.nu, gradients)
        new_weights, mu, nu = (
            jax.tree.map(lambda _, parts, i=part: parts[i], weights, stepped) for part in range(3)
        )
        return new_weights, AdamWState(count, mu, nu)

    return MainWeightTransformation(init, apply, learning_rate)


def _check(learning_rate: float | optax.Schedule, constants: Constants, vector_bytes: int | None) -> None:
    for name in ("b1", "b2"):
        beta = getattr(constants, name)
        if not 0 <= beta < 1:
            raise ValueError(f"main_weight_adamw: expected 0 <= {name} < 1, got {beta}")
        if vanishing_step(beta) > _LONGEST_TABLE:
            raise ValueError(
                f"main_weight_adamw: expected {name} whose powers vanish within {_LONGEST_TABLE} steps, got {beta}"
            )
    if not callable(learning_rate):
        _check_not_negative("learning_rate", learning_rate)
    for name in ("eps", "weight_decay"):
        _check_not_negative(name, getattr(constants, name))
    if vector_bytes not in (None, 32, 64):
        raise ValueError(
            f"main_weight_adamw: expected torch_vector_bytes of 32, 64 or None, got {vector_bytes}"
        )


def _check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"main_weight_adamw: expected {name} >= 0, got {value}")


def _check_weights(weights: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(weights):
        if leaf.dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"main_weight_adamw: expected weights in float32 or float64, got {leaf.dtype}{_at(path)}"
            )


def _check_gradient(path: Any, weight: Any, gradient: Any) -> None:
    shape = getattr(gradient, "shape", None)
    if shape != weight.shape or not jnp.issubdtype(gradient.dtype, jnp.floating):
        found = type(gradient).__name__ if shape is None else f"{gradient.dtype} of shape {shape}"
        raise ValueError(
            f"main_weight_adamw: expected a floating-point gradient of shape {weight.shape}, got {found}{_at(path)}"
        )


def _at(path: Any) -> str:
    return f" at {jax.tree_util.keystr(path)}" if path else ""


def _scheduled(schedule: optax.Schedule, done: jax.Array) -> float | jax.Array:
    """The learning rate after ``done`` steps; a number where the schedule does not depend on them."""
    rate = schedule(done)
    if np.shape(rate) != () or not jnp.issubdtype(jnp.result_type(rate), jnp.number):
        raise ValueError(
            f"main_weight_adamw: expected a schedule that gives a scalar, got {type(rate).__name__}"
            f" of shape {np.shape(rate)}"
        )
    if isinstance(rate, jax.Array):
        return rate
    _check_not_negative("learning_rate", float(rate))
    return float(rate)
