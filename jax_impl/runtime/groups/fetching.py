"""Arrays in the host's memory that travel to the device when a scalar is there, and no earlier.

XLA's schedulers move transfers to the front, past barriers. So where an array's two parts begin is computed from the
scalar. A part is less than the array, or XLA would see that there is one place only.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.runtime.groups.memory_kinds import is_on_device, on_device

# Of how many elements parts are multiples, that TPUs need not shift them: of the only, of the last two dimensions.
_ALONE, _ROWS, _COLUMNS = 1024, 32, 128


def fetched(arrays: Sequence[jax.Array], there: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, on the device, not before ``there``, which is True. Those on the device stay as they are."""
    start = jnp.where(there, 0, 1).astype(jnp.int32)
    return tuple(x if is_on_device(x) else _in_parts(x, start) for x in arrays)


def _in_parts(x: jax.Array, start: jax.Array) -> jax.Array:
    place = _middle(x.shape)
    if place is None:
        # A small one may come at any time.
        return on_device(x)
    axis, middle = place
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
