"""Patterns over dotted paths: segments with the wildcards of ``fnmatch``, which do not cross a dot."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection


def is_pattern(pattern: object) -> bool:
    """Whether ``pattern`` is a dotted path without empty segments; "" is not."""
    return isinstance(pattern, str) and bool(pattern) and all(pattern.split(".")) and "/" not in pattern


def matches(pattern: str, path: str) -> bool:
    """Whether every segment of ``path`` matches the segment of ``pattern`` at its place."""
    segments, parts = pattern.split("."), path.split(".")
    return len(segments) == len(parts) and all(map(fnmatch.fnmatchcase, parts, segments))


def near(pattern: str, paths: Collection[str]) -> str:
    """Some of ``paths``, the most similar to ``pattern`` first, for an error."""
    close = difflib.get_close_matches(pattern, paths, n=4, cutoff=0.3) or list(paths)[:4]
    return ", ".join(close) or "no modules"
