"""Memory that is freed goes back to the operating system while checkpoints stream through.

glibc takes a buffer below a threshold from a heap that shrinks only at its end, and raises the threshold to the size
of every larger buffer freed, up to 32 MiB. Chunks are of about that size and belong to many threads, so freed ones
pile up: converting 1.3 GB was measured to need 260 to 390 MB instead of 120.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_LARGE = 4 << 20
_GLIBC_MAX = 32 << 20

_lock = threading.Lock()
_users = 0


@contextmanager
def large_buffers_returned() -> Iterator[None]:
    """While active, buffers of 4 MiB and more go back to the system when freed (glibc; elsewhere without effect).

    Afterwards glibc's thresholds are at their maximum, where freeing one buffer of 32 MiB would have taken them.
    """
    global _users
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    with _lock:
        _users += 1
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                mallopt(_M_MMAP_THRESHOLD, _GLIBC_MAX)
                mallopt(_M_TRIM_THRESHOLD, 2 * _GLIBC_MAX)
