"""A flat group whose weights travel as float8 payload, with the bits of ``bridge.core.sharding.policy.float8``.

::

    hold      main weights [S]  ->  payload [S], scales        once per step, each device its own rows
    gather    payload and scales of all shards, uint8
    leaves    payload and scales of a parameter  ->  the compute dtype, exactly

So weights that wait for their use, such as a unit that was gathered ahead, are held as bytes. The gradients of the
leaves go to the main weights unchanged (straight-through).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from bridge.core.sharding.policy.float8 import piece_bytes
from jax_impl.comm.collectives import LANES
from jax_impl.runtime.groups.cut_group import CutGroup
from jax_impl.runtime.groups.flat_group import FlatGroup, Float8Levels, unpack
from jax_impl.runtime.groups.float8 import decode, each_in_row, scales_of
from jax_impl.runtime.groups.float8_shards import (
    amax_of_tensors,
    quantize_blocks,
    quantize_tensors,
    scales_of_leaves,
)


@dataclass(frozen=True)
class Float8Group(Float8Levels, FlatGroup):
    """Sources are pieces of uint8 ``[piece_bytes * shards]``, and for float8_e4m3fn also the parameters' scales."""

    def hold(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        layout = self.layout
        values = arrays[0].astype(jnp.float32)
        rank = self.wire.axes.shard_index(self.strategy.optimizer)
        scales: tuple[jax.Array, ...] = ()
        if self._by_tensor:
            bits = self._on_layers(lambda x: amax_of_tensors(layout, x, rank), values)
            amax = self._of_whole_tensors(lax.bitcast_convert_type(bits, jnp.float32))
            scales = (scales_of(lax.bitcast_convert_type(amax, jnp.int32)),)
            pieces = self._on_layers(lambda x, s: quantize_tensors(layout, x, s, rank), values, *scales)
        else:
            pieces = self._on_layers(lambda x: quantize_blocks(layout, x, rank), values)
        if axes := self.transfers.gathered_once:
            pieces = self._each_layer(partial(self.wire.gather_as_it_is, axes=axes), pieces)
        return (pieces, *scales)

    def gather(self, sources: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        pieces, *scales = sources
        self._check_layer(pieces)
        return (self.wire.gather_as_it_is(pieces, self.transfers.gathered, self._piece_row), *scales)

    def leaves(self, whole: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        pieces, *scales = whole
        if not self.strategy.shard_parameters:
            self._check_layer(pieces)
        layout, row = self.layout, 1 if pieces.ndim == 1 else pieces.shape[-1]
        pieces = pieces.reshape(layout.num_shards, -1, *pieces.shape[2:])
        size = layout.shard_size // row
        payload = pieces[:, :size]
        values = unpack(layout, payload.reshape(-1) if row == 1 else payload)
        if self._by_tensor:
            decoded = [decode(leaf, scale) for leaf, scale in zip(values, *scales, strict=True)]
        else:
            of_rows = scales_of_leaves(layout, pieces[:, size:].reshape(layout.num_shards, -1))
            decoded = [
                decode(leaf, each_in_row(own, leaf.shape[-1]))
                for leaf, own in zip(values, of_rows, strict=True)
            ]
        return tuple(leaf.astype(self.wire.compute) for leaf in decoded)

    def _of_whole_tensors(self, amax: jax.Array) -> jax.Array:
        return self.wire.largest(amax, self.strategy.optimizer)

    @property
    def _piece_row(self) -> int | None:
        sizes = self.layout.shard_size, piece_bytes(self.layout, self.wire.float8 or "")
        return LANES if self.wire.in_rows and not any(size % LANES for size in sizes) else None

    def _on_layers(self, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        return function(*arrays) if self.layers is None else jax.vmap(function)(*arrays)


@dataclass(frozen=True)
class CutFloat8Group(CutGroup, Float8Group):
    """On a mesh with model axes: rows and their blocks belong to parts; a tensor's scale covers all its parts."""

    def _of_whole_tensors(self, amax: jax.Array) -> jax.Array:
        of_part = super()._of_whole_tensors(amax)
        return lax.pmax(of_part, self.axes) if self.axes else of_part
