"""Nested containers and dataclasses of tensors: arguments and outputs of modules."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every leaf; containers in which no leaf changes remain the same objects.

    So a module can write into a cache or a list that it receives.
    """
    if tree is None or isinstance(tree, torch.Tensor):
        return function(tree)
    # Exact types: named tuples and other subclasses cannot be built from a list of items.
    if type(tree) in (tuple, list):
        items = [map_leaves(item, function) for item in tree]
        return tree if _same(items, tree) else type(tree)(items)
    if type(tree) is dict:
        values = [map_leaves(value, function) for value in tree.values()]
        return tree if _same(values, tree.values()) else dict(zip(tree, values, strict=True))
    leaves, spec = pytree.tree_flatten(tree)
    mapped = [function(leaf) for leaf in leaves]
    return tree if _same(mapped, leaves) else pytree.tree_unflatten(mapped, spec)


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(map(operator.is_, new, old))


def map_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors in containers and dataclasses; a dataclass is copied."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        return _map_fields(leaf, dtype) if _is_dataclass(leaf) else leaf

    return map_leaves(tree, cast)


def _map_fields(instance: Any, dtype: torch.dtype) -> Any:
    old = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    new = {name: map_floating(value, dtype) for name, value in old.items()}
    if _same(new.values(), old.values()):
        return instance
    # Not by dataclasses.replace: it accepts no init=False fields, and runs __post_init__ again.
    changed = copy.copy(instance)
    for name, value in new.items():
        object.__setattr__(changed, name, value)  # also works for a frozen one
    return changed


def _is_dataclass(leaf: Any) -> bool:
    # pytree treats a dataclass as one leaf, unless the program has registered it.
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves of nested containers and dataclasses."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    leaves = []
    for leaf in pytree.tree_leaves(tree):
        if _is_dataclass(leaf):
            leaves += leaves_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            leaves.append(leaf)
    return leaves
