"""Use a unit's weights without keeping them: gather, apply, drop; gather again in backward, reduce-scatter.

The order of one training step over two units A and B inside the root R, under ``optim_grads_params``::

    forward    gather R | gather A, apply A, drop A | gather B, apply B, drop B | loss, drop R
    backward   gather R | gather B, backward B, scatter dB | gather A, backward A, scatter dA | scatter dR

Three fences make XLA keep that order:

1. a gather waits for the unit's input, or the gathers of all units and microbatches are issued at the start;
2. a unit's output and what it saves leave together, or XLA recomputes a small residual from the gathered weights
   and so keeps the whole buffer alive until backward;
3. the second gather waits for the output's cotangent and the saved activations, or it merges with the first.

Under ``optim_grads`` the gathered weights are given, and only the scatter happens here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jax_impl.buffer import pack, unpack
from jax_impl.collective import Wire, fence
from jax_impl.layout import Layout

Leaves = tuple[jax.Array, ...]
# A unit's shard and, where the step gathered it already, its full buffer.
Held = tuple[jax.Array, jax.Array | None]


def sharded_call(
    apply: Callable[..., Any], layout: Layout, wire: Wire, held: Held, inner: Mapping[str, Any], *inputs: Any
) -> Any:
    """``apply(leaves, inner, *inputs)`` with the unit's weights taken from ``held``.

    ``inner`` holds the weights of the units inside this one; ``inputs`` are pytrees of arrays. Differentiating gives
    the reduce-scattered gradient of the shard, and no gradient of a full buffer.
    """

    def weights(held: Held, after: Any) -> tuple[Leaves, Any]:
        shard, full = held
        if full is None:
            shard, after = fence((shard, after))
            # What follows may need nothing of these weights; its collectives must still come after this one.
            full, after = fence((wire.gather(shard), after))
        return unpack(layout, full), after

    @jax.custom_vjp
    def call(held: Held, inner: Mapping[str, Any], *inputs: Any) -> Any:
        leaves, inputs = weights(held, inputs)
        return apply(leaves, inner, *inputs)

    def forward(held: Held, inner: Mapping[str, Any], *inputs: Any) -> tuple[Any, Any]:
        leaves, inputs = weights(held, inputs)
        vjp: Any
        output, vjp = jax.vjp(apply, leaves, inner, *inputs)
        # Residuals that are arguments are listed apart, so weights can be left out and put back.
        vjp.args_res[:2] = [None, None]
        if held[1] is None:
            output, vjp = fence((output, vjp))
        return output, (held, inner, vjp)

    def backward(saved: Any, cotangent: Any) -> tuple[Any, ...]:
        held, inner, vjp = saved
        leaves, (cotangent, vjp) = weights(held, (cotangent, vjp))
        vjp.args_res[:2] = [leaves, inner]
        gradients, inner_gradients, *input_gradients = vjp(cotangent)
        inner_shards = {path: shard for path, (shard, _) in inner_gradients.items()}
        # No collective beside another (see one_after_another): scatters inside this unit, its own, the next gather.
        gradients, inner_shards = fence((gradients, inner_shards))
        shard_gradient = wire.reduce_scatter(pack(layout, gradients))
        shard_gradient, input_gradients = fence((shard_gradient, input_gradients))
        return (shard_gradient, None), {path: (x, None) for path, x in inner_shards.items()}, *input_gradients

    call.defvjp(forward, backward)
    return call(held, inner, *inputs)
