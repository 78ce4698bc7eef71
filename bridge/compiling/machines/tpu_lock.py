"""Libtpu's lock: one process at a time compiles for TPUs, and the others wait until its file is free.

The file is never removed: the process that holds it would lose its protection, and a dead process holds nothing.
"""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bridge.planning.models.errors import PlanError

SECONDS = 3600.0
"""The longest wait. The process that holds the lock may compile many steps, one after the other."""
# The pause between two checks of the lock; no notification tells when it becomes free.
_PAUSE = 0.5


def held_lock() -> Path | None:
    """The lock file, if another process holds it. Raises ``PlanError`` if it cannot be read."""
    path = Path(tempfile.gettempdir(), "libtpu_lockfile")
    try:
        with path.open() as file:
            # A shared lock fails only while another process holds the exclusive lock.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise PlanError(
            f"libtpu's lock {path}: expected a file that this user can open: {error.strerror}; another user's process "
            "created it: set TMPDIR to your own folder"
        ) from error
    except OSError:
        return path
    return None


def wait_for_lock(say: Callable[[str], None], seconds: float = SECONDS, held: bool = False) -> None:
    """Return when no other process holds the lock; ``say`` gets one message if this takes time.

    held: whether libtpu has just said that the lock is held.

    Raises ``PlanError`` after ``seconds``.
    """
    begun = time.monotonic()
    told = False
    while held or (path := held_lock()) is not None:
        if held:
            path, held = Path(tempfile.gettempdir(), "libtpu_lockfile"), False
        if not told:
            say(f"waiting for another process that compiles for TPUs and holds {path}")
            told = True
        if time.monotonic() - begun >= seconds:
            raise PlanError(
                f"libtpu: expected the process that holds {path} to end within {seconds:.0f} s, it did not; only one "
                "process at a time can compile for TPUs"
            )
        time.sleep(_PAUSE)
