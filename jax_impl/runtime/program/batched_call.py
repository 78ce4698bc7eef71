"""A unit's call under ``jax.vmap``, as a model for one row is called on many: vectorize inside of the unit.

::

    jax.vmap(model)(rows)      for each unit   gather, vmap(apply) over all rows, reduce the sum of their gradients

JAX's own way would vectorize the gather and the backward, too, so that a gradient of every row is kept and reduced.
The axis has its name inside of the unit, and a result that is one for all rows, such as a mean over the axis, stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import jaxpr_as_fun

Apply = Callable[..., Any]
# Of a name that a unit uses, the index along that axis: only the vmap that has the name maps it.
Axes = Sequence[tuple[Any, jax.Array]]


def call_batched(
    calling: Callable[[Apply], Callable[..., Any]],
    apply: Apply,
    collectors: Any,
    sources: Any,
    inner: Any,
    *inputs: Any,
    axes: Axes | None = None,
) -> Any:
    """``calling(apply)(collectors, sources, inner, *inputs)``; ``apply(leaves, inner, *inputs)`` is vectorized.

    Weights are the same for all of the batch. A loop around the call is vectorized in JAX's way, since it is traced
    before it is vectorized. ``axes``: those of the vmaps around, where some are done already.
    """
    plain = calling(apply)
    if is_mapped((inputs, [index for _, index in axes or ()])) is None:
        return plain(collectors, sources, inner, *inputs)
    program, shapes = jax.make_jaxpr(plain, return_shape=True)(collectors, sources, inner, *inputs)
    if axes is None:
        # In the same order in all processes.
        names = sorted({effect.name for effect in program.effects if hasattr(effect, "name")}, key=str)
        axes = [(name, jax.lax.axis_index(name)) for name in names]

    @custom_vmap
    def function(indices: Any, *arrays: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(program)(*jax.tree.leaves(arrays)))

    @function.def_vmap
    def _(size: int, mapped: list[Any], indices: Any, *arrays: Any) -> Any:
        if any(jax.tree.leaves(mapped[1:4])):
            raise ValueError(
                "unit: expected the same weights for all of a vmap, got some that differ: an ensemble is a stack, "
                'whose path fully_shard is told (stacked=["members"])'
            )
        name = next((name for (name, _), one in zip(axes, mapped[0], strict=True) if one), None)
        vectorized, flags = _vectorize(apply, size, name, mapped[4:])
        others = [(other, index) for (other, _), index in zip(axes, indices, strict=True) if other != name]
        output = call_batched(calling, vectorized, *arrays, axes=others)
        return output, jax.tree.unflatten(jax.tree.structure(output), flags)

    return function([index for _, index in axes], collectors, sources, inner, *inputs)


def _vectorize(apply: Apply, size: int, name: Any, mapped: Sequence[Any]) -> tuple[Apply, list[bool]]:
    """``apply`` over axis 0 of what is ``mapped`` of its inputs, and, after a call, which results have that axis."""
    axes = jax.tree.map(lambda one: 0 if one else None, tuple(mapped))
    flags: list[bool] = []

    def vectorized(*arguments: Any) -> Any:
        structures = []

        def one(place: jax.Array, *arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(apply(*arguments))
            structures.append(structure)
            # The place is mapped, so that this vmap is the one that answers.
            flags[:] = is_mapped((place, leaves))[1]
            pairs = list(zip(leaves, flags, strict=True))
            return [x for x, flag in pairs if flag], [x for x, flag in pairs if not flag]

        found = jax.vmap(one, (0, None, None, *axes), (0, None), axis_name=name, axis_size=size)
        own, shared = map(iter, found(jnp.arange(size), *arguments))
        return jax.tree.unflatten(structures[0], [next(own) if flag else next(shared) for flag in flags])

    return vectorized, flags


def is_mapped(values: Any) -> Any:
    """Which of ``values`` the innermost ``jax.vmap`` around maps, None where no vmap maps any.

    A custom_vmap alone could not be differentiated where there is none.
    """
    found: list[Any] = []

    @custom_vmap
    def probe(values: Any) -> Any:
        return values

    @probe.def_vmap
    def _(size: int, mapped: list[Any], values: Any) -> Any:
        found.append(mapped[0])
        return values, mapped[0]

    if jax.tree.leaves(values):
        probe(jax.lax.stop_gradient(values))
    return found[0] if found else None
