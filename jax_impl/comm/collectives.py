"""Collectives that move one flat array between levels of sharding, with casts around them and fences between them.

All functions run inside ``shard_map`` with ``check_vma=False``, so JAX adds no implicit reduction. ``mesh.py`` defines
the levels::

    level 0   |. . . . . . . . . . . .|    whole
    level 1   |. . . .|. . . .|. . . .|    gather up: inner axis      reduce-scatter down: inner axis
    level 2   |. .|. .|. .|. .|. .|. .|    gather up: outer axis      reduce-scatter down: outer axis

On TPUs a shard travels as rows of 128 elements, with the last row padded: XLA:TPU turns a gather of 1-D shards whose
size is not a multiple of 128, and every reduce-scatter of 1-D arrays, into an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.comm.mesh import DataParallelMesh

Tree = TypeVar("Tree")

LANES = 128
"""Elements in one row of the tiles in which TPUs store arrays."""


def fence(tree: Tree) -> Tree:
    """All arrays of ``tree`` are computed before any returned array is used; XLA moves nothing across the fence."""
    # XLA's CPU compiler deletes barriers unless a flag forbids that (simulate_devices), and then merges the gathers of
    # forward and backward: for three unrolled layers, 5 of 9 gathers remained.
    return fence_some(tree, [True] * len(jax.tree.leaves(tree)))


def fence_some(tree: Tree, chosen: Sequence[bool]) -> Tree:
    """``fence`` for the ``chosen`` leaves; the other leaves stay unchanged."""
    leaves, treedef = jax.tree.flatten(tree)
    # Cotangents of integers are NumPy float0 arrays, which no operation accepts. Leaves that are not chosen must not
    # pass the barrier: behind a barrier a constant becomes an array.
    real = [i for i, leaf in enumerate(leaves) if chosen[i] and leaf.dtype != jax.dtypes.float0]
    for i, passed in zip(real, lax.optimization_barrier([leaves[i] for i in real]), strict=True):
        leaves[i] = passed
    return jax.tree.unflatten(treedef, leaves)


def hold_until(arrays: Sequence[jax.Array], gate: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, available only after the scalar ``gate``, which is True.

    This is not a barrier: XLA drops unused results of a barrier, and the dependences of these results with them.
    """
    # Zeros, not the gate cast to the array's dtype: with the cast, scanned layers of the pjit engine compiled for 8
    # GPUs needed 1.15 times the memory of a step written by hand. The zeros are behind a fence: otherwise XLA merges
    # them with the zeros of a scattered gradient, such as a table's gradient, into one array that stays in memory (664
    # MB instead of 533 MB).
    zeros = fence({array.dtype: jnp.zeros((), array.dtype) for array in arrays})
    return tuple(jnp.where(gate, array, zeros[array.dtype]) for array in arrays)


def gate_after(tree: Tree) -> jax.Array:
    """A scalar True that is computed from every numeric array of ``tree``, for ``hold_until``.

    A barrier orders XLA:CPU's schedule, but not its concurrent execution: after a loop with collectives, a collective
    that does not read the loop's results may start while other devices are still in the loop.
    """
    gate = fence(jnp.array(True))
    for leaf in jax.tree.leaves(tree):
        number = leaf.dtype == jnp.bool_ or jnp.issubdtype(leaf.dtype, jnp.number)
        if leaf.size and number:
            element = lax.slice(leaf.reshape(-1), (0,), (1,))[0]
            # The compiler does not know that the gate is True. "Or" with True is True for any element.
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            gate = jnp.logical_or(gate, jnp.isfinite(element) if is_float else element == 1)
    return gate


def round_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """A cast that always rounds: XLA may drop a plain float32 -> bfloat16 -> float32 pair as excess precision."""
    if dtype.itemsize < 4 and x.dtype != dtype:
        kept = jnp.finfo(dtype)
        # --xla_allow_excess_precision is on by default.
        x = lax.reduce_precision(x, exponent_bits=kept.nexp, mantissa_bits=kept.nmant)
    return x.astype(dtype)


def divide_exactly(x: jax.Array, divisor: float | jax.Array) -> jax.Array:
    """Correctly rounded ``x / divisor``: XLA turns division by a plain scalar into multiplication by the reciprocal."""
    return x / jnp.where(jnp.isnan(x), jnp.nan, jnp.asarray(divisor).astype(x.dtype))


@dataclass(frozen=True)
class Wire:
    """The mesh axes and the dtypes of a group's array.

    ``main``: dtype at rest; ``compute``: in gathers, forward and backward; ``reduce``: while gradients are summed;
    ``grad``: for accumulation over microbatches and for the optimizer. An axis of one device needs no collective.
    ``in_rows``: shards travel as rows of ``LANES`` elements. ``float8``: the format in which the group is gathered
    instead (``bridge.core.sharding.policy.float8``).

    Gradients are summed, cast to the grad dtype, and then divided. Two cases take the mean over each axis instead
    (``averages``), as in PyTorch. In float16, whose largest number is 65504, sums over many devices overflow, so the
    summands are divided. If the grad dtype is narrower than the reduce dtype, division after the cast would round
    twice, so the sums are divided before the cast.
    """

    axes: DataParallelMesh
    main: np.dtype
    compute: np.dtype
    reduce: np.dtype
    grad: np.dtype
    in_rows: bool = False
    float8: str | None = None

    @property
    def averages(self) -> bool:
        """Whether reductions give means over the devices, not sums."""
        return self._divides_first or self.grad.itemsize < self.reduce.itemsize

    @property
    def _divides_first(self) -> bool:
        return jnp.float16 in (self.reduce, self.grad)

    def cast(self, weights: jax.Array) -> jax.Array:
        """Main weights -> compute weights, without communication."""
        return round_to(weights, self.compute)

    def all_gather(self, shard: jax.Array, axes: Iterable[int], row: int | None = None) -> jax.Array:
        """``[S]`` -> ``[S * devices of axes]``, in the compute dtype; ``axes``: numbers, in the order of the gathers.

        ``row``: return rows of this many elements, ``[devices of axes, S / row, row]``. The cast comes first, so fewer
        bytes travel.
        """
        cast = self.cast(shard)
        # XLA's CPU compiler gathers float8 as float16, which loses some NaNs; bytes are gathered exactly.
        narrow = self.compute.itemsize == 1 and jnp.issubdtype(self.compute, jnp.floating)
        if narrow:
            cast = lax.bitcast_convert_type(cast, np.uint8)
        gathered = self.gather_as_it_is(cast, axes, row)
        return lax.bitcast_convert_type(gathered, self.compute) if narrow else gathered

    def gather_as_it_is(self, shard: jax.Array, axes: Iterable[int], row: int | None = None) -> jax.Array:
        """``all_gather`` in the shard's own dtype."""
        gathered = shard if row is None else shard.reshape(-1, row)
        # The outermost axis comes first: its gather joins neighbours in the order of shards (mesh.py), so that no
        # element moves within the array.
        for axis in axes:
            gathered = self._over(axis, self._gather, gathered)
        return gathered if row is None else gathered.reshape(-1, shard.size // row, row)

    def largest(self, values: jax.Array, level: int) -> jax.Array:
        """The largest of ``values`` over all shards of ``level``, element by element."""
        for axis in range(level):
            values = self._over(axis, lax.pmax, values)
        return values

    def reduce_scatter(self, values: jax.Array, axes: range) -> jax.Array:
        """Sum the devices' ``values`` (see ``averages``); return this device's shard over ``axes``, in the grad dtype.

        ``values``: flat, or in rows ``[..., row]``; each shard consists of whole rows.
        """
        if not axes:
            return round_to(values.reshape(-1), self.grad)
        reduced = self._ready(values, axes)
        for axis in axes:
            reduced = self._over(axis, self._scatter, reduced)
        return self._as_grad(reduced.reshape(-1), axes)

    def all_reduce(self, values: jax.Array, axes: range) -> jax.Array:
        """The sum of ``values`` over ``axes``, in the grad dtype; see ``averages``."""
        if not axes:
            return values
        reduced = self._ready(values, axes)
        for axis in axes:
            reduced = self._over(axis, lax.psum, reduced)
        return self._as_grad(reduced, axes)

    def _ready(self, values: jax.Array, axes: range) -> jax.Array:
        """Cast to the dtype of the summation over ``axes``."""
        if self._divides_first:
            values = divide_exactly(values, self._devices(axes))
        return round_to(values, self.reduce)

    def _as_grad(self, sums: jax.Array, axes: range) -> jax.Array:
        """Turn the result of the summation over ``axes`` into the grad dtype."""
        if self.averages and not self._divides_first:
            sums = divide_exactly(sums, self._devices(axes))
        return round_to(sums, self.grad)

    def _devices(self, axes: range) -> int:
        return math.prod(self.axes.sizes[axis] for axis in axes)

    def _gather(self, shard: jax.Array, axis_name: str) -> jax.Array:
        if shard.ndim > 1:
            return lax.all_gather(shard, axis_name)
        if not self.in_rows:
            return lax.all_gather(shard, axis_name, tiled=True)
        size = shard.size
        rows = jnp.pad(shard, (0, -size % LANES)).reshape(-1, LANES)
        gathered = lax.all_gather(rows, axis_name)
        return gathered.reshape(len(gathered), -1)[:, :size].reshape(-1)

    def _scatter(self, values: jax.Array, axis_name: str) -> jax.Array:
        if values.ndim > 1:
            return lax.psum_scatter(values.reshape(-1, values.shape[-1]), axis_name, tiled=True)
        if not self.in_rows:
            return lax.psum_scatter(values, axis_name, tiled=True)
        shards = values.reshape(lax.axis_size(axis_name), -1)
        size = shards.shape[1]
        rows = jnp.pad(shards, ((0, 0), (0, -size % LANES))).reshape(-1, LANES)
        return lax.psum_scatter(rows, axis_name, tiled=True).reshape(-1)[:size]

    def _over(self, axis: int, collective: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        if self.axes.sizes[axis] == 1:
            return x
        return collective(x, axis_name=self.axes.names[axis])
