"""Arrays of JAX models: their places in arguments and outputs, their paths in pytrees of parameters, their gradients.

Layers of a stack are recognized by their parameters, which are the stack's without its leading axis.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.parity.recorded.store import Stored


class Hidden(Exception):
    """A value that exists only in a compiled or vectorized program."""


def is_floating(array: Any) -> bool:
    """Whether an array, also one of bfloat16, is of a real floating dtype."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def is_leaf(value: Any) -> bool:
    """Whether ``value`` is an array of numbers or booleans; random keys are not."""
    return isinstance(value, jax.Array | np.ndarray) and (
        value.dtype == bool or bool(jnp.issubdtype(value.dtype, jnp.number))
    )


def leaves(tree: Any) -> dict[str, Any]:
    """The arrays of ``tree`` by place, in order; a tree that is one array has the place ``""``.

    Items of tuples and lists are named by number; items of named tuples, dicts and dataclasses by name. Raises
    ``ValueError`` for two arrays at one place, as in ``{"a.b": x, "a": {"b": y}}``.
    """
    by_place: dict[str, Any] = {}

    def keep(where: str, leaf: Any) -> Any:
        if where in by_place:
            raise ValueError(f"two arrays at {where!r}: keys with a dot make places ambiguous; rename one")
        by_place[where] = leaf
        return leaf

    map_leaves(keep, tree)
    return by_place


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A module or ``nnx.Rngs`` among arguments, with its values at the time of a call."""

    graphdef: Any
    state: Any

    @staticmethod
    def of(node: Any) -> Frozen:
        """Raises ``Hidden``."""
        graphdef, state = nnx.split(node)
        return Frozen(graphdef, jax.tree.map(reveal, nnx.as_pure(state)))

    def thaw(self) -> Any:
        """A new object with those values."""
        return nnx.merge(self.graphdef, self.state)


def map_leaves(
    function: Callable[[str, Any], Any],
    tree: Any,
    where: str = "",
    *,
    modules: Callable[[Any], Any] = lambda node: node,
) -> Any:
    """``tree`` with ``function(place, leaf)`` for each array, stored or not, and ``modules(node)`` for each module,
    frozen or not.

    Objects that are not pytree nodes stay unchanged.
    """
    if is_leaf(tree) or isinstance(tree, Stored):
        return function(where, tree)
    if isinstance(tree, nnx.Variable):
        return map_leaves(function, tree[...], where)
    if isinstance(tree, nnx.Pytree | Frozen):
        return modules(tree)
    if tree is None:
        return tree

    def below(name: Any, value: Any) -> Any:
        return map_leaves(function, value, f"{where}.{name}" if where else str(name), modules=modules)

    if isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", range(len(tree)))
        items = [below(name, item) for name, item in zip(names, tree, strict=True)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        twin = copy.copy(tree)
        twin.update({name: below(name, value) for name, value in tree.items()})
        return twin
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | Mapping):
        other = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                object.__setattr__(other, field.name, below(field.name, getattr(tree, field.name)))
        return other
    return _map_node(below, tree)


def _map_node(below: Callable[[Any, Any], Any], tree: Any) -> Any:
    """The same for any other pytree node."""
    children, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if len(children) == 1 and children[0][1] is tree:
        return tree
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in children]
    new = [below(name, child) for name, (_, child) in zip(names, children, strict=True)]
    return jax.tree.unflatten(structure, new)


def reveal(array: Any) -> Any:
    """The array behind a gradient's tracer. Raises ``Hidden`` for tracers without a value."""
    # Tracers are nested, one for each gradient around the call; more than a few come from the model itself.
    for _ in range(8):
        if not isinstance(array, jax.core.Tracer):
            return array
        array = jax.lax.stop_gradient(array)
    raise Hidden


def to_numpy(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of ``tree`` on the host. Raises ``Hidden``."""
    return {where: np.asarray(reveal(leaf)) for where, leaf in leaves(tree).items()}


def watch_gradient(array: jax.Array, token: jax.Array, note: Callable[[np.ndarray], None]) -> jax.Array:
    """``array``; in the backward, its gradient goes to ``note``.

    ``token``: a number that the backward differentiates by; through it the backward also reaches arrays that do not
    depend on parameters.
    """

    @jax.custom_vjp
    def same(x: jax.Array, token: jax.Array) -> jax.Array:
        return x

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        with contextlib.suppress(Hidden):
            note(np.asarray(reveal(gradient)))
        return gradient, jnp.zeros_like(token)

    same.defvjp(lambda x, token: (x, None), backward)
    return same(array, token)


def cast_floats(tree: Any, dtype: Any) -> Any:
    """A pytree with its floating arrays in ``dtype``."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if is_leaf(x) and is_floating(x) else x, tree)


def on_host(tree: Any) -> Any:
    """A pytree with all arrays whole on one device, wherever their shards are; random keys stay."""

    def whole(x: Any) -> Any:
        if not is_leaf(x):
            return x
        # A NumPy array that a model changes in place must not be the model's own array.
        return jnp.asarray(np.asarray(x)) if isinstance(x, jax.Array) else x.copy()

    return jax.tree.map(whole, tree)


def describe(batch: Any) -> str:
    """The leaves of a batch with shape and dtype, for messages."""
    named = [f"{where or 'batch'} {x.dtype}{list(x.shape)}" for where, x in leaves(batch).items()]
    return ", ".join(named) or "no arrays"


def leaves_by_path(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves of a pytree with the keys above them, joined by slashes."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def below(path: str, *names: Any) -> str:
    """The path extended by one part."""
    return "/".join([*([path] if path else []), *map(str, names)])


Arrays = Mapping[str, Any]


def length_of(arrays: Arrays, stack: Arrays) -> int:
    """The number of layers with the names and shapes of ``arrays`` in a stack's leading axes; 0 if it is no stack."""
    if not arrays or arrays.keys() != stack.keys():
        return 0
    shapes = {
        (np.shape(stack[name])[:1], np.shape(stack[name])[1:] == np.shape(x)) for name, x in arrays.items()
    }
    (first, same), *others = shapes
    return int(first[0]) if first and same and not others else 0


def equal(arrays: Arrays, others: Arrays, layer: int | None = None) -> bool:
    """Whether names and values are equal, in the other's ``layer`` if given. Raises ``Hidden``."""
    if arrays.keys() != others.keys():
        return False
    for name, array in arrays.items():
        other = reveal(others[name])
        if not np.array_equal(reveal(array), other if layer is None else other[layer], equal_nan=True):
            return False
    return True


def layer_of(arrays: Arrays, stack: Arrays, turn: int) -> int | None:
    """The layer of a stack with these values; if several match, the first from ``turn`` on, wrapping around.

    None if there is none. Raises ``Hidden``.
    """
    length = length_of(arrays, stack)
    turns = [(turn + step) % length for step in range(length)]
    return next((number for number in turns if equal(arrays, stack, number)), None)


def floating_of(tree: Any) -> dict[str, Any]:
    """The floating arrays of a pytree by path."""
    return {path: leaf for path, leaf in leaves_by_path(tree) if is_leaf(leaf) and is_floating(leaf)}


def others_of(tree: Any) -> dict[str, Any]:
    """The arrays of integers and booleans of a pytree by path."""
    return {path: leaf for path, leaf in leaves_by_path(tree) if is_leaf(leaf) and not is_floating(leaf)}


def merge_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """A pytree with some leaves replaced by those in ``leaves``."""
    old = list(leaves_by_path(tree))
    new = [leaves.get(path, leaf) for path, leaf in old]
    return jax.tree.unflatten(jax.tree.structure(tree), new)
