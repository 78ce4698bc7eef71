"""The collectives of one flat array between levels of sharding, the casts around them, and the
fences between them.

Everything here runs inside ``shard_map`` with ``check_vma=False``: no reduction happens that is not
written. Levels are those of ``mesh.py``::

    level 0   |. . . . . . . . . . . .|    whole
    level 1   |. . . .|. . . .|. . . .|    gather up: inner axis      reduce-scatter down: inner axis
    level 2   |. .|. .|. .|. .|. .|. .|    gather up: outer axis      reduce-scatter down: outer axis

On TPUs a shard travels as rows of 128 elements, the last one padded: XLA:TPU makes an all-reduce of
a gather of 1-D shards of no multiple of 128 elements, and of every reduce-scatter of 1-D arrays.
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
"""Elements in a row of the tiles in which TPUs hold arrays."""


def fence(tree: Tree) -> Tree:
    """Every array of ``tree`` exists before any of the returned ones is used, and XLA moves nothing across."""
    # XLA's CPU compiler deletes barriers unless told otherwise (simulate_devices), and then merges
    # the gathers of forward and backward: of 9 in three unrolled layers 5 were left.
    return fence_some(tree, [True] * len(jax.tree.leaves(tree)))


def fence_some(tree: Tree, chosen: Sequence[bool]) -> Tree:
    """``fence`` for the leaves that are ``chosen``; the others stay as they are."""
    leaves, treedef = jax.tree.flatten(tree)
    # Cotangents of integers are NumPy float0 arrays, which no operation accepts. Leaves that are
    # not chosen must not go through: behind a barrier a constant is an array.
    real = [i for i, leaf in enumerate(leaves) if chosen[i] and leaf.dtype != jax.dtypes.float0]
    for i, passed in zip(real, lax.optimization_barrier([leaves[i] for i in real]), strict=True):
        leaves[i] = passed
    return jax.tree.unflatten(treedef, leaves)


def hold_until(arrays: Sequence[jax.Array], gate: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, not before the scalar ``gate``, which is True.

    Not a barrier: XLA drops what leaves a barrier and is not used, and its dependence with it.
    """
    # Zeros, not the gate in the dtype of the array: with that, scanned layers of the pjit engine
    # needed 1.15 of the memory of a step by hand on 8 GPUs.
    # Zeros behind a fence: else XLA makes them one array with the zeros of a gradient that is
    # scattered, such as a table's, and that array lies in memory (664 MB instead of 533).
    zeros = fence({array.dtype: jnp.zeros((), array.dtype) for array in arrays})
    return tuple(jnp.where(gate, array, zeros[array.dtype]) for array in arrays)


def gate_after(tree: Tree) -> jax.Array:
    """True, a scalar that is computed from every array of numbers of ``tree``, for ``hold_until``.

    A barrier orders what XLA:CPU schedules, but not what it runs at once: after a loop with collectives, a collective
    that reads nothing of the loop's results may start while others are still in the loop.
    """
    gate = fence(jnp.array(True))
    for leaf in jax.tree.leaves(tree):
        number = leaf.dtype == jnp.bool_ or jnp.issubdtype(leaf.dtype, jnp.number)
        if leaf.size and number:
            element = lax.slice(leaf.reshape(-1), (0,), (1,))[0]
            # Unknown to the compiler is only that the gate is True; one operand of "or" is, so the
            # result is, whatever the element holds.
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            gate = jnp.logical_or(gate, jnp.isfinite(element) if is_float else element == 1)
    return gate


def round_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Cast that really rounds: XLA may drop a plain float32 -> bfloat16 -> float32 pair as excess precision."""
    if dtype.itemsize < 4 and x.dtype != dtype:
        kept = jnp.finfo(dtype)
        # --xla_allow_excess_precision is on by default.
        x = lax.reduce_precision(x, exponent_bits=kept.nexp, mantissa_bits=kept.nmant)
    return x.astype(dtype)


def divide_exactly(x: jax.Array, divisor: float | jax.Array) -> jax.Array:
    """Correctly rounded ``x / divisor``: XLA turns division by a plain scalar into a product with its reciprocal."""
    return x / jnp.where(jnp.isnan(x), jnp.nan, jnp.asarray(divisor).astype(x.dtype))


@dataclass(frozen=True)
class Wire:
    """Mesh axes, and the dtypes of a group's array.

    ``main``: at rest; ``compute``: in forward and backward, and as gathered; ``reduce``: while gradients are summed;
    ``grad``: as accumulated over microbatches and given to the optimizer. An axis of one device takes no collective.
    ``in_rows``: shards travel as rows of ``LANES`` elements. ``float8``: the format in which the group is gathered
    instead (``bridge.core.sharding.policy.float8``).

    Gradients are summed, and divided when they are in the grad dtype. Two cases take each axis's mean (``averages``),
    as in PyTorch. In float16, whose largest number is 65504, sums over many devices overflow: there what is to be
    summed is divided. A grad dtype narrower than the reduce dtype would round twice: there sums are divided.
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

        ``row``: in rows of so many elements, ``[devices of axes, S / row, row]``. The cast comes first, so fewer bytes
        travel.
        """
        cast = self.cast(shard)
        # XLA's CPU compiler gathers float8 as float16, which does not keep every NaN: as bytes it
        # does.
        narrow = self.compute.itemsize == 1 and jnp.issubdtype(self.compute, jnp.floating)
        if narrow:
            cast = lax.bitcast_convert_type(cast, np.uint8)
        gathered = self.gather_as_it_is(cast, axes, row)
        return lax.bitcast_convert_type(gathered, self.compute) if narrow else gathered

    def gather_as_it_is(self, shard: jax.Array, axes: Iterable[int], row: int | None = None) -> jax.Array:
        """``all_gather`` in the shard's own dtype."""
        gathered = shard if row is None else shard.reshape(-1, row)
        # The outermost axis comes first: it joins neighbours in the order of shards (mesh.py), so that no
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
        """Each device's ``values`` -> its shard, cut over ``axes``, of their sum (see ``averages``), as ``grad``.

        ``values``: flat, or in rows ``[..., row]``, of which each shard has whole ones.
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
        """In the dtype of the summation over ``axes``."""
        if self._divides_first:
            values = divide_exactly(values, self._devices(axes))
        return round_to(values, self.reduce)

    def _as_grad(self, sums: jax.Array, axes: range) -> jax.Array:
        """Of the summation over ``axes``."""
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
