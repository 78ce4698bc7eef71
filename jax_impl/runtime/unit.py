"""Use a unit's weights without keeping them: gather, apply, drop; gather again in backward, reduce-scatter.

The order of one training step over two units A and B inside the root R, under ``optim_grads_params``::

    forward    gather R | gather A, apply A, drop A | gather B, apply B, drop B | loss, drop R
    backward   gather R | gather B, backward B, scatter dB | gather A, backward A, scatter dA | scatter dR

Three fences make XLA keep that order:

1. a gather waits for the unit's input, or the gathers of all units and microbatches are issued at the start;
2. a unit's output and what it saves leave together, or XLA recomputes a small residual from the gathered weights
   and so keeps the whole buffer alive until backward;
3. the second gather waits for the output's cotangent and the saved activations, or it merges with the first.

A unit whose weights are whole during the step needs no gather, but its gradients still leave it here, as one array.
With ``recompute`` a unit saves its inputs alone, and backward applies it again with the weights that it has gathered
anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_impl.comm.collectives import fence
from jax_impl.modules.seal import open_sealed
from jax_impl.runtime.batched_call import call_batched
from jax_impl.runtime.unit_plan import Group

Leaves = tuple[jax.Array, ...]
# Of each group: the arrays whose cotangents are its gradients, and the arrays from which its weights come.
Collectors = tuple[tuple[jax.Array, ...], ...]
Sources = tuple[tuple[jax.Array, ...], ...]


def sharded_call(
    name: str,
    apply: Callable[..., Any],
    groups: Sequence[Group],
    recompute: bool,
    collectors: Collectors,
    sources: Sources,
    inner: Mapping[str, tuple[Collectors, Sources]],
    *inputs: Any,
) -> Any:
    """``apply(leaves of each group, inner, *inputs)`` with the weights taken from ``sources``.

    ``inner`` holds collectors and sources of the units inside this one; ``inputs`` are pytrees of arrays.
    Differentiating by ``collectors`` gives each group's reduced gradient; sources have none. What profiles show of the
    unit has ``name`` in its name, and after it "gather", "recompute" or "reduce" where it is no plain forward or
    backward.
    """

    def called(apply: Callable[..., Any], *arrays: Any) -> Any:
        return _called(name, apply, groups, recompute, *arrays)

    if any(group.layers is not None for group in groups):
        # Members of an ensemble differ in their weights, and units may lie inside of them: JAX's own way is for that.
        return called(apply, collectors, sources, inner, *inputs)
    return call_batched(called, apply, collectors, sources, inner, *inputs)


def _called(
    name: str,
    apply: Callable[..., Any],
    groups: Sequence[Group],
    recompute: bool,
    collectors: Collectors,
    sources: Sources,
    inner: Mapping[str, tuple[Collectors, Sources]],
    *inputs: Any,
) -> Any:
    def weights(sources: Sources, after: Any, again: bool = False) -> tuple[tuple[Leaves, ...], Any]:
        leaves = []
        for group, source in zip(groups, open_sealed(sources), strict=True):
            if group.strategy.shard_parameters or again:
                # Also of whole weights: else XLA keeps what forward cut from them until backward, a second copy.
                source, after = fence((source, after))
            if group.strategy.shard_parameters:
                with jax.named_scope("gather"):
                    gathered = group.gather(source)
                # What follows may need nothing of these weights; its collectives must still come after this one.
                source, after = fence((gathered, after))
            leaves.append(group.leaves(source))
        return tuple(leaves), after

    keeps_order = any(group.strategy.shard_parameters for group in groups)

    @jax.custom_vjp
    @jax.named_scope(name)
    def call(collectors: Collectors, sources: Sources, inner: Any, *inputs: Any) -> Any:
        leaves, inputs = weights(sources, inputs)
        return apply(leaves, inner, *inputs)

    @jax.named_scope(name)
    def forward(collectors: Collectors, sources: Sources, inner: Any, *inputs: Any) -> tuple[Any, Any]:
        leaves, inputs = weights(sources, inputs)
        if recompute:
            return apply(leaves, inner, *inputs), (sources, inner, inputs)
        vjp: Any
        output, vjp = jax.vjp(apply, leaves, inner, *inputs)
        # Residuals that are arguments are listed apart, so weights can be left out and put back.
        vjp.args_res[:2] = [None, None]
        if keeps_order:
            output, vjp = fence((output, vjp))
        return output, (sources, inner, vjp)

    @jax.named_scope(name)
    def backward(saved: Any, cotangent: Any) -> tuple[Any, ...]:
        sources, inner, rest = saved
        if recompute:
            # Without it XLA would merge the second forward with the first, and keep what that computed.
            cotangent, rest = fence((cotangent, rest))
        leaves, (cotangent, rest) = weights(sources, (cotangent, rest), again=True)
        if recompute:
            with jax.named_scope("recompute"):
                _, vjp = jax.vjp(apply, leaves, inner, *rest)
        else:
            vjp = rest
            vjp.args_res[:2] = [leaves, inner]
        gradients, inner_gradients, *input_gradients = vjp(cotangent)
        collected = {path: mine for path, (mine, _) in inner_gradients.items()}
        reduced: list[tuple[jax.Array, ...]] = []
        for group, values in zip(groups, gradients, strict=True):
            if group.trainable:
                # No collective beside another (see hold): reductions of inner units, this one, the next gather.
                values, collected, reduced = fence((values, collected, reduced))
            with jax.named_scope("reduce"):
                reduced.append(group.reduce(values) if group.trainable else ())
        # Also without a reduction: else XLA may put off all gradients of weights, and keep activations for them.
        reduced, input_gradients = fence((reduced, input_gradients))
        return (
            tuple(reduced),
            None,
            {path: (mine, None) for path, mine in collected.items()},
            *input_gradients,
        )

    call.defvjp(forward, backward)
    return call(collectors, sources, inner, *inputs)
