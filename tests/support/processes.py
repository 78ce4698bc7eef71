"""The environment of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def importing_from(*roots: Path) -> dict[str, str]:
    """The environment of this process, with ``roots`` first on Python's import path.

    The current PYTHONPATH stays, because it may be the only path to packages that tests need.
    """
    path = [*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
