"""CRC-32C of bytes in memory, during which other threads run.

The extension of `google-crc32c` keeps Python's lock for the whole of a buffer. In a mapped file that includes the time
the disk needs for its pages. So large buffers go to the C library below the extension, through ctypes, which lets go
of the lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import google_crc32c
import numpy as np

_LARGE: Final = 64 << 10
"""Bytes from which the call through ctypes, which takes a few microseconds, is worth it."""

_CHECK: Final = b"123456789", 0xE3069283


def extend(crc: int, data: np.ndarray | bytes | memoryview) -> int:
    """The checksum of bytes of which `crc` is that of those before `data`: bytes, or C-contiguous uint8."""
    if len(data) >= _LARGE and _unlocked is not None:
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        return _unlocked(crc, array.ctypes.data, array.nbytes)
    # The extension takes bytes and read-only arrays.
    data = bytes(data) if isinstance(data, memoryview) else data
    return int(google_crc32c.extend(crc, data)) if len(data) else crc


def _library() -> Callable[[int, int, int], int] | None:
    """`crc32c_extend` of the C library; None where the extension does not have it as a library of its own."""
    try:
        # A look-up in the extension searches the libraries that it was linked with, too.
        function = ctypes.CDLL(google_crc32c.extend.__self__.__file__).crc32c_extend
    except (AttributeError, OSError):
        return None
    function.argtypes, function.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32
    text, expected = _CHECK
    buffer = np.frombuffer(text, np.uint8)
    return function if function(0, buffer.ctypes.data, buffer.nbytes) == expected else None


_unlocked: Final = _library()
