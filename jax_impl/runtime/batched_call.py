"""A unit's call under ``jax.vmap``, as a model for one row is called on many: vectorize inside of the unit.

::

    jax.vmap(model)(rows)      for each unit   gather, vmap(apply) over all rows, reduce the sum of their gradients

JAX's own way would vectorize the gather and the backward, too, so that a gradient of every row is kept and reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap

Apply = Callable[..., Any]


def call_batched(
    call: Callable[..., Any], apply: Apply, collectors: Any, sources: Any, inner: Any, *inputs: Any
) -> Any:
    """``call(apply, collectors, sources, inner, *inputs)``; ``apply(leaves, inner, *inputs)`` is what is vectorized.

    Weights are the same for all of the batch. A loop around the call is vectorized in JAX's way, since it is traced
    before it is vectorized.
    """

    def plain(collectors: Any, sources: Any, inner: Any, *inputs: Any) -> Any:
        return call(apply, collectors, sources, inner, *inputs)

    if not _is_batched(inputs):
        return plain(collectors, sources, inner, *inputs)

    function = custom_vmap(plain)

    @function.def_vmap
    def _(size: int, batched: list[Any], collectors: Any, sources: Any, inner: Any, *inputs: Any) -> Any:
        if any(jax.tree.leaves(batched[:3])):
            raise ValueError(
                "unit: expected the same weights for all of a vmap, got some that differ: an ensemble is a stack, "
                'whose path fully_shard is told (stacked=["members"])'
            )
        axes = jax.tree.map(lambda one: 0 if one else None, tuple(batched[3:]))
        vectorized = jax.vmap(apply, in_axes=(None, None, *axes), axis_size=size)
        output = call_batched(call, vectorized, collectors, sources, inner, *inputs)
        return output, jax.tree.map(lambda _: True, output)

    return function(collectors, sources, inner, *inputs)


def _is_batched(inputs: Any) -> bool:
    """Whether ``jax.vmap`` is around: custom_vmap alone could not be differentiated where it is not."""
    seen = []

    @custom_vmap
    def probe(values: Any) -> Any:
        return values

    @probe.def_vmap
    def _(size: int, batched: list[Any], values: Any) -> Any:
        seen.append(size)
        return values, batched[0]

    if jax.tree.leaves(inputs):
        probe(jax.lax.stop_gradient(inputs))
    return bool(seen)
