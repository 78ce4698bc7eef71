"""Temporary directories of mirrors and uploads, each locked by its process, so that those of killed ones are known.

    $TMPDIR/twinshard-mirror-x3f9_c0a/twinshard.lock      locked: its process lives

Whoever makes such a directory first removes those of this user whose lock is free, or that have none and are an hour
old: their process was killed as it began.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

LOCK_FILE: Final = "twinshard.lock"
_ABANDONED_SECONDS: Final = 3600.0
_NAME: Final = re.compile(r"twinshard-(mirror|upload)-[a-z0-9_]{8}")


class TemporaryPlace:
    """A new, empty directory but for its lock; `path`. It is there until `close`, or until its process has ended."""

    def __init__(self, purpose: Literal["mirror", "upload"]) -> None:
        remove_abandoned()
        while True:
            self.path = Path(os.path.abspath(tempfile.mkdtemp(prefix=f"twinshard-{purpose}-")))
            self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Before the lock was taken, another process may have taken it, and removed the directory.
            if locked(self._lock) and (self.path / LOCK_FILE).exists():
                return
            os.close(self._lock)

    def close(self) -> None:
        """Remove the directory."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned() -> None:
    """Remove the temporary directories of this user whose processes are gone."""
    for name in os.listdir(tempfile.gettempdir()):
        if _NAME.fullmatch(name):
            # Other processes look, too, and remove.
            with suppress(OSError):
                _remove_if_abandoned(Path(tempfile.gettempdir(), name))


def locked(descriptor: int) -> bool:
    """Take the lock of an open file for this process, unless another one has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_if_abandoned(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - status.st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(directory, ignore_errors=True)
        return
    try:
        if locked(descriptor):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)
