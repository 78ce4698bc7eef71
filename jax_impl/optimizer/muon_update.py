"""The arithmetic of one Muon update of one matrix or a stack of matrices, as in ``torch.optim.Muon``.

As listed in ``torch_impl.optimizer.muon_update``::

    1   m = lerp(m, g, 1 - momentum)
    2   u = lerp(g, m, momentum) with nesterov, else m
    3   o = Newton-Schulz iteration of u                the whole matrix, in bfloat16
    4   w = w * (1 - lr * weight_decay)
    5   w = w - adjusted lr * o

All lines except line 3 have PyTorch's bits; lines 4 and 5 compute in float32 (float64 for float64 weights) and round
bfloat16 and float16 weights once. Line 3 multiplies bfloat16 matrices, and XLA and PyTorch sum in different orders: so
``o``, whose elements are about one over the root of the longer side, differs by some units of bfloat16 (2**-8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.comm.collectives import round_to
from jax_impl.optimizer.transformation import as_stored, lerp, negative
from jax_impl.runtime.groups.precision import update_dtype


@dataclass(frozen=True)
class Constants:
    """The constants of all steps; see ``main_weight_muon``."""

    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, ...]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    outputs: int


def accumulate(constants: Constants, m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lines 1 and 2; the direction in bfloat16."""
    number = g.dtype.type
    m = lerp(m, g, number(1 - constants.momentum))
    u = lerp(g, m, number(constants.momentum)) if constants.nesterov else m
    # float64 is first rounded to float32, as in PyTorch.
    return m, round_to(u.astype(jnp.float32), np.dtype(jnp.bfloat16))


def orthogonalize(constants: Constants, direction: jax.Array) -> jax.Array:
    """Line 3, for bfloat16 ``[..., rows, columns]``."""
    a, b, c = (np.float32(number) for number in constants.ns_coefficients)
    half = np.dtype(jnp.bfloat16)
    tall = direction.shape[-2] > direction.shape[-1]
    x = jnp.swapaxes(direction, -1, -2) if tall else direction
    wide = x.astype(jnp.float32)
    norm = round_to(jnp.sqrt(jnp.sum(wide * wide, axis=(-2, -1), keepdims=True)), half)
    least = round_to(jnp.float32(constants.eps), half)
    x = round_to(wide / jnp.maximum(norm, least).astype(jnp.float32), half)
    for _ in range(constants.ns_steps):
        gram = round_to(_product(x, jnp.swapaxes(x, -1, -2)), half)
        polynomial = round_to(b * gram.astype(jnp.float32) + c * _product(gram, gram), half)
        x = round_to(a * x.astype(jnp.float32) + _product(polynomial, x), half)
    return jnp.swapaxes(x, -1, -2) if tall else x


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """The float32 product of bfloat16 matrices."""
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def apply_step(
    constants: Constants,
    weight: jax.Array,
    direction: jax.Array,
    rate: float | jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    """Lines 4 and 5."""
    dtype = update_dtype(weight.dtype)
    kept = -negative(rate, dtype, constants.weight_decay) if isinstance(rate, jax.Array) else None
    w, number = weight.astype(dtype), dtype.type
    scaled = w * (number(1 - rate * constants.weight_decay) if kept is None else number(1) - kept)
    # The per-element select forces rounding: see main_weight_adamw.py.
    scaled = jnp.where(w == w, scaled, number(np.nan))
    step_size = negative(rate, dtype, _adjustment(constants, shape))
    return as_stored(scaled + step_size * direction.astype(dtype), weight.dtype)


def _adjustment(constants: Constants, shape: tuple[int, ...]) -> float:
    """The factor on the learning rate of a matrix."""
    outputs, inputs = shape[constants.outputs], shape[-3 - constants.outputs]
    if constants.adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(outputs, inputs))
    return math.sqrt(max(1, outputs / inputs))
