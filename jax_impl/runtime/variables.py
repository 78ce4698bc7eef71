"""Variables of a model that are no parameters: batch statistics, random streams, counters.

They are whole on every device. Within a step each device has its own: statistics of its own rows, and random numbers of
its own, because its number is folded into every random key. After a step there is one value again:

    floating point      mean over the devices
    random key          the one before the step
    other               the largest over the devices; a counter is the same on all
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_impl.comm.collectives import fence
from jax_impl.comm.mesh import DataParallelMesh

Variables = dict[str, jax.Array]
T = TypeVar("T")


def of_this_device(variables: Mapping[str, jax.Array], axes: DataParallelMesh) -> Variables:
    """Inside ``shard_map``: what this device starts a step with."""
    rank = lax.axis_index(axes.names[::-1])
    return {
        path: jax.vmap(lambda key: jax.random.fold_in(key, rank))(value.reshape(-1)).reshape(value.shape)
        if _is_key(value)
        else value
        for path, value in variables.items()
    }


def of_all_devices(
    before: Mapping[str, jax.Array], after: Mapping[str, jax.Array], axes: DataParallelMesh, last: T
) -> tuple[Variables, T]:
    """One value for all devices from each device's; the collectives wait for ``last`` and then for each other."""
    merged: Variables = {}
    for path, value in after.items():
        if _is_key(value):
            merged[path] = before[path]
            continue
        value, last = fence((value, last))
        if jnp.issubdtype(value.dtype, jnp.floating):
            merged[path] = lax.pmean(value, axes.names)
        elif value.dtype == jnp.bool_:
            merged[path] = lax.pmax(value.astype(jnp.int32), axes.names).astype(jnp.bool_)
        else:
            merged[path] = lax.pmax(value, axes.names)
        merged[path], last = fence((merged[path], last))
    return merged, last


def _is_key(value: jax.Array) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))
