"""Arrays and plain values as bytes: elements in row-major order, copied fast, checksums, which bytes contain a box."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, Literal

import google_crc32c
import numpy as np

from bridge.core.formats.tensors.base import Box

_LARGE: Final = 64 << 10
"""The number of bytes from which the call through ctypes, which takes a few microseconds, is worth it."""

_CHECK: Final = b"123456789", 0xE3069283


def extend(crc: int, data: np.ndarray | bytes | memoryview) -> int:
    """The checksum `crc` of earlier bytes, extended by `data`: bytes, or C-contiguous uint8."""
    # The google-crc32c extension holds Python's lock for the whole buffer, which would block other threads. So large
    # buffers go to the underlying C library through ctypes, which releases the lock.
    if len(data) >= _LARGE and _unlocked is not None:
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        return _unlocked(crc, array.ctypes.data, array.nbytes)
    # The extension accepts bytes and read-only arrays.
    data = bytes(data) if isinstance(data, memoryview) else data
    return int(google_crc32c.extend(crc, data)) if len(data) else crc


def _library() -> Callable[[int, int, int], int] | None:
    """`crc32c_extend` of the C library; None if the extension does not come with a separate library."""
    try:
        # A symbol look-up in the extension also searches its linked libraries.
        function = ctypes.CDLL(google_crc32c.extend.__self__.__file__).crc32c_extend
    except (AttributeError, OSError):
        return None
    function.argtypes, function.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32
    text, expected = _CHECK
    buffer = np.frombuffer(text, np.uint8)
    return function if function(0, buffer.ctypes.data, buffer.nbytes) == expected else None


_unlocked: Final = _library()


NUMBER: Final = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")
"""NumPy's codes of numbers, without their byte order. np.dtype raises TypeError for others, such as b8."""


def raw_bytes(array: np.ndarray) -> np.ndarray:
    """The elements in row-major order as one uint8 array; a copy only if they are not contiguous already."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(as_integers(array))
    return array.reshape(-1).view(np.uint8)


def as_integers(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers: NumPy copies these fast, but ml_dtypes element by element."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize <= 8 else array


def array_checksum(*parts: np.ndarray, crc: int = 0) -> int:
    """CRC-32C of the elements of arrays, each in row-major order; copies only arrays that are not contiguous.

    crc: the checksum of the elements before these.
    """
    for part in parts:
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        # The C extension takes read-only buffers.
        flat.flags.writeable = False
        crc = extend(crc, flat)
    return crc


def strides_of(shape: Sequence[int], dtype: np.dtype, order: Literal["C", "F"] = "C") -> tuple[int, ...]:
    """The strides in bytes of an array without gaps."""
    steps, step = [], dtype.itemsize
    for n in shape if order == "F" else reversed(shape):
        steps.append(step)
        step *= n
    return tuple(steps if order == "F" else reversed(steps))


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...], strides: tuple[int, ...], step: int = 1) -> bool:
    """Whether elements are contiguous in row-major order, by strides whose last one is `step`.

    Strides of axes with size one do not matter.
    """
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def encoded(value: object) -> Iterable[bytes]:
    """Type and content of a value, distinct for distinct values; a NaN's bits count."""
    if isinstance(value, list | tuple):
        yield b"%c%d:" % (b"t" if isinstance(value, tuple) else b"l", len(value))
        for item in value:
            yield from encoded(item)
    elif isinstance(value, dict):
        yield b"d%d:" % len(value)
        for key, item in value.items():
            yield from encoded(key)
            yield from encoded(item)
    else:
        text = struct.pack("<d", value) if isinstance(value, float) else str(value).encode()
        yield b"%s%d:" % (type(value).__name__.encode(), len(text)) + text


Buffer = bytes | memoryview


def copy_flat(
    shape: Sequence[int], box: Box, out: np.ndarray, read: Callable[[int, int], Iterator[Buffer]]
) -> None:
    """Copy a box of a row-major array of this shape into `out`, which is C-contiguous and has the box's sizes.

    read: yields the array's bytes [start, stop), in consecutive parts; it may yield more bytes after these.
    """
    if not box.numel:
        return
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # Axes that the box contains whole belong to one contiguous run of elements, and so does the axis before them.
    lead = len(shape)
    while lead and (lead == len(shape) or box.sizes[lead] == shape[lead]):
        lead -= 1
    runs = out.reshape((math.prod(box.sizes[:lead]), -1))
    length, size = runs.shape[1], out.dtype.itemsize
    first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
    parts = read(first * size, (last + 1) * size)
    held: Buffer = b""
    at = first * size  # the place of the first held byte
    for number, index in enumerate(np.ndindex(box.sizes[:lead])):
        position = (first + sum(k * s for k, s in zip(index, strides, strict=False))) * size
        row, done = runs[number : number + 1].view(np.uint8)[0], 0
        while done < length * size:
            if position + done >= at + len(held):
                at, held = at + len(held), next(parts)
                continue
            start = position + done - at
            count = min(length * size - done, len(held) - start)
            row[done : done + count] = np.frombuffer(held, np.uint8, count, start)
            done += count
