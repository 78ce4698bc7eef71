"""The collectives of one unit's flat array, and the fences that order them.

Everything here runs inside ``shard_map`` with ``check_vma=False``: no reduction happens that is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from jax import lax

from jax_impl.mesh import AXIS
from jax_impl.precision import round_to

Tree = TypeVar("Tree")


def fence(tree: Tree) -> Tree:
    """Every array of ``tree`` exists before any of the returned ones is used, and XLA moves nothing across."""
    leaves, treedef = jax.tree.flatten(tree)
    # Cotangents of integers are NumPy float0 arrays, which no operation accepts.
    real = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    for i, passed in zip(real, lax.optimization_barrier([leaves[i] for i in real]), strict=True):
        leaves[i] = passed
    return jax.tree.unflatten(treedef, leaves)


@dataclass(frozen=True)
class Wire:
    """Dtypes of one unit's buffer: at rest, as gathered for compute, and while gradients are summed."""

    main: np.dtype
    compute: np.dtype
    reduce: np.dtype

    def cast(self, weights: jax.Array) -> jax.Array:
        """Main weights -> compute weights, without communication."""
        return round_to(weights, self.compute)

    def gather(self, shard: jax.Array) -> jax.Array:
        """``[S]`` main -> ``[N * S]`` compute; the cast comes first, so fewer bytes travel."""
        return _unless_empty(partial(lax.all_gather, axis_name=AXIS, tiled=True), self.cast(shard))

    def reduce_scatter(self, full: jax.Array) -> jax.Array:
        """``[N * S]`` of each rank -> this rank's ``[S]`` of the sum, in the main dtype."""
        scatter = partial(lax.psum_scatter, axis_name=AXIS, tiled=True)
        return _unless_empty(scatter, round_to(full, self.reduce)).astype(self.main)

    def all_reduce(self, full: jax.Array) -> jax.Array:
        """``[P]`` of each rank -> the sum, in the main dtype."""
        return _unless_empty(partial(lax.psum, axis_name=AXIS), round_to(full, self.reduce)).astype(self.main)


def _unless_empty(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    # A root whose parameters all lie in other units has a buffer without elements.
    return collective(x) if x.size else x


def one_after_another(
    functions: Sequence[Callable[[jax.Array], jax.Array]], inputs: Sequence[jax.Array]
) -> list[jax.Array]:
    """Each collective on its input, started when the one before is done.

    Independent collectives can meet under one rendezvous key in the CPU simulator, which then aborts or hangs.
    """
    results: list[jax.Array] = []
    for function, x in zip(functions, inputs, strict=True):
        if results:
            results[-1], x = fence((results[-1], x))
        results.append(function(x))
    return results
