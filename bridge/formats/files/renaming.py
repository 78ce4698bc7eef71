"""Renaming that never destroys anything: two places exchanged, or a name taken only while it is free."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from pathlib import Path

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def exchange(new: Path, old: Path) -> None:
    """Let the two change names at once where the system can; else the old one is missing for a moment."""
    if _renameat2(new, old, _RENAME_EXCHANGE):
        return
    aside = old.with_name(f"{old.name}.tmp-{secrets.token_hex(4)}")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except BaseException:
        os.rename(aside, old)
        raise
    os.rename(aside, new)


def rename_new(source: Path, target: Path) -> None:
    """Give the file or directory the new name, at once. FileExistsError when something has that name."""
    if _renameat2(source, target, _RENAME_NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Whether system and file system know this kind of renaming, and it is done. OSError when it failed."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))
