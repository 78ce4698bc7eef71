"""Float8 payload and its scales inside of a compiled step: the bytes of ``bridge.sharding.float8``, on any device.

The arithmetic is that of integers and of products with powers of two, which all of XLA's compilers compute alike. Their
own float8 types differ in what they saturate and flush, and not every device has them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from bridge.sharding.float8 import BLOCK, blocks_of

_FRACTION = 23
_NAN = 0x7F
_INFINITY = 0x7F800000
_SMALLEST_NORMAL = 0x00800000


def magnitudes(values: jax.Array) -> jax.Array:
    """float32 -> the bits of their magnitudes as int32, which order them; 0 of NaN."""
    bits = lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF
    return jnp.where(bits > _INFINITY, 0, bits)


def scales_of(amax: jax.Array) -> jax.Array:
    """Bits of magnitudes -> E8M0 bytes."""
    # The addend carries into the exponent where the fraction is above that of 1.75.
    exponents = ((amax + 0x1FFFFF) >> _FRACTION) - 8
    return jnp.maximum(exponents, 0).astype(jnp.uint8)


def encode(values: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 and the scale of each, of a shape that broadcasts -> e4m3 bytes."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Devices differ in whether they take subnormal numbers for zeros.
    flushed = lax.bitcast_convert_type(jnp.where(bits < _SMALLEST_NORMAL, 0, bits), jnp.float32)
    scaled = flushed * _power(254 - scales.astype(jnp.int32))
    found = lax.bitcast_convert_type(scaled, jnp.int32)
    # Three fraction bits stay of 23, and the exponent's bias falls from 127 to 7.
    normal = ((found + 0x7FFFF + ((found >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9, the spacing of float32 at 2^14: the addition rounds to them.
    small = lax.bitcast_convert_type(jnp.minimum(scaled, 1.0) + 2.0**14, jnp.int32) - (141 << _FRACTION)
    payload = jnp.minimum(jnp.where(found < (121 << _FRACTION), small, normal), 0x7E)
    return (jnp.where(bits > _INFINITY, _NAN, payload) | sign).astype(jnp.uint8)


def decode(payload: jax.Array, scales: jax.Array) -> jax.Array:
    """e4m3 bytes and the scale of each, of a shape that broadcasts -> the float32 that they stand for, exactly."""
    code = payload.astype(jnp.int32)
    # Half the number, and twice the scale, which as float32 is no subnormal number for any scale.
    normal = lax.bitcast_convert_type(((code & 0x7F) << 20) + (119 << _FRACTION), jnp.float32)
    subnormal = (code & 7).astype(jnp.float32) * 2.0**-10
    half = jnp.where(code & 0x78, normal, subnormal)
    half = jnp.where((code & 0x7F) == _NAN, jnp.nan, half)
    half = jnp.where(code & 0x80, -half, half)
    return half * _power(scales.astype(jnp.int32) + 1)


def in_rows(values: jax.Array) -> jax.Array:
    """``[..., C]`` -> ``[..., blocks, 32]``, zeros behind the last one of a row."""
    columns = values.shape[-1]
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -columns % BLOCK)]
    return jnp.pad(values, padding).reshape(*values.shape[:-1], blocks_of(columns), BLOCK)


def each_in_row(scales: jax.Array, columns: int) -> jax.Array:
    """The scale of each element: ``[..., blocks]`` -> ``[..., columns]``."""
    return jnp.repeat(scales, BLOCK, axis=-1)[..., :columns]


def _power(exponents: jax.Array) -> jax.Array:
    """``2 ** (e - 127)`` for 1 <= e <= 254."""
    return lax.bitcast_convert_type(exponents << _FRACTION, jnp.float32)
