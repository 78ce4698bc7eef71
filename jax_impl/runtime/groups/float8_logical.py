"""A group of the pjit engine whose weights travel as float8 payload.

Parameters are quantized in place. Payload and scales are separate arrays, which are sharded like the parameters and
constrained to be whole when they are used. So XLA gathers payload and scales, and dequantizes after the gather. XLA
itself adds the reductions for the scales: the largest magnitudes of tensors, and of blocks that a cut separates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from bridge.core.sharding.policy.float8 import BLOCK
from jax_impl.runtime.groups.flat_group import Float8Levels
from jax_impl.runtime.groups.float8 import decode, each_in_row, encode, in_rows, magnitudes, scales_of
from jax_impl.runtime.groups.logical_group import LogicalArray, LogicalGroup


@dataclass(frozen=True)
class Float8LogicalGroup(Float8Levels, LogicalGroup):
    """Sources are the payload of each parameter, uint8 of its shape, followed by the scales of each parameter.

    Scales of mxfp8 are ``[..., blocks of a row]``; for float8_e4m3fn each dimension is 1, except the layers of a stack.
    """

    def hold(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        values = [x.astype(jnp.float32) for x in arrays]
        scales = [self._scales(x) for x in values]
        payload = [encode(x, self._of_each(s, x)) for x, s in zip(values, scales, strict=True)]
        held = self._moved((*payload, *scales), self.strategy.optimizer)
        sends = self.strategy.parameters != self.strategy.optimizer
        return self._moved(held, self.strategy.parameters) if sends else held

    def gather(self, sources: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        # As in LogicalGroup.gather: what holds the gather stays before the gather.
        sources = self._moved(sources, self.strategy.parameters, one_layer=True)
        return self._moved(sources, 0, one_layer=True)

    def leaves(self, whole: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        count = len(self.arrays)
        return tuple(
            decode(x, self._of_each(s, x)).astype(self.wire.compute)
            for x, s in zip(whole[:count], whole[count:], strict=True)
        )

    def _scales(self, values: jax.Array) -> jax.Array:
        if not self._by_tensor:
            return scales_of(magnitudes(in_rows(values)).max(axis=-1, initial=0))
        own = tuple(range(0 if self.layers is None else 1, values.ndim))
        return scales_of(magnitudes(values).max(axis=own, keepdims=True, initial=0))

    def _of_each(self, scales: jax.Array, values: jax.Array) -> jax.Array:
        return scales if self._by_tensor else each_in_row(scales, values.shape[-1])

    def _moved(
        self, sources: Sequence[jax.Array], level: int, *, one_layer: bool = False
    ) -> tuple[jax.Array, ...]:
        count, left_out = len(self.arrays), 1 if one_layer and self.layers is not None else 0
        scales = (
            lax.with_sharding_constraint(x, NamedSharding(self.mesh, self._spec(array, level, left_out)))
            for x, array in zip(sources[count:], self.arrays, strict=True)
        )
        return (*self._lying(sources[:count], level, one_layer=one_layer), *scales)

    def _spec(self, array: LogicalArray, level: int, layers: int) -> PartitionSpec:
        """The spec of a parameter's scales: the parameter's spec, but rows are cut only between blocks."""
        if self._by_tensor:
            return PartitionSpec()
        spec = array.spec_of(level, layers)
        if len(spec) < len(array.shape) - layers:
            return spec
        names = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],)
        cut = BLOCK * math.prod(self.mesh.shape[name] for name in names)
        return PartitionSpec(*spec[:-1], None) if array.shape[-1] % cut else spec
