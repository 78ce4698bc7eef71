"""Arrays of a train state in the host's memory (``pinned_host``), which programs compute with on the device.

A state may lie wherever its user puts it with ``jax.device_put`` and ``sharding.with_memory_kind``. A program brings
what it needs to the device, and returns what it changes to where it was.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")
HOST = "pinned_host"
"""The kind of the host's memory from which devices copy by themselves."""
_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host
# Before, the CPU compiler refuses transfers in a program of several devices.
_MOVES_ON_CPU = (0, 10, 2)


def on_device(tree: Tree) -> Tree:
    """Inside of a program: the same arrays, all of them in the device's memory."""
    return jax.tree.map(lambda x: x if is_on_device(x) else _put(x, _DEVICE), tree)


def in_host(tree: Tree) -> Tree:
    """Inside of a program: arrays that lie on the device, in the host's memory."""
    return jax.tree.map(lambda x: _put(x, _HOST), tree)


def is_on_device(x: jax.Array) -> bool:
    """Inside of a program."""
    return bool(_space(x) == _DEVICE)


def as_before(tree: Tree, before: Tree) -> Tree:
    """Inside of a program: each array of ``tree`` in the kind of memory in which its counterpart in ``before`` is."""
    return jax.tree.map(
        lambda x, given: x if _space(x) == _space(given) else _put(x, _space(given)), tree, before
    )


def constrained(tree: Tree, shardings: Any) -> Tree:
    """Inside of a program: arrays on the device lie so; others are as they are."""
    return jax.tree.map(
        lambda x, sharding: jax.lax.with_sharding_constraint(x, sharding) if is_on_device(x) else x,
        tree,
        shardings,
    )


def memory_kinds(tree: object) -> tuple[str | None, ...]:
    """Of the arrays of a tree."""
    return tuple(leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree))


def in_memory(sharding: Any, kind: str | None) -> Any:
    """``sharding`` in memory of this kind; "" or None: the default."""
    return sharding.with_memory_kind(kind) if kind else sharding


def moved(array: jax.Array, kind: str) -> jax.Array:
    """Outside of programs: the array in memory of this kind, "" for the device's own."""
    return jax.device_put(array, in_memory(array.sharding, kind)) if kind else array


def kinds_like(example: object, expected: Tree) -> Tree:
    """In place of each array of ``expected`` the kind of memory of its counterpart in ``example``, "" for the default.

    Raises ``ValueError`` for an example of another structure; without one (None) all is the default.
    """
    if example is None:
        return jax.tree.map(lambda _: "", expected)
    mine, theirs = (str(jax.tree.structure(tree)) for tree in (expected, example))
    if mine != theirs:
        raise ValueError(f"like: expected a state of the same plan and optimizer, {mine}, got {theirs}")
    return jax.tree.map(lambda x: x.sharding.memory_kind or "", example)


def _put(x: jax.Array, space: Any) -> jax.Array:
    if jax.default_backend() == "cpu" and jax.__version_info__ < _MOVES_ON_CPU:
        version = ".".join(map(str, _MOVES_ON_CPU))
        raise ValueError(
            f"state: on CPU devices, arrays in the host's memory need jax {version} or later in a step, got "
            f"{jax.__version__}: put them on the device first (sharding.with_memory_kind), or update jax"
        )
    return jax.device_put(x, space)


def _space(x: jax.Array) -> Any:
    return jax.typeof(x).memory_space
