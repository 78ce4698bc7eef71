"""Equal layers as one stacked module, scanned: a compiled program of one layer, whatever the depth.

``stack_layers`` makes what ``nnx.vmap`` over a constructor makes, and ``scan_layers`` runs it as ``nnx.scan`` would;
models that use those work as well. ``fully_shard(..., stacked=["layers"])`` tells which modules are stacks; where it
is left out, see ``stack_lengths.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jax_impl.modules.module_tree import VARIABLES

M = TypeVar("M", bound=nnx.Module)


def stack_layers(layers: Sequence[M]) -> M:
    """One module whose variables have the layers' on a new leading axis.

    Raises ``ValueError`` for no layers, or layers that differ in structure or in the shape of a variable.
    """
    if not layers:
        raise ValueError("stack_layers: expected at least one layer, got none")
    graphdef, first = nnx.split(layers[0])
    states = [first]
    for number, layer in enumerate(layers[1:], 1):
        other, state = nnx.split(layer)
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), variables) for variables in (first, state)]
        if other != graphdef or shapes[0] != shapes[1]:
            raise ValueError(f"stack_layers: expected equal layers, but layer {number} differs from layer 0")
        states.append(state)
    return nnx.merge(graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def scan_layers(layers: nnx.Module, carry: Any, *args: Any) -> Any:
    """``layer(carry, *args)`` with each layer of a stack in turn; its result is the next one's ``carry``.

    All layers get the same ``args``. Their variables, such as batch statistics, are updated layer by layer.
    """
    graphdef, parameters, variables = cast(tuple[Any, Any, Any], nnx.split(layers, nnx.Param, ...))

    def run(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
        module: Any = nnx.merge(graphdef, *layer)
        carry = module(carry, *args)
        return carry, nnx.as_pure(nnx.state(module, VARIABLES))

    # Variables remember where they were made, and may be changed only there: arrays pass through the loop instead.
    carry, changed = jax.lax.scan(run, carry, (nnx.as_pure(parameters), nnx.as_pure(variables)))
    nnx.update(layers, changed)
    return carry
