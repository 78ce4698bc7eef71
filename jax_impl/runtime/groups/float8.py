"""Float8 payload and scales in a compiled step: the bytes of ``bridge.core.sharding.policy.float8``, on any device.

All arithmetic is on integers or multiplies by powers of two, which all XLA compilers compute alike. Their own float8
types saturate and flush differently, and not every device has these types.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from bridge.core.sharding.policy.float8 import BLOCK, blocks_of

_FRACTION = 23
_BIAS = 127
_NAN = 0x7F
_INFINITY = 0x7F800000
_SMALLEST_NORMAL = 0x00800000


@dataclass(frozen=True)
class Float8:
    """A format: bits of the fraction, bias of the exponent, and code of the largest number, 1.75 * 2 ** power."""

    dtype: jnp.dtype
    fraction: int
    bias: int
    largest: int
    power: int


E4M3 = Float8(jnp.dtype(jnp.float8_e4m3fn), fraction=3, bias=7, largest=0x7E, power=8)
E5M2 = Float8(jnp.dtype(jnp.float8_e5m2), fraction=2, bias=15, largest=0x7B, power=15)


def magnitudes(values: jax.Array) -> jax.Array:
    """float32 -> the bits of the magnitudes as int32, which have the same order; 0 for NaN."""
    bits = lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF
    return jnp.where(bits > _INFINITY, 0, bits)


def scales_of(amax: jax.Array, float8: Float8 = E4M3) -> jax.Array:
    """Bits of magnitudes -> E8M0 bytes."""
    # The addend carries into the exponent if the fraction is above the fraction of 1.75.
    exponents = ((amax + 0x1FFFFF) >> _FRACTION) - float8.power
    return jnp.maximum(exponents, 0).astype(jnp.uint8)


def encode(values: jax.Array, scales: jax.Array, float8: Float8 = E4M3) -> jax.Array:
    """float32 values and their scales, of a shape that broadcasts -> bytes of the format."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Some devices flush subnormal numbers to zero; the bytes must not depend on that.
    flushed = lax.bitcast_convert_type(jnp.where(bits < _SMALLEST_NORMAL, 0, bits), jnp.float32)
    scaled = flushed * power_of(254 - scales.astype(jnp.int32))
    scaled_bits = lax.bitcast_convert_type(scaled, jnp.int32)
    # Keep the format's fraction bits out of 23, and give the exponent the format's bias.
    dropped = _FRACTION - float8.fraction
    half = (1 << (dropped - 1)) - 1
    normal = ((scaled_bits + half + ((scaled_bits >> dropped) & 1)) >> dropped) - (
        (_BIAS - float8.bias) << float8.fraction
    )
    # Smaller numbers are multiples of float32's spacing at this power of two, so the addition rounds to them.
    power = dropped + 1 - float8.bias
    small = lax.bitcast_convert_type(jnp.minimum(scaled, 1.0) + 2.0**power, jnp.int32)
    small -= (_BIAS + power) << _FRACTION
    smallest_normal = (_BIAS + 1 - float8.bias) << _FRACTION
    payload = jnp.minimum(jnp.where(scaled_bits < smallest_normal, small, normal), float8.largest)
    return (jnp.where(bits > _INFINITY, _NAN, payload) | sign).astype(jnp.uint8)


def decode(payload: jax.Array, scales: jax.Array) -> jax.Array:
    """e4m3 bytes and their scales, of a shape that broadcasts -> the exact float32 values that they represent."""
    code = payload.astype(jnp.int32)
    # Half the number and twice the scale: as float32, twice the scale is never subnormal.
    normal = lax.bitcast_convert_type(((code & 0x7F) << 20) + (119 << _FRACTION), jnp.float32)
    subnormal = (code & 7).astype(jnp.float32) * 2.0**-10
    half = jnp.where(code & 0x78, normal, subnormal)
    half = jnp.where((code & 0x7F) == _NAN, jnp.nan, half)
    half = jnp.where(code & 0x80, -half, half)
    return half * power_of(scales.astype(jnp.int32) + 1)


def in_rows(values: jax.Array) -> jax.Array:
    """``[..., C]`` -> ``[..., blocks, 32]``, with zeros after the last element of a row."""
    columns = values.shape[-1]
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -columns % BLOCK)]
    return jnp.pad(values, padding).reshape(*values.shape[:-1], blocks_of(columns), BLOCK)


def each_in_row(scales: jax.Array, columns: int) -> jax.Array:
    """The scale of each element: ``[..., blocks]`` -> ``[..., columns]``."""
    return jnp.repeat(scales, BLOCK, axis=-1)[..., :columns]


def power_of(exponents: jax.Array) -> jax.Array:
    """``2 ** (e - 127)`` for 1 <= e <= 254."""
    return lax.bitcast_convert_type(exponents.astype(jnp.int32) << _FRACTION, jnp.float32)
