"""Products in float8, for modules that take ``dot_general=``: ``float8_dot_general``.

    output   = lhs @ rhs               e4m3 by e4m3
    d lhs    = d output @ rhs^T        e5m2 by e4m3
    d rhs    = lhs^T @ d output        in the dtype of the factors

``rhs`` is the weight. The factors of a product are written as float8 numbers times a power of two. On GPUs with float8
products, and with ``--xla_gpu_enable_triton_gemm=false``, XLA turns this into a float8 product; elsewhere XLA
multiplies the same numbers in the dtype of the factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_impl.runtime.groups.float8 import E4M3, E5M2, Float8, encode, magnitudes, power_of, scales_of

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
_Static = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

# The kernels of torch_impl need matrices whose dimensions are multiples of this.
_MULTIPLE = 16
# With the default precision, Hopper's tensor cores would sum with fewer bits than float32. The factors need no more.
_SUMS = lax.Precision.HIGH


def float8_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Dimensions,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: jax.sharding.NamedSharding | jax.P | None = None,
) -> jax.Array:
    """``jax.lax.dot_general`` that multiplies in float8: activations ``lhs`` by a weight ``rhs``.

    flax's modules take it: ``nnx.Linear(16, 32, dot_general=float8_dot_general, rngs=rngs)``, linen's ``nn.Dense(32,
    dot_general=float8_dot_general)``. With ``fully_shard(..., gather_dtype="float8_e4m3fn")`` the weight loses nothing,
    because its values are already such numbers. Any other weight is rounded.

    Each factor is rounded to e4m3, and the gradient of the output to e5m2, times one power of two per factor. That
    power comes from the largest magnitude in this device's call; under pjit, and along model axes, from the largest
    over all devices. Sums are float32. The weight's gradient is a product of unrounded factors, with ``precision``.

    ``jax.lax.dot_general`` multiplies factors of different dtypes, factors that are neither bfloat16 nor float32,
    weights whose summed or other dimensions are not multiples of 16, and all products with an ``out_sharding``.
    """
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    dimensions = (tuple(lhs_summed), tuple(rhs_summed)), (tuple(lhs_batch), tuple(rhs_batch))
    if out_sharding is not None or not _can_multiply(lhs, rhs, dimensions):
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )
    dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    return _product(lhs, rhs, dimensions, precision, jnp.dtype(dtype))


def _can_multiply(lhs: jax.Array, rhs: jax.Array, dimensions: _Static) -> bool:
    if lhs.dtype != rhs.dtype or lhs.dtype not in (jnp.bfloat16, jnp.float32) or not lhs.size:
        return False
    (_, summed), (_, batch) = dimensions
    inputs = math.prod(rhs.shape[i] for i in summed)
    outputs = math.prod(size for i, size in enumerate(rhs.shape) if i not in (*summed, *batch))
    return inputs % _MULTIPLE == 0 and outputs % _MULTIPLE == 0


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(
    lhs: jax.Array, rhs: jax.Array, dimensions: _Static, precision: lax.PrecisionLike, dtype: jnp.dtype
) -> jax.Array:
    # XLA:GPU merges small products with a common input; the merged weights then have several scales, so XLA emits no
    # float8 product. Behind a barrier with its weight, each product has a separate input and rounds it separately.
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    return lax.dot_general(_rounded(lhs, E4M3), _rounded(rhs, E4M3), dimensions, _SUMS, dtype)


def _forward(
    lhs: jax.Array, rhs: jax.Array, dimensions: _Static, precision: lax.PrecisionLike, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(lhs, rhs, dimensions, precision, dtype), (lhs, rhs)


def _backward(
    dimensions: _Static,
    precision: lax.PrecisionLike,
    dtype: jnp.dtype,
    saved: tuple[jax.Array, jax.Array],
    grad: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = saved
    weight = _rounded(rhs, E4M3)
    to_lhs = jax.linear_transpose(lambda x: lax.dot_general(x, weight, dimensions, _SUMS), lhs)
    to_rhs = jax.linear_transpose(lambda w: lax.dot_general(lhs, w, dimensions, precision), rhs)
    grad = grad.astype(lhs.dtype)
    (of_lhs,), (of_rhs,) = to_lhs(_rounded(grad, E5M2)), to_rhs(grad)
    return of_lhs, of_rhs


_product.defvjp(_forward, _backward)


def _rounded(values: jax.Array, float8: Float8) -> jax.Array:
    """Rounded values in the dtype of ``values``: cast payload times a power of two, the pattern that XLA recognizes."""
    wide = values.astype(jnp.float32)
    # The power of the smallest scale is subnormal, and some devices flush it to zero.
    scale = jnp.maximum(scales_of(magnitudes(wide).max(initial=0), float8), 1)
    payload = lax.bitcast_convert_type(encode(wide, scale, float8), float8.dtype)
    return payload.astype(values.dtype) * power_of(scale).astype(values.dtype)
