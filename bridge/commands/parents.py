"""Missing directories above a destination: a mistyped path must not create directories.

On a terminal the command asks. A script has nobody to ask, so the command refuses, and names `--parents`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer


def place_here(destination: str) -> Path | None:
    """The path of ``destination`` on this machine, which `file://` names, too; None in other stores."""
    from bridge.core.formats.stores.store import is_url, local_path

    return local_path(destination) if is_url(destination) else Path(destination)


def missing_parent(destination: str) -> Path | None:
    """The topmost directory above ``destination`` that does not exist; None where all do, and in a store."""
    if (local := place_here(destination)) is None:
        return None
    missing = [parent for parent in Path(os.path.abspath(local)).parents if not os.path.lexists(parent)]
    return missing[-1] if missing else None


def ask_for_parents(missing: Path, destination: str) -> None:
    """Return where the user wants the directories. CheckpointError where not, or where nobody can be asked."""
    from bridge.core.formats.stores.store import store_hint
    from bridge.core.formats.tensors.base import CheckpointError

    wanted = os.path.dirname(os.path.abspath(place_here(destination) or destination))
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        if typer.confirm(f"{missing} does not exist. Create {wanted}?", err=True):
            return
        raise CheckpointError(f"{missing} does not exist and was not created: give another destination")
    raise CheckpointError(
        f"{missing} does not exist: expected the directory for {destination}; correct the path, or let the "
        f"command create it (--parents){store_hint(destination)}"
    )
