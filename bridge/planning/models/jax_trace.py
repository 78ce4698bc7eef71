"""Bytes of a segment's activations in JAX: the residuals of its vjp, from shapes alone.

XLA stores all residuals of a unit that gathers its weights, since ``jax_impl`` fences them, except residuals that do
not depend on arguments, such as the zeros of a mask. Elsewhere XLA may recompute some of them, and the bytes are upper
bounds. ``backward`` adds the cotangents of output and input, and the cotangent of the largest intermediate, which is as
large as the largest residual: in attention that keeps its scores, the cotangent of the scores. On TPUs ``jax_impl``
saves less (see ``jax_impl/runtime/program/residuals.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bridge.planning.models.activations import SegmentBytes
from bridge.planning.models.runtimes import framework, part


def trace_segment(
    module: Any,
    example: Any,
    compute: str,
    finish: Callable[[Any], Any] = lambda output: output,
    others: Sequence[Any] = (),
) -> SegmentBytes:
    """Trace an nnx module, which may be abstract, with parameters in ``compute``, on an input like ``given``.

    finish: the function from the module's output to the differentiated value, such as a loss. others: further inputs;
    their bytes are not counted.
    """
    jax, nnx, jnp = framework("jax"), framework("flax.nnx"), framework("jax.numpy")
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, compute), state)
    differentiable = jnp.issubdtype(example.dtype, jnp.floating)

    def run(state: Any, _inner: Any, values: Any) -> Any:
        return finish(nnx.merge(graph, state)(values, *others))

    def differentiated(state: Any, _inner: Any, values: Any) -> Any:
        output, vjp = jax.vjp(run, state, (), values)
        # Backward has the weights in any case.
        vjp.args_res[:2] = [None, None]
        return output, vjp

    residuals = part("jax", "runtime.program.residuals")

    def split(state: Any, values: Any) -> tuple[list[Any], list[Any]]:
        (output, vjp), depends = residuals.with_dependence(differentiated, state, (), values)
        leaves, results = jax.tree.leaves(vjp), len(jax.tree.leaves(output))
        varying = list(zip(leaves, depends[results:], strict=True))
        # Constants, such as the zeros of a mask, are made at their use.
        return [leaf for leaf, varies in varying if varies], [leaf for leaf, varies in varying if not varies]

    kept, constants = jax.eval_shape(split, state, example)
    sizes = [_bytes(leaf) for leaf in kept]
    saved, largest = sum(sizes), max(sizes, default=0)
    size = _bytes(example) if differentiable else 0
    program = jax.make_jaxpr(run)(state, (), example)
    fixed = sum(_bytes(constant.aval) for constant in residuals.constants_of(program))
    fixed_saved = sum(map(_bytes, constants))
    return SegmentBytes.of_residuals(saved, size, largest, fixed=fixed, fixed_saved=fixed_saved)


def _bytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)
