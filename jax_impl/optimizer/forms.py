"""The trees of parameters that an optimizer may get (``chosen_form.py`` chooses one).

A form arranges the same parameters as a tree: the model's own tree, nested names, or parameters by unit.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
import optax
from flax import nnx

from jax_impl.modules.tree_model import as_given
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

# By path.
Values = Mapping[str, jax.Array]


@dataclass(frozen=True)
class StoredArray:
    """An array of the train state. ``shapes``: of its parameters, including the layers of a stack. ``dtypes``: of
    weights and gradients. ``padded``: whether it has elements that belong to no parameter."""

    key: str
    shape: tuple[int, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, np.dtype]
    padded: bool


@dataclass(frozen=True)
class ModelTree:
    """A pytree in which a program sees a model: its structure, and the path of each leaf. ``name``: of the form."""

    name: str
    structure: jax.tree_util.PyTreeDef
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """A tree for a transformation: ``pack`` puts parameters into the tree, ``unpack`` takes them out."""

    pack: Callable[[Values], Any]
    unpack: Callable[[Any], Values]


def taking_loss(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer with an ``update`` that accepts ``value``, the loss."""
    able = optax.with_extra_args_support(optimizer)
    parameters = inspect.signature(able.update).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD or parameter.name == "value" for parameter in parameters):
        return able

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
        return able.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(able.init, update)


def arrays_of(plan: ShardingPlan) -> tuple[StoredArray, ...]:
    arrays = []
    for group in plan.groups:
        for key, stored in group.stored.items() if group.trainable else ():
            paths = tuple(path for path in group.paths if plan.parameters[path].key == key)
            shapes = tuple(plan.parameters[path].shape for path in paths)
            padded = math.prod(stored.shape) > sum(map(math.prod, shapes))
            dtypes = group.wire.main, group.wire.grad
            arrays.append(StoredArray(key, tuple(stored.shape), paths, shapes, dtypes, padded))
    return tuple(arrays)


def trees_of(plan: ShardingPlan) -> tuple[ModelTree, ...]:
    """The trees that programs pass to an optimizer of this model, the usual tree first.

    "tree": the given pytree; for an nnx model ``nnx.as_pure(nnx.state(model, nnx.Param))``, which flax's optimizer
    updates. "boxed" and "dictionary", only for nnx models: the state with its variables, and its ``nnx.to_pure_dict``.
    """
    # The leaves are the paths themselves instead of arrays.
    parameters, variables = cast(Any, (plan.model.parameters, plan.model.variables))
    model = as_given(plan.model.merge(parameters, variables, {}))
    trees = {"tree": model}
    if isinstance(model, nnx.Module):
        state = nnx.state(model, nnx.Param)
        trees = {"tree": nnx.as_pure(state), "boxed": state, "dictionary": nnx.to_pure_dict(state)}
    model_trees = []
    for name, tree in trees.items():
        leaves, structure = jax.tree.flatten(tree)
        model_trees.append(ModelTree(name, structure, tuple(leaves)))
    return tuple(model_trees)


def by_unit(arrays: Sequence[StoredArray]) -> Form:
    def pack(values: Values) -> Any:
        return {array.key: {path: values[path] for path in array.paths} for array in arrays}

    return Form(pack, lambda tree: {path: x for array in arrays for path, x in tree[array.key].items()})


def by_name(arrays: Sequence[StoredArray]) -> Form:
    """The model's own names, as nested dictionaries."""
    # This order equals the order of a dictionary by path, so random numbers for the leaves are drawn in the same order.
    paths = sorted(path for array in arrays for path in array.paths)

    def pack(values: Values) -> Any:
        tree: OrderedDict[str, Any] = OrderedDict()
        for path in paths:
            *above, name = path.split("/")
            node = tree
            for segment in above:
                node = node.setdefault(segment, OrderedDict())
            node[name] = values[path]
        return tree

    def unpack(tree: Any) -> Values:
        return {
            path: functools.reduce(lambda node, name: node[name], path.split("/"), tree) for path in paths
        }

    return Form(pack, unpack)


def by_tree(model: ModelTree) -> Form:
    """The model's own pytree, with None for frozen parameters."""

    def pack(values: Values) -> Any:
        return jax.tree.unflatten(model.structure, [values.get(path) for path in model.paths])

    def unpack(tree: Any) -> Values:
        leaves = model.structure.flatten_up_to(tree)
        return {path: x for path, x in zip(model.paths, leaves, strict=True) if x is not None}

    return Form(pack, unpack)


def forms_of(arrays: Sequence[StoredArray], models: Sequence[ModelTree], *, units: bool) -> dict[str, Form]:
    """Forms by name, in the order in which they are tried: the model's own trees, "name" and "unit"."""
    forms = {model.name: by_tree(model) for model in models} | {"name": by_name(arrays)}
    return forms | {"unit": by_unit(arrays)} if units else forms
