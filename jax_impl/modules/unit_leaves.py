"""Functions of ``jax.tree``, called by a loss: a parameter of a unit is one leaf, with the path that it has unsharded.

To JAX itself a stand-in has more leaves (``unit_parameter.py``): zeros of the parameter's shape and, of a unit's first
parameter, the unit's arrays. So a user's ``jax.tree.leaves(params)`` would count too many parameters, paths would have
an entry too much, and a mask would not fit. While a model is traced, functions of this file take the place of JAX's.
Libraries that take pytrees apart to hand them to JAX still call JAX's own.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import jax

from jax_impl.modules.unit_parameter import apply_to_leaves, is_unit_parameter, zeros_of

_LIBRARIES = frozenset({"jax", "jaxlib", "flax", "equinox", "haiku", "jax_impl"})
# Folders of packages and of Python's own modules.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
# By their names in jax.tree_util; in jax.tree they have no prefix.
_NAMES = (
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_reduce",
    "tree_map",
    "tree_map_with_path",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_structure",
)
_JAX: dict[str, Callable[..., Any]] = {name: getattr(jax.tree_util, name) for name in _NAMES}
_SHORT = {name.removeprefix("tree_"): name for name in _NAMES}
_NONE = object()
# JAX's functions that are replaced, with their names.
_KNOWN = {_JAX[name]: name for name in _NAMES} | {getattr(jax.tree, short): _SHORT[short] for short in _SHORT}


def replace_functions() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Put the functions of this file in the place of JAX's. Returns what ``restore_functions`` needs."""
    places = []
    for module in [jax.tree, *sys.modules.values()]:
        if module in (jax.tree, jax.tree_util) or _package(getattr(module, "__name__", "")) not in _LIBRARIES:
            entries = getattr(module, "__dict__", {})
            # Users' modules may import a function by any name. To look at all names of all packages takes four times as
            # long, at every trace.
            names = (*_NAMES, *_SHORT) if _is_installed(module) else tuple(entries)
            places += [(module, name, entries[name]) for name in names if _is_known(entries.get(name))]
    places = list({(id(module), name): (module, name, own) for module, name, own in places}.values())
    for module, name, own in places:
        setattr(module, name, _OURS[_KNOWN[own]])
    return places


def restore_functions(places: Sequence[tuple[ModuleType, str, Callable[..., Any]]]) -> None:
    """Put JAX's own functions back."""
    for module, name, own in places:
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
    found = _JAX["tree_leaves_with_path"](tree, _leaf(is_leaf), **options)
    return [(path, _shown(leaf)) for path, leaf in found]


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
