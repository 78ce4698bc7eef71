"""Arrays of a train state in host memory (``pinned_host``); programs compute with them on the device.

Users place a state with ``jax.device_put`` and ``sharding.with_memory_kind``. A program copies the arrays that it needs
to the device, and returns changed arrays to their original memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Tree = TypeVar("Tree")
HOST = "pinned_host"
"""The kind of host memory that devices can read directly."""
_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host
# In earlier versions, the CPU compiler refuses transfers in a program of several devices.
_MOVES_ON_CPU = (0, 10, 2)


def on_device(tree: Tree) -> Tree:
    """Inside a program: the same arrays, all in device memory."""
    return jax.tree.map(lambda x: x if is_on_device(x) else _put(x, _DEVICE), tree)


def in_host(tree: Tree) -> Tree:
    """Inside a program: arrays on the device, copied to host memory."""
    return jax.tree.map(lambda x: _put(x, _HOST), tree)


def is_on_device(x: jax.Array) -> bool:
    """Inside a program: whether the array is in device memory."""
    return bool(_space(x) == _DEVICE)


def as_before(tree: Tree, before: Tree) -> Tree:
    """Inside a program: each array of ``tree`` in the same kind of memory as its counterpart in ``before``."""
    return jax.tree.map(lambda x, was: x if _space(x) == _space(was) else _put(x, _space(was)), tree, before)


def constrain(tree: Tree, shardings: Any) -> Tree:
    """Inside a program: constrain arrays on the device to these shardings; others stay unchanged."""
    return jax.tree.map(
        lambda x, sharding: jax.lax.with_sharding_constraint(x, sharding) if is_on_device(x) else x,
        tree,
        shardings,
    )


def memory_kinds(tree: object) -> tuple[str | None, ...]:
    """The kinds of memory of the arrays of a tree."""
    return tuple(leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree))


def in_memory(sharding: Any, memory_kind: str | None) -> Any:
    """``sharding`` in this kind of memory; "" or None: the default."""
    return sharding.with_memory_kind(memory_kind) if memory_kind else sharding


def move(array: jax.Array, memory_kind: str) -> jax.Array:
    """Outside programs: the array in this kind of memory, "" for the device's own."""
    return jax.device_put(array, in_memory(array.sharding, memory_kind)) if memory_kind else array


def kinds_like(example: object, expected: Tree) -> Tree:
    """For each array of ``expected``, the kind of memory of its counterpart in ``example``, "" for the default.

    Raises ``ValueError`` for an example of another structure; without an example (None), all are the default.
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
    """Raise ``ValueError`` for a donated array."""
    # XLA does not check this: a program that gets such an array crashes the process. The usual cause is a state from
    # before the step that donated it.
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
        raise ValueError(
            f"{name}: expected values, got an array that was donated to an earlier step: continue with the state that "
            "this step returned"
        )


# Part sizes are multiples of these, so that TPUs need not shift elements: for a single dimension, and for the last two.
_ALONE, _ROWS, _COLUMNS = 1024, 32, 128


def fetch_after(arrays: Sequence[jax.Array], there: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, copied to the device after ``there``, which is True. Arrays on the device stay unchanged."""
    # XLA's schedulers move transfers to the front, past barriers. But they cannot know the start of a slice that is
    # computed from a scalar of the program. The slice must be shorter than the array, or XLA would see that only one
    # start is possible.
    start = jnp.where(there, 0, 1).astype(jnp.int32)
    return tuple(x if is_on_device(x) else _fetch_in_parts(x, start) for x in arrays)


def _fetch_in_parts(x: jax.Array, start: jax.Array) -> jax.Array:
    cut = _middle(x.shape)
    if cut is None:
        # A small array may be copied at any time.
        return on_device(x)
    axis, middle = cut
    parts = [
        lax.dynamic_slice_in_dim(x, start, middle, axis),
        lax.dynamic_slice_in_dim(x, start + middle, x.shape[axis] - middle, axis),
    ]
    return lax.concatenate(on_device(parts), axis)


def _middle(shape: Sequence[int]) -> tuple[int, int] | None:
    """A dimension and the position of its cut; None if no dimension is long enough."""
    least = [1] * (len(shape) - 2) + ([_ALONE] if len(shape) == 1 else [_ROWS, _COLUMNS])
    for axis, (size, unit) in enumerate(zip(shape, least, strict=False)):
        if size >= 2 * unit:
            return axis, size // 2 // unit * unit
    return None
