"""Checkpoints undone: a checkpoint compiles what it is put around, and inside of that no call has values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import jax
from flax import nnx


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` while this is open."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def no_checkpoints(modules: Iterable[str]) -> Iterator[None]:
    """While this is open, ``jax.checkpoint`` and ``jax.remat`` do nothing.

    Neither do those that were put before around functions of the Python ``modules`` and methods of their classes.
    """
    with ExitStack() as stack:
        for name in ("checkpoint", "remat"):
            stack.enter_context(attribute(jax, name, _transparent))
        for owner, name, inner in _checkpointed(tuple(modules)):
            stack.enter_context(attribute(owner, name, inner))
        yield


@functools.lru_cache(maxsize=8)
def _checkpointed(modules: tuple[str, ...]) -> list[tuple[Any, str, Any]]:
    """Where functions with checkpoints are, and the functions without them; a run has many reruns."""
    found = []
    for module in {name: sys.modules[name] for name in modules if name in sys.modules}.values():
        own = [
            one
            for one in vars(module).values()
            if isinstance(one, type) and one.__module__ == module.__name__
        ]
        for owner in [module, *own]:
            for name, value in list(vars(owner).items()):
                inner = without_checkpoint(value)
                if inner is not value:
                    found.append((owner, name, inner))
    return found


def _transparent(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda given: given


def without_checkpoint(function: Any) -> Any:
    """What ``jax.checkpoint`` or ``nnx.remat`` was put around; anything else as it is."""
    if not isinstance(function, FunctionType):
        return function
    links = _links(function)
    marks = [_mark(link) for link in links]
    for wrappers in CHECKPOINTS:
        if len(links) > len(wrappers) and marks[: len(wrappers)] == wrappers:
            return without_checkpoint(links[len(wrappers)])
    return function


def _links(function: Any) -> list[Any]:
    """A function and what it wraps, from the outside to the inside."""
    links = [function]
    while hasattr(links[-1], "__wrapped__"):
        links.append(links[-1].__wrapped__)
    return links


def _mark(function: Any) -> frozenset[Any]:
    """The code of a wrapper and of the functions that it calls, without the function that it wraps."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [one for one in cells if one is not getattr(function, "__wrapped__", None)]
    return frozenset(one.__code__ for one in (function, *inner) if isinstance(one, FunctionType))


def _wrappers(checkpoint: Callable[..., Any]) -> list[frozenset[Any]]:
    """What ``checkpoint`` puts around a function."""
    return [_mark(link) for link in _links(checkpoint(lambda: None))[:-1]]


CHECKPOINTS = [_wrappers(jax.checkpoint), _wrappers(nnx.remat)]
