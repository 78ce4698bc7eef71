"""Errors of policies: what is wrong, and the place in the file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class PolicyError(ValueError):
    """A fault in a policy: file, table and key, the expected and the found value."""


@contextmanager
def at(where: str) -> Iterator[None]:
    """Prefix errors with ``where``."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None


def require(holds: object, key: str, expected: str, got: object) -> None:
    """PolicyError about ``key`` unless ``holds`` is true."""
    if not holds:
        raise PolicyError(f"{key}: expected {expected}, got {got!r}")


def require_only(table: Mapping[str, Any], keys: Collection[str]) -> None:
    """PolicyError about the first key of ``table`` that is not in ``keys``."""
    for key in table:
        if key not in keys:
            raise PolicyError(f"{key}: expected no other keys than {', '.join(keys)}, got {key!r}")
