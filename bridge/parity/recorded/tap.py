"""``tap``: a value inside of a model that is compared like a module's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

T = TypeVar("T")

_listener: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("twinshard_tap", default=None)


def tap(name: str, value: T) -> T:
    """``value``, which a recorded run notes as the output of a call with path ``name`` and no inputs.

    Outside of a recorded run this is the identity. ``value``: an array, or tuples, lists, dicts and dataclasses of
    arrays. A function of parameters has no modules: taps are what ``twinshard parity`` can compare inside of it.
    """
    listener = _listener.get()
    return value if listener is None else cast(T, listener(name, value))


@contextmanager
def listening(listener: Callable[[str, Any], Any]) -> Iterator[None]:
    """While this is open, ``tap(name, value)`` is ``listener(name, value)``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
