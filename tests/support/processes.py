"""Processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def importing_from(*roots: Path) -> dict[str, str]:
    """The environment of this process, in which Python imports from ``roots`` first.

    What PYTHONPATH has already stays: the packages that tests need may be there alone.
    """
    path = [*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
