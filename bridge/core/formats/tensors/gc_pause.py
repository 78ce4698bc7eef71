"""Pauses Python's search for reference cycles while many long-lived objects are made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The switch is per process: the last of several users turns it on again.
_lock = threading.Lock()
_users = 0
_resume = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """While active, no search for reference cycles. For seconds, not hours: other code may create cycles.

    Tensor descriptions survive anyway. Scanning them again and again took a fifth of the time for many small tensors,
    and tripled the time for reading a pickle.
    """
    global _users, _resume
    with _lock:
        if not _users:
            _resume = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _resume:
                gc.enable()
