"""The arithmetic that ``bridge.core.sharding.policy.float8`` describes, in NumPy: both runtimes must equal it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bridge.core.sharding.policy.float8 import BLOCK, blocks_of

_SMALLEST_NORMAL = np.float32(2.0**-126)
_BIAS = 127
_EXPONENT_OF_LARGEST = 8

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def amax_of(values: Floats, axis: int | None = None) -> Floats:
    """The largest magnitude, ignoring NaN; 0 without values."""
    magnitudes = np.where(np.isnan(values), np.float32(0), np.abs(values))
    return np.asarray(np.max(magnitudes, axis=axis, initial=0), np.float32)


def scales_of(amax: Floats) -> Bytes:
    """The E8M0 byte, exponent + 127, for each magnitude."""
    bits = np.asarray(amax, np.float32).view(np.int32)
    # The addend carries into the exponent if the fraction is above the fraction of 1.75, 0x600000.
    exponents = ((bits + 0x1FFFFF) >> 23) - _EXPONENT_OF_LARGEST
    return np.maximum(exponents, 0).astype(np.uint8)


def quantize_rows(rows: Floats) -> tuple[Bytes, Bytes]:
    """mxfp8 of float32 ``(R, C)``: payload ``(R, C)`` and scales ``(R, ceil(C / 32))``."""
    count, columns = rows.shape
    blocks = blocks_of(columns)
    padded = np.zeros((count, blocks * BLOCK), np.float32)
    padded[:, :columns] = rows
    scales = scales_of(amax_of(padded.reshape(count, blocks, BLOCK), axis=2))
    return _payload(rows, np.repeat(scales, BLOCK, axis=1)[:, :columns]), scales


def quantize_tensor(values: Floats, amax: Floats | None = None) -> tuple[Bytes, Bytes]:
    """float8_e4m3fn of float32 values: payload of their shape, and the scale as a 0-d array.

    amax: of the whole tensor, if these values are only a part.
    """
    scale = scales_of(amax_of(values) if amax is None else np.asarray(amax, np.float32))
    return _payload(values, scale), scale


def dequantize_rows(payload: Bytes, scales: Bytes) -> Floats:
    """The float32 numbers that mxfp8 represents: 4 significant bits each, so exact in bfloat16 as well."""
    return _product(decode(payload), powers_of(np.repeat(scales, BLOCK, axis=1)[:, : payload.shape[1]]))


def dequantize_tensor(payload: Bytes, scale: Bytes) -> Floats:
    """The float32 numbers that payload with one common scale represents."""
    return _product(decode(payload), powers_of(scale))


def powers_of(scales: Bytes) -> Floats:
    """E8M0 as float32: ``2 ** (byte - 127)``."""
    return np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)


def encode(values: Floats) -> Bytes:
    """e4m3 bytes of float32 values: rounded to nearest, ties to even, saturated at 448; NaN is 0x7F or 0xFF."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    sign = (bits >> 24 & 0x80).astype(np.uint8)
    magnitudes = bits & 0x7FFFFFFF
    # Three of 23 fraction bits remain, and the exponent's bias falls from 127 to 7.
    normal = ((magnitudes + 0x7FFFF + (magnitudes >> 20 & 1)) >> 20).astype(np.int64) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9, the spacing of float32 at 2^14: the addition rounds to them.
    small = np.fmin(magnitudes.view(np.float32), np.float32(1)) + np.float32(2**14)
    subnormal = small.view(np.uint32).astype(np.int64) - np.float32(2**14).view(np.uint32)
    rounded = np.where(magnitudes < np.float32(2**-6).view(np.uint32), subnormal, normal)
    finite = np.minimum(rounded, 0x7E)
    return np.where(magnitudes > 0x7F800000, 0x7F, finite).astype(np.uint8) | sign


def decode(payload: Bytes) -> Floats:
    """The float32 number of each e4m3 byte."""
    return _NUMBERS[payload]


def _payload(values: Floats, scales: Bytes) -> Bytes:
    flushed = np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)
    return encode(_product(flushed, np.ldexp(np.float32(1), _BIAS - scales.astype(np.int32))))


def _product(values: Floats, powers: Floats) -> Floats:
    # Here infinity can be a product of finite numbers, and NaN can be of any kind.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values * powers, np.float32)


def _numbers() -> Floats:
    numbers = np.empty(256, np.float32)
    for byte in range(256):
        power, fraction = byte >> 3 & 15, byte & 7
        number = math.ldexp(fraction / 8 + (power > 0), max(power, 1) - 7)
        number = math.nan if power == 15 and fraction == 7 else number
        numbers[byte] = math.copysign(number, -1 if byte & 0x80 else 1)
    return numbers


_NUMBERS = _numbers()
