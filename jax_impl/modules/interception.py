"""Replacements while a model is traced: methods of units' classes, and functions of ``jax.tree`` in users' modules.

A stand-in for a unit is an instance of the unit's own class, so that ``isinstance`` and ``type`` give the right answer.
An instance cannot catch its own calls, so the methods of these classes are replaced while a model is traced. The
replacements redirect calls on instances with stand-in parameters (``unit_parameter.py``) to the unit, and pass all
other calls through.

For JAX a stand-in has several leaves: zeros of the parameter's shape and, in a unit's first parameter, the unit's
arrays. So a user's ``jax.tree.leaves(params)`` would count too many parameters, paths would have an extra entry, and a
mask would not fit. Functions of this file therefore replace JAX's; for them a unit's parameter is one leaf with its
unsharded path. Libraries that flatten pytrees to pass them to JAX still call JAX's own functions.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import jax
from flax import nnx

from jax_impl.modules.unit_parameter import apply_to_leaves, is_unit_parameter, run_in_unit, unit_at, zeros_of

# Classes and jax.tree are shared by the whole process, and threads may trace concurrently: the first trace replaces,
# the last trace restores.
_LOCK = threading.Lock()
# The number of traces that need a class's methods caught, and the class's own attributes of these names.
_traces: dict[type, int] = {}
_own: dict[type, dict[str, Any]] = {}
# The functions of jax.tree that are replaced while any class's methods are replaced.
_replaced: list[Any] = []


@contextmanager
def catch_calls(classes: Iterable[type]) -> Iterator[None]:
    """Run methods of ``classes`` inside the unit if they are called on a unit or a part of it."""
    classes = set(classes)
    with _LOCK:
        if classes and not any(_traces.values()):
            _replaced.extend(replace_functions())
        for cls in classes:
            _traces[cls] = _traces.get(cls, 0) + 1
            if _traces[cls] == 1:
                _own[cls] = {name: vars(cls).get(name) for name in _methods(cls)}
                for name, method in _methods(cls).items():
                    setattr(cls, name, _catch(method))
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
    """``__call__`` and the methods of a class, except methods of builtins and methods that ``nnx.Module`` has, too."""
    names = {name for base in cls.__mro__ if base.__module__ != "builtins" for name in vars(base)}
    methods = {}
    for name in names:
        # A class may have another kind of attribute with the name of its base's method.
        value = inspect.getattr_static(cls, name)
        special = name != "__call__" and (name.startswith("__") or hasattr(nnx.Module, name))
        bound = callable(value) and hasattr(type(value), "__get__")
        if not special and bound and not isinstance(value, type | staticmethod | classmethod):
            methods[name] = value
    return methods


def _catch(method: Any) -> Callable[..., Any]:
    def inside(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(instance, type(instance))(*args, **kwargs)

    @functools.wraps(method)
    def caught(self: Any, *args: Any, **kwargs: Any) -> Any:
        if unit_at(self) is None:
            return inside(self, *args, **kwargs)
        return run_in_unit(inside, self, args, kwargs)

    return caught


_LIBRARIES = frozenset({"jax", "jaxlib", "flax", "equinox", "haiku", "jax_impl"})
# Folders of installed packages and of Python's standard library.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
# By their names in jax.tree_util; in jax.tree they have no prefix.
_NAMES = (
    "tree_leaves", "tree_leaves_with_path", "tree_reduce", "tree_map", "tree_map_with_path",
    "tree_flatten", "tree_flatten_with_path", "tree_structure",
)  # fmt: skip
_JAX: dict[str, Callable[..., Any]] = {name: getattr(jax.tree_util, name) for name in _NAMES}
_SHORT = {name.removeprefix("tree_"): name for name in _NAMES}
_NONE = object()
# JAX's functions that are replaced, with their names.
_KNOWN = {_JAX[name]: name for name in _NAMES} | {getattr(jax.tree, short): _SHORT[short] for short in _SHORT}


def replace_functions() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Replace JAX's functions by the functions of this file. Returns the argument for ``restore_functions``."""
    replaced = []
    for module in [jax.tree, *sys.modules.values()]:
        if module in (jax.tree, jax.tree_util) or _package(getattr(module, "__name__", "")) not in _LIBRARIES:
            entries = getattr(module, "__dict__", {})
            # Users' modules may import a function under any name. Checking all names of all packages would take four
            # times as long, at every trace.
            names = (*_NAMES, *_SHORT) if _is_installed(module) else tuple(entries)
            replaced += [(module, name, entries[name]) for name in names if _is_known(entries.get(name))]
    replaced = list({(id(module), name): (module, name, own) for module, name, own in replaced}.values())
    for module, name, own in replaced:
        setattr(module, name, _OURS[_KNOWN[own]])
    return replaced


def restore_functions(replaced: Sequence[tuple[ModuleType, str, Callable[..., Any]]]) -> None:
    """Put JAX's own functions back."""
    for module, name, own in replaced:
        setattr(module, name, own)


def _is_installed(module: Any) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(_INSTALLED)


def _package(name: Any) -> str:
    return str(name or "").partition(".")[0]


def _is_known(function: Any) -> bool:
    return type(function) is FunctionType and function in _KNOWN


def _leaf(is_leaf: Callable[..., bool] | None) -> Callable[..., bool]:
    """``is_leaf`` that is also true for a unit's parameter. It takes a node, or a path and a node."""
    return lambda *node: is_unit_parameter(node[-1]) or (is_leaf is not None and is_leaf(*node))


def _shown(leaf: Any) -> Any:
    return zeros_of(leaf) if is_unit_parameter(leaf) else leaf


def _leaves(tree: Any, is_leaf: Any = None) -> list[Any]:
    return [_shown(leaf) for leaf in _JAX["tree_leaves"](tree, _leaf(is_leaf))]


def _leaves_with_path(tree: Any, is_leaf: Any = None, **options: Any) -> list[tuple[Any, Any]]:
    leaves = _JAX["tree_leaves_with_path"](tree, _leaf(is_leaf), **options)
    return [(path, _shown(leaf)) for path, leaf in leaves]


def _reduce(function: Any, tree: Any, initializer: Any = _NONE, is_leaf: Any = None) -> Any:
    initial = () if initializer is _NONE else (initializer,)
    return functools.reduce(function, _leaves(tree, is_leaf), *initial)


def _map(f: Any, tree: Any, *rest: Any, is_leaf: Any = None) -> Any:
    def mapped(*leaves: Any) -> Any:
        return apply_to_leaves(f, leaves)

    return _JAX["tree_map"](mapped, tree, *rest, is_leaf=_leaf(is_leaf))


def _map_with_path(f: Any, tree: Any, *rest: Any, is_leaf: Any = None, **options: Any) -> Any:
    def mapped(path: Any, *leaves: Any) -> Any:
        return apply_to_leaves(lambda *leaves: f(path, *leaves), leaves)

    return _JAX["tree_map_with_path"](mapped, tree, *rest, is_leaf=_leaf(is_leaf), **options)


def _taking_leaves(name: str) -> Callable[..., Any]:
    def ours(tree: Any, is_leaf: Any = None, **options: Any) -> Any:
        return _JAX[name](tree, _leaf(is_leaf), **options)

    return ours


def _for_losses(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        caller = _package(sys._getframe(1).f_globals.get("__name__"))
        return (_JAX[name] if caller in _LIBRARIES else ours)(*args, **kwargs)

    return chosen


_FUNCTIONS: Sequence[Callable[..., Any]] = (
    _leaves,
    _leaves_with_path,
    _reduce,
    _map,
    _map_with_path,
    *(_taking_leaves(name) for name in _NAMES[-3:]),
)
_OURS = {name: _for_losses(name, ours) for name, ours in zip(_NAMES, _FUNCTIONS, strict=True)}
