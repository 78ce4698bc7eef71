"""Arrays of a train state in the host's memory (``pinned_host``), which programs compute with on
the device.

A state may lie wherever its user puts it with ``jax.device_put`` and ``sharding.with_memory_kind``.
A program brings what it needs to the device, and returns what it changes to where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

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
    return jax.tree.map(lambda x, was: x if _space(x) == _space(was) else _put(x, _space(was)), tree, before)


def constrain(tree: Tree, shardings: Any) -> Tree:
    """Inside of a program: arrays on the device lie so; others are as they are."""
    return jax.tree.map(
        lambda x, sharding: jax.lax.with_sharding_constraint(x, sharding) if is_on_device(x) else x,
        tree,
        shardings,
    )


def memory_kinds(tree: object) -> tuple[str | None, ...]:
    """Of the arrays of a tree."""
    return tuple(leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree))


def in_memory(sharding: Any, memory_kind: str | None) -> Any:
    """``sharding`` in memory of this kind; "" or None: the default."""
    return sharding.with_memory_kind(memory_kind) if memory_kind else sharding


def move(array: jax.Array, memory_kind: str) -> jax.Array:
    """Outside of programs: the array in memory of this kind, "" for the device's own."""
    return jax.device_put(array, in_memory(array.sharding, memory_kind)) if memory_kind else array


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


def check_not_donated(name: str, array: jax.Array) -> None:
    """Raises ``ValueError`` for an array without values."""
    # XLA does not check: a program that is given such an array crashes the process. The state of
    # before a step that donated it is the usual one.
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
        raise ValueError(
            f"{name}: expected values, got an array that was given up (donated) to an earlier step: go on with the "
            "state which that step returned"
        )


# Of how many elements parts are multiples, that TPUs need not shift them: of the only, of the last
# two dimensions.
_ALONE, _ROWS, _COLUMNS = 1024, 32, 128


def fetch_after(arrays: Sequence[jax.Array], there: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, on the device, not before ``there``, which is True. Those on the device stay as they are."""
    # XLA's schedulers move transfers to the front, past barriers, but cannot know where a slice
    # begins whose start is computed from a scalar of the program. A slice has less than all
    # elements, or XLA would see that there is one start only.
    start = jnp.where(there, 0, 1).astype(jnp.int32)
    return tuple(x if is_on_device(x) else _fetch_in_parts(x, start) for x in arrays)


def _fetch_in_parts(x: jax.Array, start: jax.Array) -> jax.Array:
    cut = _middle(x.shape)
    if cut is None:
        # A small one may come at any time.
        return on_device(x)
    axis, middle = cut
    parts = [
        lax.dynamic_slice_in_dim(x, start, middle, axis),
        lax.dynamic_slice_in_dim(x, start + middle, x.shape[axis] - middle, axis),
    ]
    return lax.concatenate(on_device(parts), axis)


def _middle(shape: Sequence[int]) -> tuple[int, int] | None:
    """A dimension, and where to cut it; None where no dimension is long enough."""
    least = [1] * (len(shape) - 2) + ([_ALONE] if len(shape) == 1 else [_ROWS, _COLUMNS])
    for axis, (size, unit) in enumerate(zip(shape, least, strict=False)):
        if size >= 2 * unit:
            return axis, size // 2 // unit * unit
    return None
