"""A plain pytree of parameters as a model: nested dictionaries, lists, dataclasses, and functions over them.

::

    {"embed": E, "layers": [{"w": A}, {"w": B}]}     paths embed, layers/0/w, layers/1/w

    TreeNode
      embed: Param
      layers: TreeList [TreeNode (w: Param), TreeNode (w: Param)]

Outside, users see the pytree; a unit's place in it is taken by what ``call_unit`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

from jax_impl.modules.unit_slot import UnitSlot, run_in_slot

Tree = Any
_NODE = "_tree_node"


class TreeNode(nnx.Module):
    """A node of a pytree: attributes are its children."""


class TreeList(nnx.List[Any]):
    """The same for a list or tuple."""


def call_unit(function: Callable[..., Any], params: Tree, /, *args: Any, **kwargs: Any) -> Any:
    """``function(params, *args, **kwargs)``, where ``params`` may be a unit of a sharded model.

    In a loss over a pytree ``params`` is a subtree, of which ``function`` gets the arrays; where it is a unit, they are
    gathered for this call. With an nnx model it is a module. Plain pytrees and modules are just passed on, so the same
    code runs without sharding. ``args`` are pytrees of arrays and Python values. Arrays that depend on weights, or on
    the passes of a loop around the call, must be arguments: ``function`` may not close over them. A stack is scanned by
    ``jax.lax.scan`` over its subtree, with ``call_unit`` in the body.
    """
    if isinstance(params, UnitSlot):
        return run_in_slot(params, partial(_call_with_tree, function), args, kwargs)
    return function(params, *args, **kwargs)


def _call_with_tree(function: Callable[..., Any], module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    return function(as_given(module), *args, **kwargs)


def as_module(model: nnx.Module | Tree) -> nnx.Module:
    """The model itself, or a module with the pytree's arrays as parameters.

    Raises ``ValueError`` for a leaf that is no array, and a key that cannot be part of a path.
    """
    if isinstance(model, nnx.Module):
        return model
    module = _node(model, ())
    if not isinstance(module, nnx.Module):
        raise ValueError(f"model: expected an nnx module or a pytree of arrays, got {type(model).__name__}")
    return module


def as_given(module: nnx.Module) -> nnx.Module | Tree:
    """The other way: a pytree for a module made by ``as_module``, with slots for units; else the module."""
    return _tree(module) if isinstance(module, TreeNode | TreeList) else module


def may_be_unit(module: nnx.Module) -> bool:
    """Not lists and dictionaries of modules; in a pytree lists that hold arrays may, such as ``(weight, bias)``."""
    if isinstance(module, TreeList):
        return any(isinstance(child, nnx.Param) for child in module)
    return not isinstance(module, nnx.List | nnx.Dict)


def _node(tree: Tree, path: tuple[str | int, ...]) -> nnx.Module | nnx.Param[Any] | None:
    if tree is None:
        return None
    if isinstance(tree, nnx.Module):
        raise ValueError(
            f"parameter {_joined(path)!r}: expected an array, got an nnx module, {type(tree).__name__}: an nnx module "
            "that holds it, such as nnx.List, can be a model"
        )
    entries, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda below: below is not tree)
    if [key for key, _ in entries] == [()]:
        if not hasattr(tree, "shape") or not hasattr(tree, "dtype"):
            raise ValueError(f"parameter {_joined(path)!r}: expected an array, got {type(tree).__name__}")
        return nnx.Param(tree)
    names = [_name(key[0], path) for key, _ in entries]
    if len(set(map(str, names))) != len(names):
        raise ValueError(f"node {_joined(path)!r}: expected keys with names of their own, got {names}")
    children = [_node(child, (*path, name)) for name, (_, child) in zip(names, entries, strict=True)]
    node: nnx.Module
    if entries and all(isinstance(name, int) for name in names):
        node = TreeList(children)
    else:
        node = TreeNode()
        for name, child in zip(names, children, strict=True):
            setattr(node, str(name), child)
    setattr(node, _NODE, (structure, tuple(names)))
    return node


def _tree(value: Any) -> Tree:
    if isinstance(value, nnx.Param):
        return value.get_raw_value()
    if value is None or isinstance(value, UnitSlot):
        return value
    structure, names = getattr(value, _NODE)
    return structure.unflatten([_tree(getattr(value, str(name))) for name in names])


def _name(key: Any, path: tuple[str | int, ...]) -> str | int:
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    name = key.name if isinstance(key, jax.tree_util.GetAttrKey) else str(getattr(key, "key", key))
    if not name or "/" in name or "." in name or name.startswith(("__", "_pytree", _NODE)):
        raise ValueError(
            f"node {_joined(path)!r}: expected keys that can be part of a path like 'layers/0/w', got {name!r}: rename "
            "it, or nest another dictionary instead of '/' or '.'"
        )
    return name


def _joined(path: tuple[str | int, ...]) -> str:
    return "/".join(map(str, path))
