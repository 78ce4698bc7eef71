"""Calls of units, caught while a model is traced: methods of their classes run with the unit's weights gathered.

A stand-in for a unit is an instance of the unit's own class, so that ``isinstance`` and ``type`` tell the truth. No
instance can catch its own calls, so the methods of these classes are others as long as a model is traced: they hand
calls on instances with stand-ins for parameters (``unit_parameter.py``) to the unit, and leave all others alone.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flax import nnx

from jax_impl.modules.unit_leaves import replace_functions, restore_functions
from jax_impl.modules.unit_parameter import run_in_unit, unit_at

_LOCK = threading.Lock()
# How many traces need a class's methods caught, and what the class itself had by their names.
_traces: dict[type, int] = {}
_own: dict[type, dict[str, Any]] = {}
# The functions of jax.tree that are replaced while the methods of any class are.
_replaced: list[Any] = []


@contextmanager
def caught_calls(classes: Iterable[type]) -> Iterator[None]:
    """Methods of ``classes``, called on units or parts of them, run inside of the unit."""
    classes = set(classes)
    with _LOCK:
        if classes and not any(_traces.values()):
            _replaced.extend(replace_functions())
        for cls in classes:
            _traces[cls] = _traces.get(cls, 0) + 1
            if _traces[cls] == 1:
                _own[cls] = {name: vars(cls).get(name) for name in _methods(cls)}
                for name, method in _methods(cls).items():
                    setattr(cls, name, _caught(method))
    try:
        yield
    finally:
        with _LOCK:
            for cls in classes:
                _traces[cls] -= 1
                if not _traces[cls]:
                    for name, method in _own.pop(cls).items():
                        if method is None:
                            delattr(cls, name)
                        else:
                            type.__setattr__(cls, name, method)
            if not any(_traces.values()):
                restore_functions(_replaced)
                _replaced.clear()


def _methods(cls: type) -> dict[str, Any]:
    """What an instance is called by, and methods; not those of builtins, and none that ``nnx.Module`` has, too."""
    names = {name for base in cls.__mro__ if base.__module__ != "builtins" for name in vars(base)}
    methods = {}
    for name in names:
        # A class may have something else by the name of its base's method.
        value = inspect.getattr_static(cls, name)
        special = name != "__call__" and (name.startswith("__") or hasattr(nnx.Module, name))
        bound = callable(value) and hasattr(type(value), "__get__")
        if not special and bound and not isinstance(value, type | staticmethod | classmethod):
            methods[name] = value
    return methods


def _caught(method: Any) -> Callable[..., Any]:
    def inside(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(instance, type(instance))(*args, **kwargs)

    @functools.wraps(method)
    def caught(self: Any, *args: Any, **kwargs: Any) -> Any:
        if unit_at(self) is None:
            return inside(self, *args, **kwargs)
        return run_in_unit(inside, self, args, kwargs)

    return caught
