"""Python's search for reference cycles, put off while many objects are made that stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The switch belongs to the process: the last of several users turns it on again.
_lock = threading.Lock()
_users = 0
_resume = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """While active, no search for reference cycles. For seconds, not for hours: others may have made some.

    The descriptions of tensors survive anyway; going through them again and again takes a fifth of the time that many
    small tensors need, and tripled that of reading a pickle.
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
