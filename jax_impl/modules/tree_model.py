"""A plain pytree of parameters as a model: nested dictionaries, lists, dataclasses, and functions over them.

::

    {"embed": E, "layers": [{"w": A}, {"w": B}]}     paths embed, layers/0/w, layers/1/w

    TreeNode
      embed: Param
      layers: TreeList [TreeNode (w: Param), TreeNode (w: Param)]

Outside, users see the pytree, in which ``UnitParameter`` takes the place of a unit's arrays. Leaves that are no arrays
(activation functions, flags, sizes), as modules that are pytrees have them (equinox), stay in their places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jax_impl.modules.unit_parameter import in_tree, run_in_unit, unit_at

Tree = Any
_NODE = "_tree_node"


@dataclass(frozen=True)
class Setting:
    """A leaf that is no array."""

    value: Any


@dataclass(frozen=True, eq=False)
class _Node:
    """How to make a node again. ``settings``: leaves that are no arrays, by name.

    Compared by identity, since nnx keeps it among the static attributes of a module, and settings may be anything.
    """

    structure: Any
    names: tuple[str | int, ...]
    settings: Mapping[str | int, Any]


class TreeNode(nnx.Module):
    """A node of a pytree: attributes are its children."""


class TreeList(nnx.List[Any]):
    """The same for a list or tuple."""


def call_unit(function: Callable[..., Any], params: Tree, /, *args: Any, **kwargs: Any) -> Any:
    """``function(params, *args, **kwargs)``, where ``params`` may be a unit of a sharded model.

    In a loss over a pytree ``params`` is a subtree, of which ``function`` gets the arrays; where it is a unit, or a
    part of one, they are gathered for this call. With an nnx model it is a module. Plain pytrees and modules are just
    passed on, so the same code runs without sharding. ``args`` are pytrees of arrays and Python values. Arrays that
    depend on weights, or on the passes of a loop around the call, must be arguments: ``function`` may not close over
    them. A stack is scanned by ``jax.lax.scan`` over its subtree, with ``call_unit`` in the body.
    """
    if unit_at(params) is None:
        return function(params, *args, **kwargs)
    return run_in_unit(function, params, args, kwargs)


def as_module(model: nnx.Module | Tree) -> nnx.Module:
    """The model itself, or a module with the pytree's arrays as parameters.

    Raises ``ValueError`` for a number that is no array where it may be a parameter, and a key that cannot be part of a
    path.
    """
    if isinstance(model, nnx.Module):
        return model
    module = _node(model, (), callable(model))
    if not isinstance(module, nnx.Module):
        raise ValueError(f"model: expected an nnx module or a pytree of arrays, got {type(model).__name__}")
    _check_paths(module)
    return module


def as_given(module: nnx.Module) -> nnx.Module | Tree:
    """The other way: a pytree for a module made by ``as_module``; else the module."""
    return _tree(module) if isinstance(module, TreeNode | TreeList) else module


def given_node(module: nnx.Module, node_type: type) -> Any:
    """The node of the given pytree that became ``module``, its children None; None for nodes of other types."""
    node: _Node | None = getattr(module, _NODE, None)
    data = None if node is None else node.structure.node_data()
    if node is None or data is None or not issubclass(data[0], node_type):
        return None
    return node.structure.unflatten([None] * len(node.names))


def may_be_unit(module: nnx.Module) -> bool:
    """Not lists and dictionaries of modules; in a pytree lists that hold arrays may, such as ``(weight, bias)``."""
    if isinstance(module, TreeList):
        return any(isinstance(child, nnx.Param) for child in module)
    return not isinstance(module, nnx.List | nnx.Dict)


def _node(
    tree: Tree, path: tuple[str | int, ...], of_module: bool
) -> nnx.Module | nnx.Param[Any] | Setting | None:
    """``of_module``: it is a leaf of a node that can be called, whose numbers are settings, as a rate of dropout is."""
    if tree is None:
        return None
    if isinstance(tree, nnx.Module):
        raise ValueError(
            f"parameter {_joined(path)!r}: expected an array, got an nnx module, {type(tree).__name__}: an nnx module "
            "that holds it, such as nnx.List, can be a model"
        )
    entries, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda below: below is not tree)
    if [key for key, _ in entries] == [()]:
        if hasattr(tree, "shape") and hasattr(tree, "dtype"):
            return nnx.Param(tree)
        if isinstance(tree, float | complex) and not of_module:
            raise ValueError(
                f"parameter {_joined(path)!r}: expected an array, got {type(tree).__name__} {tree!r}: jnp.asarray "
                "makes it a parameter; what is none belongs into the loss, or into a module that can be called"
            )
        return Setting(tree)
    names = [_name(key[0], path) for key, _ in entries]
    if len(set(map(str, names))) != len(names):
        raise ValueError(f"node {_joined(path)!r}: expected keys with names of their own, got {names}")
    children = [
        _node(child, (*path, name), callable(tree)) for name, (_, child) in zip(names, entries, strict=True)
    ]
    settings = {
        name: child.value for name, child in zip(names, children, strict=True) if isinstance(child, Setting)
    }
    node: nnx.Module
    if entries and not settings and all(isinstance(name, int) for name in names):
        node = TreeList(children)
    else:
        node = TreeNode()
        for name, child in zip(names, children, strict=True):
            if name not in settings:
                setattr(node, str(name), child)
    setattr(node, _NODE, _Node(structure, tuple(names), settings))
    return node


def _tree(value: Any) -> Tree:
    if isinstance(value, nnx.Param):
        return in_tree(value.get_raw_value())
    if value is None:
        return value
    node: _Node = getattr(value, _NODE)
    return node.structure.unflatten(
        [
            node.settings[name] if name in node.settings else _tree(getattr(value, str(name)))
            for name in node.names
        ]
    )


def _name(key: Any, path: tuple[str | int, ...]) -> str | int:
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    name = key.name if isinstance(key, jax.tree_util.GetAttrKey) else str(getattr(key, "key", key))
    forbidden = ("__", "_pytree", _NODE)
    if "." in name or not all(part and not part.startswith(forbidden) for part in name.split("/")):
        raise ValueError(
            f"node {_joined(path)!r}: expected keys that can be part of a path like 'layers/0/w', got {name!r}: rename "
            "it, or nest another dictionary instead of '.'"
        )
    return name


def _check_paths(module: nnx.Module) -> None:
    paths = [_joined(key) for key, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))]
    # A checkpoint has a node for each part of a path, so that none is a parameter and a node.
    nodes = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
    twice = sorted(path for path, count in Counter(paths).items() if count > 1 or path in nodes)
    if twice:
        raise ValueError(
            f"model: expected parameters with paths of their own, none below another, got {twice[:5]} twice: keys with "
            "'/' are read as paths"
        )


def _joined(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
