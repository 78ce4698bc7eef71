"""Arrays in the host's memory, updated on the device: those of a key travel there and back while others are computed.

::

    in        | key 0 | key 1 | key 2         | key 3
    update            | 0     | 1             | 2
    out                       | key 0         | key 1

Key i + 1 is fetched, and key i updated, when key i - 1 is back in the host's memory: of at most two keys there are
arrays on the device, and of one a second time, while the parts in which an array travels are joined.

XLA's schedulers drop barriers, move transfers to the front and wait for none of them before the end. So the order is
one of values. An element is read from what was sent; where the parts of the next array begin depends on the element,
though XLA cannot see that any element gives the same place (``_landed``, ``fetching.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl.runtime.groups.fetching import fetched
from jax_impl.runtime.groups.memory_kinds import in_host, on_device

# By the number of an array.
Arrays = dict[int, jax.Array]


class Stream:
    """Of one update, whose keys come one after the other; ``specs``: how each array is cut over ``mesh``."""

    def __init__(self, mesh: Mesh, specs: Sequence[PartitionSpec]) -> None:
        self._mesh, self._specs = mesh, specs
        # An element of each array that was sent last.
        self._landed: Arrays = {}

    def fetched(self, homes: Sequence[Arrays]) -> Iterator[Arrays]:
        """For each key, in turn, copies on the device of its arrays in the host's memory, of which it may have none.

        What becomes of them is given to ``sent`` before the next key is asked for.
        """
        travelling = [arrays for arrays in homes if arrays]
        ahead = [on_device(arrays) for arrays in travelling[:1]]
        turn = 0
        for arrays in homes:
            if not arrays:
                yield {}
                continue
            (present,) = ahead
            turn += 1
            ahead = [self._fetch(following) for following in travelling[turn : turn + 1]]
            yield self._gated(present)

    def sent(self, arrays: Arrays) -> Arrays:
        """These results in the host's memory."""
        if not arrays:
            return {}
        lying = {n: NamedSharding(self._mesh, self._specs[n]) for n in arrays}
        found = in_host(lax.with_sharding_constraint(arrays, lying))
        self._landed = self._by_shard(_elements, found)
        return found

    def _fetch(self, arrays: Arrays) -> Arrays:
        if not self._landed:
            return on_device(arrays)
        return self._by_shard(_parts_after, arrays, self._landed)

    def _gated(self, arrays: Arrays) -> Arrays:
        return self._by_shard(_after, arrays, self._landed) if self._landed else arrays

    def _by_shard(self, function: Any, *given: Arrays) -> Arrays:
        """``function`` of each device's shards; its results are cut as the arrays of the same number."""
        specs = tuple({n: self._specs[n] for n in arrays} for arrays in given)
        run: Any = jax.shard_map(
            function, mesh=self._mesh, in_specs=specs, out_specs=specs[0], check_vma=False
        )
        found: Arrays = run(*given)
        return found


def _elements(arrays: Arrays) -> Arrays:
    """The first of each, which is there when all of the array is."""
    return on_device({n: lax.slice(x, (0,) * x.ndim, (1,) * x.ndim) for n, x in arrays.items()})


def _after(arrays: Arrays, landed: Arrays) -> Arrays:
    there = _are_there(landed)
    return {n: jnp.where(there, x, jnp.zeros_like(x)) for n, x in arrays.items()}


def _parts_after(arrays: Arrays, landed: Arrays) -> Arrays:
    """The same arrays, on the device."""
    return dict(zip(arrays, fetched(list(arrays.values()), _are_there(landed)), strict=True))


def _are_there(landed: Mapping[int, jax.Array]) -> jax.Array:
    """True, when all of them are there."""
    found = jnp.array(True)
    for element in landed.values():
        number = element.reshape(()).astype(jnp.float32)
        # One of the two holds for each number, and for none.
        found &= (number >= 0) | ~(number >= 1)
    return found
