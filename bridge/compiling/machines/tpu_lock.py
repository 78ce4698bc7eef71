"""Libtpu's lock: one process at a time compiles for TPUs, and the others wait until its file is free.

The file is never removed: the process that holds it would lose its protection, and one that has ended holds nothing.
"""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bridge.planning.models.errors import PlanError

SECONDS = 3600.0
"""How long to wait. Whoever holds the lock may be compiling many steps, one after the other."""
# Between two looks at the lock, which nobody is told of when it becomes free.
_PAUSE = 0.5


def held_lock() -> Path | None:
    """The lock file, where another process holds it. Raises ``PlanError`` where it cannot be read."""
    path = Path(tempfile.gettempdir(), "libtpu_lockfile")
    try:
        with path.open() as file:
            # A shared lock fails only while another process holds its exclusive one.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise PlanError(
            f"libtpu's lock {path}: expected a file that this user can open: {error.strerror}; another user's process "
            "made it: set TMPDIR to a folder of your own"
        ) from error
    except OSError:
        return path
    return None


def wait_for_lock(say: Callable[[str], None], seconds: float = SECONDS, held: bool = False) -> None:
    """Return when no other process holds the lock; ``say`` gets one message where that takes time.

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
                f"libtpu: expected the process that holds {path} to end within {seconds:.0f} s, it did not; one "
                "process at a time compiles for TPUs"
            )
        time.sleep(_PAUSE)
