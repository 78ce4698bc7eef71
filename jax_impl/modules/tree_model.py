"""A plain pytree of parameters as a model: nested dictionaries, lists and dataclasses, with functions over them.

::

    {"embed": E, "layers": [{"w": A}, {"w": B}]}     paths embed, layers/0/w, layers/1/w

    TreeNode
      embed: Param
      layers: TreeList [TreeNode (w: Param), TreeNode (w: Param)]

Users see the pytree, in which ``UnitParameter`` replaces a unit's arrays. Leaves that are not arrays (activation
functions, flags, sizes), as in modules that are pytrees (equinox), stay in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jax_impl.modules.unit_parameter import in_tree, joined, run_in_unit, unit_at

Tree = Any
_NODE = "_tree_node"


@dataclass(frozen=True)
class Setting:
    """A leaf that is not an array."""

    value: Any


@dataclass(frozen=True, eq=False)
class _Node:
    """The information to rebuild a node. ``settings``: leaves that are not arrays, by name.

    Compared by identity, because nnx stores it as a static attribute of a module, and settings may be anything.
    """

    structure: Any
    names: tuple[str | int, ...]
    settings: Mapping[str | int, Any]


class TreeNode(nnx.Module):
    """A node of a pytree; its attributes are its children."""


class TreeList(nnx.List[Any]):
    """A node for a list or tuple."""


def call_unit(function: Callable[..., Any], params: Tree, /, *args: Any, **kwargs: Any) -> Any:
    """``function(params, *args, **kwargs)``, where ``params`` may be a unit of a sharded model.

    In a loss over a pytree, ``params`` is a subtree; ``function`` gets its arrays, which are gathered for this call if
    the subtree is a unit or a part of one. In a loss over an nnx model, ``params`` is a module. Plain pytrees and
    modules are passed on unchanged, so the same code runs without sharding. ``args`` are pytrees of arrays and Python
    values. ``function`` may not close over arrays that depend on weights or on the iteration of a surrounding loop:
    pass such arrays as arguments. Scan a stack by ``jax.lax.scan`` over its subtree, with ``call_unit`` in the body.
    """
    if unit_at(params) is None:
        return function(params, *args, **kwargs)
    return run_in_unit(function, params, args, kwargs)


def as_module(model: nnx.Module | Tree) -> nnx.Module:
    """The model itself, or a module with the pytree's arrays as parameters.

    Raises ``ValueError`` for a Python number in place of a parameter, and for a key that cannot be part of a path.
    """
    if isinstance(model, nnx.Module):
        return model
    module = _node(model, (), callable(model))
    if not isinstance(module, nnx.Module):
        raise ValueError(f"model: expected an nnx module or a pytree of arrays, got {type(model).__name__}")
    _check_paths(module)
    return module


def as_given(module: nnx.Module) -> nnx.Module | Tree:
    """The inverse: the pytree for a module made by ``as_module``, otherwise the module."""
    return _tree(module) if isinstance(module, TreeNode | TreeList) else module


def given_node(module: nnx.Module, node_type: type) -> Any:
    """The node of the given pytree that became ``module``, with None as children; None for nodes of other types."""
    node: _Node | None = getattr(module, _NODE, None)
    data = None if node is None else node.structure.node_data()
    if node is None or data is None or not issubclass(data[0], node_type):
        return None
    return node.structure.unflatten([None] * len(node.names))


def may_be_unit(module: nnx.Module) -> bool:
    """False for lists and dictionaries of modules; in a pytree, True for lists of arrays such as ``(weight, bias)``."""
    if isinstance(module, TreeList):
        return any(isinstance(child, nnx.Param) for child in module)
    return not isinstance(module, nnx.List | nnx.Dict)


def _node(
    tree: Tree, path: tuple[str | int, ...], of_module: bool
) -> nnx.Module | nnx.Param[Any] | Setting | None:
    """``of_module``: whether the leaf belongs to a callable node, whose numbers are settings (a dropout rate)."""
    if tree is None:
        return None
    if isinstance(tree, nnx.Module):
        raise ValueError(
            f"parameter {joined(path)!r}: expected an array, got an nnx module, {type(tree).__name__}: use an nnx "
            "module that contains it, such as nnx.List, as the model"
        )
    entries, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda below: below is not tree)
    if [key for key, _ in entries] == [()]:
        if hasattr(tree, "shape") and hasattr(tree, "dtype"):
            return nnx.Param(tree)
        if isinstance(tree, float | complex) and not of_module:
            raise ValueError(
                f"parameter {joined(path)!r}: expected an array, got {type(tree).__name__} {tree!r}: jnp.asarray "
                "makes it a parameter; if it is not a parameter, put it into the loss or into a callable module"
            )
        return Setting(tree)
    names = [_name(key[0], path) for key, _ in entries]
    if len(set(map(str, names))) != len(names):
        raise ValueError(f"node {joined(path)!r}: expected keys with unique names, got {names}")
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
            f"node {joined(path)!r}: expected keys that can be part of a path like 'layers/0/w', got {name!r}: "
            "rename the key, or nest another dictionary instead of '.'"
        )
    return name


def _check_paths(module: nnx.Module) -> None:
    paths = [joined(key) for key, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))]
    # A checkpoint has a node for each part of a path, so a path must not be both a parameter and a node.
    nodes = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
    twice = sorted(path for path, count in Counter(paths).items() if count > 1 or path in nodes)
    if twice:
        raise ValueError(
            f"model: expected parameters with unique paths, none below another, got {twice[:5]} twice: keys that "
            "contain '/' count as paths"
        )
