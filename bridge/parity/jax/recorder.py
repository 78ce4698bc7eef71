"""The calls of one run of a JAX model, recorded during the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from bridge.parity.jax.leaves import (
    Frozen,
    Hidden,
    is_floating,
    is_leaf,
    leaves,
    map_leaves,
    reveal,
    to_numpy,
    watch_gradient,
)
from bridge.parity.recorded.recording import Call, Heads, Leaves, Replacements
from bridge.parity.recorded.store import Store, Stored, StoredLeaves, map_together

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Parameters = Mapping[str, Any]
"""By path."""
LossOf = Callable[[Any], Any]
"""The loss of a model, called like the user's own function."""


def argument_tree(arguments: Arguments) -> dict[str, Any]:
    """Arguments by the first part of their place: positional ones by number, the others by name."""
    args, kwargs = arguments
    return {**{str(number): value for number, value in enumerate(args)}, **kwargs}


def map_arguments(
    leaf: Callable[[str, Any], Any], arguments: Arguments, modules: Callable[[Any], Any]
) -> Arguments:
    """Arguments with ``leaf(place, array)`` for each array and ``modules(node)`` for each module."""
    args, kwargs = arguments
    return (
        tuple(map_leaves(leaf, value, str(number), modules=modules) for number, value in enumerate(args)),
        {name: map_leaves(leaf, value, name, modules=modules) for name, value in kwargs.items()},
    )


def store_leaves(tree: Any, store: Store, known: dict[int, tuple[Any, Any]]) -> Any:
    """A pytree with ``Stored`` in place of its large arrays; see ``shelve``."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not is_leaf(x) or x.weak_type:
            return x
        if id(x) not in known:
            stored = store.keep(np.asarray(x))
            # Also keeps the array itself, so that no other array gets its id.
            known[id(x)] = x, stored if isinstance(stored, Stored) else x
        return known[id(x)][1]

    return jax.tree.map(leaf, tree)


def _kept(array: Any, where: str, inputs: MutableMapping[str, np.ndarray]) -> Any:
    """An array of a call's arguments, or its place on disk."""
    if not isinstance(inputs, StoredLeaves) or not isinstance(array, jax.Array) or array.weak_type:
        return array
    stored = inputs.location(where)
    return stored if isinstance(stored, Stored) else array


class CallReplay(Protocol):
    """A module as it was when it was called: its weights and state, without tracers of a gradient.

    ``parameters``: by full path. ``tree``: parameters and everything without a gradient, in the module's structure.
    """

    parameters: Parameters
    tree: Any

    def shelve(self, store: Store, known: dict[int, tuple[Any, Any]]) -> None:
        """Write the weights to ``store``. ``known``: written arrays by id, each with its stand-in."""
        self.tree, self.parameters = (
            store_leaves(tree, store, known) for tree in (self.tree, dict(self.parameters))
        )

    def load_weights(self) -> Self:
        """The same replay with its weights mapped."""
        twin = copy.copy(self)
        leaves, structure = jax.tree.flatten((self.tree, self.parameters))
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Stored)]
        arrays = map_together([leaves[index] for index in places])
        for index, array in zip(places, arrays, strict=True):
            leaves[index] = jnp.asarray(array)
        twin.tree, twin.parameters = jax.tree.unflatten(structure, leaves)
        return twin

    def __call__(self, parameters: Parameters, arguments: Arguments, recorder: Recorder) -> Any:
        """Call the module once more; ``recorder`` notes the module's own call first, then the calls inside."""


@dataclass
class Entry:
    """One call. ``outputs`` is None while the call runs, and for calls whose output has no value."""

    path: str
    number: int
    kind: str
    inputs: Leaves
    parent: int | None
    arguments: Arguments
    replay: CallReplay | None
    outputs: Leaves | None = None
    heads: Heads = ((), ())
    gradients: MutableMapping[str, np.ndarray] = field(default_factory=dict)

    def call(self, parent: int | None) -> Call:
        """The call as a part of the record, with the number of the call around it there."""
        own = self.path, self.number, self.kind
        return Call(*own, self.inputs, self.outputs or {}, self.gradients, parent, self.heads)


class Recorder:
    """Notes calls. ``token``: see ``watched``; None without a backward. ``replaced``: outputs to return instead.

    ``store``: where arrays go; None: they stay in memory.
    """

    def __init__(
        self, token: jax.Array | None = None, replaced: Replacements | None = None, store: Store | None = None
    ) -> None:
        self._leaves: Callable[..., MutableMapping[str, np.ndarray]] = dict if store is None else store.leaves
        self.token = token
        self.replaced = replaced or {}
        self.entries: list[Entry] = []
        self._open: list[int] = []
        self._counts: dict[str, int] = {}

    @property
    def path(self) -> str | None:
        """The path of the innermost running call."""
        return self.entries[self._open[-1]].path if self._open else None

    def call(
        self,
        path: str,
        kind: str,
        arguments: Arguments,
        run: Callable[[], Any],
        keep: Callable[[], CallReplay | None],
        heads: Heads = ((), ()),
    ) -> Any:
        """``run()``, recorded. Calls whose arguments have no values, as inside ``vmap``, run without a record."""
        try:
            inputs = self._leaves(to_numpy(argument_tree(arguments)))
            # Recorded before the call, which may change the module's own state.
            replay = keep()
            kept = map_arguments(
                lambda where, array: _kept(reveal(array), where, inputs), arguments, Frozen.of
            )
        except Hidden:
            return run()
        number = self._counts.get(path, 0)
        self._counts[path] = number + 1
        parent = self._open[-1] if self._open else None
        entry = Entry(path, number, kind, inputs, parent, kept, replay, gradients=self._leaves(), heads=heads)
        self._open.append(len(self.entries))
        self.entries.append(entry)
        try:
            output = run()
        finally:
            self._open.pop()
        try:
            entry.outputs = self._leaves(to_numpy(output))
        except Hidden:
            return output
        return self._passed_on(entry, output)

    def tap(self, name: str, value: Any) -> Any:
        """A value as a call without inputs."""
        return self.call(name, "tap", ((), {}), lambda: value, lambda: None)

    def _passed_on(self, entry: Entry, output: Any) -> Any:
        """The output that the model continues with: replaced where requested, and watched by the backward."""
        replaced = self.replaced.get((entry.path, entry.number), {})
        unknown = sorted(set(replaced) - set(leaves(output)))
        if unknown:
            raise KeyError(
                f"{entry.path}: expected replacements for {sorted(leaves(output))}, got {', '.join(unknown)}"
            )

        def leaf(where: str, array: Any) -> Any:
            if where in replaced:
                array = jnp.asarray(replaced[where], array.dtype)
            if self.token is None or not is_floating(array):
                return array
            entry.gradients[where] = np.zeros(array.shape, array.dtype)
            return watch_gradient(
                jnp.asarray(array), self.token, lambda got: entry.gradients.update({where: got})
            )

        return map_leaves(leaf, output)

    def calls(self, *, first: int = 0) -> list[Call]:
        """The calls from ``first`` on; parents are numbered within this list."""
        kept = [n for n, entry in enumerate(self.entries) if n >= first and entry.outputs is not None]
        index = {n: position for position, n in enumerate(kept)}

        def parent(n: int) -> int | None:
            above = self.entries[n].parent
            while above is not None and above not in index:
                above = self.entries[above].parent
            return None if above is None else index[above]

        return [self.entries[n].call(parent(n)) for n in kept]
