"""The arithmetic of one AdamW step, in a form in which XLA's CPU compiler keeps PyTorch's roundings.

What is computed, and in which order, is listed in ``jax_impl.optimizer.main_weight_adamw``. JAX has no way to ask for a
fused multiply-add, nor for none: LLVM contracts ``a * b + c`` wherever it sees one, through barriers and whatever the
flags, and in a sum of two products takes the one that it meets first. XLA simplifies what it knows about scalars. So

- each sum below has at most one operand that is a product; any other passes through a select that the compiler cannot
  decide, and so arrives rounded;
- a divisor passes through one too, as division by a scalar becomes multiplication by its inverse.

Neither depends on where in an array or on which device an element lies, and nor do its bits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.comm.collectives import fence, round_to

# Below this, one minus a power is one in doubles.
_NEGLIGIBLE = 2.0**-56


@dataclass(frozen=True)
class Constants:
    """What is the same in every step, but for a learning rate that is not scheduled; see ``main_weight_adamw``."""

    b1: float
    b2: float
    eps: float
    weight_decay: float
    adam_w_mode: bool = True
    bias_correction: bool = True


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepScalars:
    """Of step ``t``: ``lr / (1 - b1**t)``, ``sqrt(1 - b2**t)``, ``fma(-lr, weight_decay, 1)``, in weights' dtype."""

    step_size: Any
    correction: Any
    decay: Any


def adamw_update(
    w: jax.Array,
    m: jax.Array,
    v: jax.Array,
    g: jax.Array,
    scalars: StepScalars,
    constants: Constants,
    vector_bytes: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights and moments after the step: arrays of one shape, and of float32 or float64, ``g`` of any floating dtype.

    ``vector_bytes``: as in ``main_weight_adamw``.
    """
    number = w.dtype.type

    def opaque(x: Any) -> jax.Array:
        # NaN of a second moment is none of the gradient.
        return jnp.where(v < 0, number(np.nan), x)

    # A gradient that the same program computed may be a product.
    g = opaque(g.astype(w.dtype))
    if constants.adam_w_mode:
        w = opaque(w * scalars.decay)
    elif constants.weight_decay:
        g = opaque(g + opaque(w) * number(constants.weight_decay))
    m = lerp(m, g, number(1 - constants.b1))
    new, old = number(1 - constants.b2) * g, v * number(constants.b2)
    tail = _tail(w, vector_bytes)
    if tail is None:
        v = new * g + opaque(old)
    else:
        v = jnp.where(tail, v, new) * jnp.where(tail, number(constants.b2), g) + jnp.where(tail, new * g, old)
    denominator = jnp.sqrt(v) / opaque(scalars.correction) + opaque(number(constants.eps))
    return w + (-scalars.step_size * m) / denominator, m, v


def as_stored(weights: jax.Array, dtype: np.dtype) -> jax.Array:
    """Updated weights in the dtype of main weights, rounded once."""
    if dtype != jnp.float16:
        return round_to(weights, dtype)
    # ``round_to`` makes zeros of numbers below 2**-14, as many weights are. The fence keeps the cast a
    # rounding: XLA may drop a cast to float16 and back as excess precision.
    return fence(weights.astype(dtype))


def lerp(m: jax.Array, g: jax.Array, weight: np.floating) -> jax.Array:
    """From ``m`` towards ``g``, starting from the nearer one as PyTorch does."""
    return m + weight * (g - m) if weight < 0.5 else g + (weight - weight.dtype.type(1)) * (g - m)


def _tail(w: jax.Array, vector_bytes: int | None) -> jax.Array | None:
    """Mask of the elements, in row-major order, after the last whole vector; ``None`` where there are none."""
    left = 0 if vector_bytes is None else w.size % (vector_bytes // w.dtype.itemsize)
    if left == 0:
        return None
    index = jnp.zeros(w.shape, jnp.uint32)
    for axis, stride in enumerate(math.prod(w.shape[axis + 1 :]) for axis in range(w.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, w.shape, axis) * np.uint32(stride)
    return index >= np.uint32(w.size - left)


def step_scalars(
    count: jax.Array, dtype: np.dtype, learning_rate: float | jax.Array, constants: Constants
) -> StepScalars:
    """The scalars of step ``count`` (traced int32, from 1): PyTorch's doubles, rounded once to ``dtype``.

    Powers in float32 inside the step would be off by 1e-5 relative in early steps, so these come from tables of host
    doubles. What depends on a learning rate that only the program knows is computed in doubles in the program, also
    where JAX's 64-bit types are off.
    """
    bias1, bias2 = (
        1 - powers(beta) if constants.bias_correction else np.ones(1) for beta in (constants.b1, constants.b2)
    )
    correction = _at(count, np.sqrt(bias2).astype(dtype))
    if not isinstance(learning_rate, jax.Array):
        # PyTorch's compiler contracts this, too. A fraction becomes a float with one rounding.
        decay = dtype.type(float(1 - Fraction(learning_rate) * Fraction(constants.weight_decay)))
        return StepScalars(_at(count, (learning_rate / bias1).astype(dtype)), correction, decay)
    with jax.enable_x64(True):
        double = lax.convert_element_type(learning_rate, np.float64)
        # Contracted, as PyTorch's compiler does.
        left = np.float64(1) - double * np.float64(constants.weight_decay)
        step_size, decay = (lax.convert_element_type(x, dtype) for x in (double / _at(count, bias1), left))
    return StepScalars(step_size, correction, decay)


def _at(count: jax.Array, table: np.ndarray) -> jax.Array:
    return jnp.asarray(table)[jnp.minimum(count, np.int32(len(table))) - np.int32(1)]


@functools.cache
def powers(base: float) -> np.ndarray:
    """``base ** t`` in float64 for t = 1, 2, ... up to the first for which ``1 - base ** t`` is one."""
    return np.array([base**t for t in range(1, vanishing_step(base) + 1)])


def vanishing_step(base: float) -> int:
    """The length of ``powers(base)``."""
    return 1 if base == 0 else 1 + math.ceil(math.log(_NEGLIGIBLE) / math.log(base))
