"""The trees that a trial gives an optimizer (``trial``), and small arrays to fill them with.

A form is how the same parameters make a tree: the engine's arrays, or the model's own tree.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_impl.modules.tree_model import as_given
from jax_impl.runtime.sharding_plan import ShardingPlan

# By path.
Values = Mapping[str, jax.Array]

# Larger models are tried with smaller shapes.
_ELEMENTS = 1 << 18
# Two dimensions of a matrix: above the 128 from which Adafactor factors.
_LARGE, _SMALL = 160, 3


@dataclass(frozen=True)
class TriedArray:
    """An array of the train state. ``shapes``: of the parameters in it, with the layers of a stack. ``dtypes``: of
    weights and gradients. ``padded``: whether elements of no parameter follow. ``cut``: over model axes, so that
    elements of a parameter are not in its own order."""

    key: str
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, np.dtype]
    stacked: bool
    padded: bool
    cut: bool = False


@dataclass(frozen=True)
class ModelTree:
    """The pytree that a program knows a model by: its structure, and the path of each leaf."""

    structure: jax.tree_util.PyTreeDef
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """A tree that a transformation may be given, and how parameters come into it and out of it."""

    pack: Callable[[Values], Any]
    unpack: Callable[[Any], Values]


def taking_loss(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer with an ``update`` that may be given ``value``, the loss."""
    able = optax.with_extra_args_support(optimizer)
    parameters = inspect.signature(able.update).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD or parameter.name == "value" for parameter in parameters):
        return able

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
        return able.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(able.init, update)


def arrays_of(plan: ShardingPlan) -> tuple[TriedArray, ...]:
    found = []
    for unit in plan.units.values():
        for group in unit.groups:
            for key, stored in group.stored.items() if group.trainable else ():
                paths = tuple(path for path in group.paths if plan.parameters[path].key == key)
                shapes = tuple(plan.parameters[path].shape for path in paths)
                padded = math.prod(stored.shape) > sum(map(math.prod, shapes))
                dtypes = group.wire.main, group.wire.grad
                cut = plan.engine == "shard_map" and any(map(group.cuts_of, paths))
                found.append(TriedArray(key, paths, shapes, dtypes, group.layers is not None, padded, cut))
    return tuple(found)


def tree_of(plan: ShardingPlan) -> ModelTree:
    """The given pytree; of an nnx model nested dictionaries, with numbers for the items of lists, as
    ``nnx.to_pure_dict(nnx.state(model, nnx.Param))`` has them."""
    paths: Any = plan.model.parameters
    # Only nnx models have other variables.
    model = None if plan.variables else as_given(plan.model.merge(paths, (), {}))
    leaves, structure = jax.tree.flatten(_nested(paths) if isinstance(model, nnx.Module | None) else model)
    return ModelTree(structure, tuple(leaves))


def _nested(paths: Sequence[str]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path in paths:
        *above, name = (int(part) if part.isdigit() else part for part in path.split("/"))
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = path
    return tree


def flat_form(arrays: Sequence[TriedArray]) -> Form:
    def pack(values: Values) -> Any:
        return {array.key: _joined(array, [values[path] for path in array.paths]) for array in arrays}

    def unpack(tree: Any) -> Values:
        found = {}
        for array in arrays:
            lead = array.shapes[0][:1] if array.stacked else ()
            flat = jnp.flip(tree[array.key], -1) if array.cut else tree[array.key]
            start = 0
            for path, shape in zip(array.paths, array.shapes, strict=True):
                end = start + math.prod(shape[len(lead) :])
                found[path] = flat[..., start:end].reshape(shape)
                start = end
        return found

    return Form(pack, unpack)


def _joined(array: TriedArray, leaves: Sequence[jax.Array]) -> jax.Array:
    lead = array.shapes[0][:1] if array.stacked else ()
    rows = [leaf.reshape(*lead, math.prod(leaf.shape[len(lead) :])) for leaf in leaves]
    if array.padded:
        rows.append(jnp.zeros((*lead, 1 + sum(row.shape[-1] for row in rows) // 8), rows[0].dtype))
    joined = jnp.concatenate(rows, axis=-1)
    return jnp.flip(joined, -1) if array.cut else joined


def by_path(_: Sequence[TriedArray]) -> Form:
    return Form(dict, lambda tree: tree)


def by_unit(arrays: Sequence[TriedArray]) -> Form:
    def pack(values: Values) -> Any:
        return {array.key: {path: values[path] for path in array.paths} for array in arrays}

    return Form(pack, lambda tree: {path: x for array in arrays for path, x in tree[array.key].items()})


def by_name(arrays: Sequence[TriedArray]) -> Form:
    """The model's own tree, as nested dictionaries."""
    # In this order leaves come as those of a dictionary by path, and so does what is drawn for them at random.
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


FORMS = ("name", "tree", "unit")
"""Trees of parameters: the model's own names, its own pytree, and parameters under their units."""


def form_named(name: str, arrays: Sequence[TriedArray], model: ModelTree) -> Form:
    """One of ``FORMS``."""
    if name == "tree":
        return by_tree(model)
    return by_name(arrays) if name == "name" else by_unit(arrays)


def of_each_kind(arrays: tuple[TriedArray, ...]) -> tuple[TriedArray, ...]:
    """The first two and the last of parameters that differ in the numbers in their names only."""
    kinds: dict[Any, list[str]] = {}
    for array in arrays:
        for path, shape in zip(array.paths, array.shapes, strict=True):
            kinds.setdefault((re.sub(r"\d+", "#", path), shape, array.stacked), []).append(path)
    kept = {path for paths in kinds.values() for path in (*paths[:2], paths[-1])}
    found = []
    for array in arrays:
        own = {path: shape for path, shape in zip(array.paths, array.shapes, strict=True) if path in kept}
        if own:
            found.append(replace(array, paths=tuple(own), shapes=tuple(own.values())))
    return tuple(found)


def reduced(arrays: tuple[TriedArray, ...]) -> tuple[TriedArray, ...]:
    """The same names, dimensions and padding in at most about ``_ELEMENTS`` elements."""
    if sum(math.prod(shape) for array in arrays for shape in array.shapes) <= _ELEMENTS:
        return arrays
    left, seen, found = _ELEMENTS, set(), []
    for array in arrays:
        shapes = []
        for shape in array.shapes:
            # One parameter of each shape keeps something of its size.
            small = _capped(shape, _LARGE)
            if shape in seen or math.prod(small) > left:
                small = _capped(shape, _SMALL)
            seen.add(shape)
            left -= math.prod(small)
            shapes.append(small)
        found.append(replace(array, shapes=_equal_layers(tuple(shapes), array.stacked)))
    return tuple(found)


def _capped(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The two largest dimensions at most ``most``, others at most ``_SMALL``."""
    largest = sorted(range(len(shape)), key=lambda i: shape[i])[-2:]
    return tuple(min(size, most if i in largest else _SMALL) for i, size in enumerate(shape))


def _equal_layers(shapes: tuple[tuple[int, ...], ...], stacked: bool) -> tuple[tuple[int, ...], ...]:
    if not stacked:
        return shapes
    layers = min(shape[0] for shape in shapes)
    return tuple((layers, *shape[1:]) for shape in shapes)


def numbers(arrays: Sequence[TriedArray], seed: int, spread: int) -> dict[str, jax.Array]:
    """Weights (``seed`` 0) or gradients of the parameters: normal numbers, of up to ``spread`` powers of ten more or
    less in each, so that thresholds are passed in some; zeros where ``spread`` is 0. All are float64: in fewer bits the
    order of a global norm's sum would show."""
    random = np.random.default_rng(seed)
    found = {}
    for array in arrays:
        for path, shape in zip(array.paths, array.shapes, strict=True):
            scale = 10.0 ** random.uniform(-spread, spread) if spread else 0.0
            found[path] = jnp.asarray(scale * random.standard_normal(shape), np.float64)
    return found
