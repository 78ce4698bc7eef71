"""AdamW on main-weight shards, with the same results as PyTorch's fused AdamW.

Step ``t`` = 1, 2, ... of every element, as listed in ``torch_impl.optimizer.update``. ``[x]`` is a scalar that is
computed in double precision and rounded once to the dtype of the update. Every operation rounds; ``fma(x, y, z)`` is
``x * y + z`` rounded once::

    1   g = the gradient in the dtype of the update
    2   w = w * [fma(-lr, weight_decay, 1)]
    3   m = fma([1 - b1], g - m, m)                     if [1 - b1] < 0.5, else
        m = fma([1 - b1] - 1, g - m, g)
    4   v = fma([1 - b2] * g, g, v * [b2])              in whole vectors
        v = fma(v, [b2], ([1 - b2] * g) * g)            after a tensor's last whole vector
    5   w = w + (-[lr / (1 - b1**t)] * m) / (sqrt(v) / [sqrt(1 - b2**t)] + [eps])

The update computes in float64 for float64 weights, else in float32; bfloat16 and float16 weights
are rounded once, when they are stored. Moments of such weights are float32 by default.

JAX can neither request nor forbid a fused multiply-add: LLVM contracts every ``a * b + c`` that it sees, through
barriers and under all flags, and in a sum of two products it contracts the one that it meets first. XLA simplifies
operations with known scalars. So each sum below has at most one operand that is a product; every other product passes
through a select that the compiler cannot decide, and is therefore rounded first. A divisor also passes through a
select, since division by a scalar would become multiplication by its inverse. So an element's bits do not depend on its
position in an array or on its device.

``adam_w_mode=False`` has ``g = fma(w, [weight_decay], g)`` in place of line 2, and with
``bias_correction=False`` both ``1 - b**t`` are 1.

With the same gradients, the compiled step gives the weights and moments of ``torch.optim.AdamW(fused=True)`` on CPU bit
for bit, in float32 and float64, for any number of devices and any shard boundaries. Bias corrections come from a table
of host doubles that is part of the program, so the step count stays on the device. The equality depends on how LLVM
contracts products; tests check it. Two things differ from PyTorch:

- PyTorch uses the second form of line 4 for the tail of each tensor after whole vectors of 32 bytes: up to 7 elements,
  in float64 up to 3. (This holds for AVX2 and for AVX-512, whose compiler vectorized the loop over the tail with this
  length.) A flat array does not know where the tails are, so all elements use the first form, and the bits of the tails
  diverge. After 100 steps of 3000 tensors that consisted only of such tails, ``m`` was equal; 83 % of the elements of
  ``v`` differed (float64: 86 %), 4 % (8 %) by more than 5 ulp and none by more than 13 (17) ulp; 43 % (49 %) of ``w``
  differed, by at most 7 ulp of the largest value that the weight had had. ``torch_vector_bytes`` applies the second
  form to arrays that are tensors.
- JAX flushes subnormal numbers to zero.

Moments in low precision (``mu_dtype``, ``nu_dtype``) also equal those of ``torch_impl``'s ``MainWeightAdamW`` bit for
bit, both stored values and scales (``moments.py``).

All this refers to PyTorch's kernels for AVX2 and AVX-512. The kernel for other CPUs (``ATEN_CPU_CAPABILITY=default``)
contracts fewer products and gives other bits. On GPUs, no equality is promised.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_impl.comm.collectives import fence
from jax_impl.optimizer.moments import MomentArrays, MomentFormat, MomentRows, Parts
from jax_impl.optimizer.transformation import (
    ByArray,
    MainWeightTransformation,
    as_stored,
    check_flag,
    check_not_negative,
    check_number,
    check_rate,
    lerp,
)
from jax_impl.runtime.groups.precision import update_dtype

# The largest number of steps in a program's table of bias corrections: 32 MB of doubles for each beta.
_LONGEST_TABLE = 1 << 22
_NAME = "main_weight_adamw"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdamWState:
    """``count``: int32 scalar, steps done. ``mu``, ``nu``: moments, shaped and sharded like the weights.

    ``mu_scale``, ``nu_scale``: a float32 scale for each row of a scaled moment; None for formats without scales. See
    ``optimizer/moments.py``.
    """

    count: jax.Array
    mu: Any
    nu: Any
    mu_scale: Any = None
    nu_scale: Any = None


def main_weight_adamw(
    learning_rate: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    torch_vector_bytes: int | None = None,
) -> MainWeightTransformation:
    """AdamW, or Adam, with the defaults of PyTorch's AdamW.

    Works on any pytree of float arrays of 16 bits or more. Gradients have the same shapes and any floating dtype.

    learning_rate: a number, or an optax schedule: a function from the int32 count of completed steps to a scalar,
        evaluated inside the step. A scalar ``x`` gives the same bits as PyTorch with ``lr=float(x)``; a schedule's own
        arithmetic rounds differently in a compiled program than op by op.
    adam_w_mode: False for Adam, whose ``weight_decay`` is a part of the gradient (L2): the bits of
        ``torch.optim.Adam(fused=True)``.
    bias_correction: False sets both corrections to 1, as if infinitely many steps had been taken.
    mu_dtype, nu_dtype: the format of first and second moments between steps, a dtype or its name: bfloat16; or, with a
        float32 scale for each row, float16, float8_e4m3fn or float8_e5m2 (``optimizer/moments.py``). By default, and if
        rows are single elements: float32, or float64 for float64 weights.
    torch_vector_bytes: the vector size of PyTorch's CPU kernel; 32 in torch 2.13.0, with AVX2 and with AVX-512. Each
        array then has the bits of one tensor, also in its last elements; so the bits depend on where arrays end.

    Raises ``ValueError`` for hyperparameters out of range and ``TypeError`` for wrong types. ``init`` and ``update``
    raise for weights of a wrong dtype, ``update`` for gradients of a wrong shape and for a schedule that does not
    return a scalar.
    """
    constants = Constants(b1, b2, eps, weight_decay, adam_w_mode, bias_correction)
    _check(learning_rate, constants, torch_vector_bytes)
    first, second = (
        MomentFormat.of("mu_dtype", mu_dtype),
        MomentFormat.of("nu_dtype", nu_dtype, positive=True),
    )

    def scalars(count: jax.Array, rate: float | jax.Array, dtype: np.dtype) -> StepScalars:
        return step_scalars(count, dtype, rate, constants)

    update = partial(_update_array, constants, torch_vector_bytes)
    formats = {"mu": first, "nu": second}
    return ByArray(_NAME, learning_rate, formats, AdamWState, scalars, update).on(MomentArrays())


def _update_array(
    constants: Constants,
    vector_bytes: int | None,
    formats: Sequence[MomentFormat],
    rows: Sequence[MomentRows],
    held: tuple[jax.Array, list[Parts]],
    gradient: jax.Array,
    numbers: tuple[jax.Array, StepScalars],
) -> tuple[jax.Array, list[Parts]]:
    (weight, (first, second)), (count, scalars) = held, numbers
    moments = rows[0].decode(first), rows[1].decode(second)
    wide = weight.astype(update_dtype(weight.dtype))
    wide, m, v = adamw_update(wide, *moments, gradient, scalars, constants, vector_bytes)
    new = rows[0].encode(formats[0], m, count)
    if formats[1].scaled:
        # The largest magnitude of a row that is cut over devices needs a collective; collectives run in turn.
        v, new = fence((v, new))
    return as_stored(wide, weight.dtype), [new, rows[1].encode(formats[1], v, count)]


def _check(learning_rate: float | optax.Schedule, constants: Constants, vector_bytes: int | None) -> None:
    for name in ("b1", "b2"):
        beta = getattr(constants, name)
        check_number(name, beta, _NAME)
        if not 0 <= beta < 1:
            raise ValueError(f"main_weight_adamw: expected 0 <= {name} < 1, got {beta}")
        if vanishing_step(beta) > _LONGEST_TABLE:
            raise ValueError(
                f"main_weight_adamw: expected a {name} whose powers vanish within {_LONGEST_TABLE} steps, got {beta}"
            )
    check_rate("learning_rate", learning_rate, _NAME)
    for name in ("eps", "weight_decay"):
        check_not_negative(name, getattr(constants, name), _NAME)
    for name in ("adam_w_mode", "bias_correction"):
        check_flag(name, getattr(constants, name), _NAME)
    if vector_bytes not in (None, 32, 64):
        raise ValueError(
            f"main_weight_adamw: expected torch_vector_bytes of 32, 64 or None, got {vector_bytes}"
        )


# Below this, one minus a power equals one in double precision.
_NEGLIGIBLE = 2.0**-56


@dataclass(frozen=True)
class Constants:
    """The constants of all steps, except a constant learning rate; see ``main_weight_adamw``."""

    b1: float
    b2: float
    eps: float
    weight_decay: float
    adam_w_mode: bool = True
    bias_correction: bool = True


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepScalars:
    """Step ``t``: ``lr / (1 - b1**t)``, ``sqrt(1 - b2**t)``, ``fma(-lr, weight_decay, 1)``, in the weights' dtype."""

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
    """Weights and moments after the step. Arrays have one shape, float32 or float64; ``g`` any floating dtype.

    ``vector_bytes``: as in ``main_weight_adamw``.
    """
    number = w.dtype.type

    def opaque(x: Any) -> jax.Array:
        # A NaN in the second moment does not reach the gradient.
        return jnp.where(v < 0, number(np.nan), x)

    # A gradient from the same program may be a product.
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


def _tail(w: jax.Array, vector_bytes: int | None) -> jax.Array | None:
    """Mask of the elements, in row-major order, after the last whole vector; ``None`` if there are none."""
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

    Powers in float32 inside the step would have a relative error of 1e-5 in early steps, so powers come from tables of
    host doubles. If only the program knows the learning rate, scalars that depend on it are computed in double
    precision in the program, even if JAX's 64-bit types are off.
    """
    bias1, bias2 = (
        1 - powers(beta) if constants.bias_correction else np.ones(1) for beta in (constants.b1, constants.b2)
    )
    correction = _at(count, np.sqrt(bias2).astype(dtype))
    if not isinstance(learning_rate, jax.Array):
        # PyTorch's compiler contracts this, too. A Fraction converts to a float with one rounding.
        decay = dtype.type(float(1 - Fraction(learning_rate) * Fraction(constants.weight_decay)))
        return StepScalars(_at(count, (learning_rate / bias1).astype(dtype)), correction, decay)
    with jax.enable_x64(True):
        double = lax.convert_element_type(learning_rate, np.float64)
        # Contracted, as by PyTorch's compiler.
        left = np.float64(1) - double * np.float64(constants.weight_decay)
        step_size, decay = (lax.convert_element_type(x, dtype) for x in (double / _at(count, bias1), left))
    return StepScalars(step_size, correction, decay)


def _at(count: jax.Array, table: np.ndarray) -> jax.Array:
    return jnp.asarray(table)[jnp.minimum(count, np.int32(len(table))) - np.int32(1)]


@functools.cache
def powers(base: float) -> np.ndarray:
    """``base ** t`` in float64 for t = 1, 2, ... up to the first t for which ``1 - base ** t`` equals one."""
    return np.array([base**t for t in range(1, vanishing_step(base) + 1)])


def vanishing_step(base: float) -> int:
    """The length of ``powers(base)``."""
    return 1 if base == 0 else 1 + math.ceil(math.log(_NEGLIGIBLE) / math.log(base))
