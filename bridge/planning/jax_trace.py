"""Bytes of a segment's activations in JAX: the residuals of its vjp, from shapes alone.

XLA stores all residuals of a unit that gathers its weights, since ``jax_impl`` fences them. Elsewhere XLA may compute
some of them again, and the bytes are upper bounds. ``backward`` adds the cotangents of output and input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge.planning.activations import SegmentBytes
from bridge.planning.runtimes import framework


def trace_segment(
    module: Any,
    given: Any,
    compute: str,
    finish: Callable[[Any], Any] = lambda output: output,
) -> SegmentBytes:
    """Trace an nnx module, which may be abstract, with parameters in ``compute``, on an input like ``given``.

    finish: the function from the module's output to the differentiated value, such as a loss.
    """
    jax, nnx, jnp = framework("jax"), framework("flax.nnx"), framework("jax.numpy")
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, compute), state)
    differentiable = jnp.issubdtype(given.dtype, jnp.floating)

    def forward(state: Any, given: Any) -> Any:
        if differentiable:
            return jax.vjp(lambda state, given: finish(nnx.merge(graph, state)(given)), state, given)
        return jax.vjp(lambda state: finish(nnx.merge(graph, state)(given)), state)

    jaxpr = jax.make_jaxpr(forward)(state, given).jaxpr
    outputs = len(jax.tree.leaves(jax.eval_shape(forward, state, given)[0]))
    weights = set(jaxpr.invars[: len(jax.tree.leaves(state))])
    # Literals have values; variables have none.
    residuals = {var for var in jaxpr.outvars[outputs:] if not hasattr(var, "val")} - weights
    saved = sum(_bytes(var.aval) for var in residuals)
    size = _bytes(given) if differentiable else 0
    return SegmentBytes(saved, size, saved + size, saved + 2 * size, saved)


def _bytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)
