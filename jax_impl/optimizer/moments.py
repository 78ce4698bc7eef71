"""Formats of optimizer moments: float32 unchanged, bfloat16 rounded, float16 and float8 with one scale per row.

    moment   |m00 m01 m02|          stored  |q00 q01 q02|   scale |s0|        moment = stored * scale
             |m10 m11 m12|                  |q10 q11 q12|         |s1|        s = largest magnitude of the row / Q

Q is the largest number of the stored dtype (448 for float8_e4m3fn, 57344 for float8_e5m2, 65504 for float16). So the
largest element of a row keeps its value, and values of any size do not overflow. The scale is float32. Parameters whose
rows are single elements (vectors, scalars) stay float32.

Rounding is to nearest, with two exceptions:

* A nonzero second moment is stored as at least the smallest positive number: zero would make the next update huge.
* With b2 = 0.999 a second moment changes by 0.1 % per step, far less than the spacing of float8: rounded to nearest, it
  would never change. So float8 second moments are dithered: the position between two stored numbers decides how often,
  over the steps, the upper number is used, in a fixed sequence of (row, column, step) that is the same on every device.

Stored values, scales and decoded values have the bits of ``torch_impl.optimizer.moments`` on CPU, except for subnormal
numbers, which JAX flushes to zero. ``main_weight_adamw.py`` explains how roundings are preserved. Every result is
rounded to a number of the stored dtype before the cast to this dtype, so it does not matter how a compiler casts, or
whether it drops a pair of casts.

The keys of moments in an optimizer's state::

    weights                   mu                                              mu_scale
    any pytree                the same tree                                   the same tree, None where unscaled
    plan, pjit                by path                                         "<path> (scales)"
    plan, shard_map           "<key>", or "<key> (scaled)" and                "<key> (scales)"
                              "<key> (unscaled)"

``mu_scale`` is None if the format has no scales. In a pytree that belongs to no plan, rows follow each leaf's own
shape. A plan (``plan_moments.py``) knows the dimension of a stack's layers, and rows follow the shape of one layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bridge.core.dtype_names import full_name
from bridge.core.sharding.layout.rows import rows_of
from bridge.core.sharding.policy.optimizer_state import MOMENTS, SCALED
from jax_impl.comm.collectives import divide_exactly, round_to
from jax_impl.runtime.groups.precision import update_dtype
from jax_impl.runtime.groups.row_arrays import SCALES

# From the golden ratio and the plastic number: multiples of these, modulo 1, fill the unit interval evenly.
_STEP_TURN, _ROW_TURN, _COLUMN_TURN = 0.6180339887498949, 0.7548776662466927, 0.5698402909980532


@dataclass(frozen=True)
class Rows:
    """The rows of a parameter to which values belong, for the dithering sequence.

    ``numbers``: int32 row indices, with one dimension less than the values; any number for values that are not a row.
    ``column``: the column of each row's first element, if rows are cut over devices. ``whole``: turns the largest
    magnitude of a part of a row into that of the whole row.
    """

    numbers: jax.Array
    column: int | jax.Array = 0
    columns: int | None = None
    whole: Callable[[jax.Array], jax.Array] = lambda largest: largest


@dataclass(frozen=True)
class MomentFormat:
    """The format of a moment: its ``dtype``, ``positive`` for second moments, ``option`` for error messages.

    Raises ``ValueError`` for a dtype other than float32, bfloat16, float16, float8_e4m3fn and float8_e5m2.
    """

    option: str
    dtype: np.dtype
    positive: bool = False

    @classmethod
    def of(cls, option: str, dtype: Any, *, positive: bool = False) -> MomentFormat:
        """``dtype``: a dtype or its name, also a short one; None: float32."""
        if isinstance(dtype, str):
            dtype = full_name(dtype, MOMENTS)
        try:
            known = np.dtype(jnp.float32 if dtype is None else jnp.dtype(dtype))
        except TypeError:
            known = np.dtype(object)
        if known.name not in MOMENTS:
            raise ValueError(f"{option}: expected one of {', '.join(MOMENTS)}, got {dtype!r}")
        return cls(option, known, positive)

    @property
    def scaled(self) -> bool:
        """Whether each row of several elements has a scale."""
        return self.dtype.name in SCALED

    def unscaled_dtype(self, weights: np.dtype) -> np.dtype:
        """The stored dtype without a scale; float32 means float64 for float64 weights."""
        return self.dtype if self.dtype == jnp.bfloat16 else update_dtype(weights)

    def plain(self, values: jax.Array) -> jax.Array:
        """Values in the stored format without a scale."""
        if self.dtype != jnp.bfloat16:
            return values
        # float64 values are first rounded to float32, as in PyTorch.
        return round_to(values.astype(jnp.float32), self.dtype)

    def encode(self, values: jax.Array, rows: Rows, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32 ``values`` [..., columns] -> numbers of the stored dtype, as float32, and scales [..., 1]; ``step``:
        int32, from 1."""
        limits = jnp.finfo(self.dtype)
        smallest, most = np.float32(limits.smallest_normal), np.float32(limits.max)
        # Compare as integers, where NaN is largest: XLA's maximum of floats may ignore NaN.
        bits = lax.bitcast_convert_type(values, np.int32) & np.int32(0x7FFFFFFF)
        largest = rows.whole(jnp.max(bits, -1, keepdims=True))
        magnitudes = lax.bitcast_convert_type(largest, np.float32)
        scale = divide_exactly(magnitudes, float(limits.max))
        scaled = divide_exactly(values, jnp.where(scale == 0, np.float32(1), scale))
        power = lax.bitcast_convert_type(
            lax.bitcast_convert_type(scaled, np.int32) & np.int32(0x7F800000), np.float32
        )
        # Below the smallest normal number the spacing is constant.
        spacing = jnp.maximum(power, smallest) * np.float32(limits.eps)
        if self.positive and self.dtype.itemsize == 1:
            number = jnp.floor(scaled / spacing + _turns(rows, scaled.shape[-1], step)) * spacing
        else:
            number = lax.round(scaled / spacing, lax.RoundingMethod.TO_NEAREST_EVEN) * spacing
        if self.positive:
            least = jnp.where(values > 0, smallest * np.float32(limits.eps), np.float32(0))
            number = jnp.where(number < least, least, number)
        return jnp.where(number > most, most, jnp.where(number < -most, -most, number)), scale


def decode_rows(stored: jax.Array, scale: jax.Array) -> jax.Array:
    """The float32 moment of numbers in units of their scale."""
    # The select forces the product to be rounded before any use: see main_weight_adamw.py.
    return jnp.where(scale >= 0, stored.astype(jnp.float32) * scale, np.float32(np.nan))


def _turns(rows: Rows, columns: int, step: jax.Array) -> jax.Array:
    """A number in [0, 1) for each element, which decides whether the element is rounded up."""
    with jax.enable_x64(True):
        numbers = lax.convert_element_type(rows.numbers, np.float64) * np.float64(_ROW_TURN)
        shift = lax.convert_element_type(step, np.float64) * np.float64(_STEP_TURN)
        # True for all rows, but no compiler knows that, so neither product can be fused into the sum.
        rounded = rows.numbers >= -step
        turn = jnp.where(rounded, numbers, np.nan) + jnp.where(rounded, shift, np.nan)
        by_row = lax.convert_element_type(turn - jnp.trunc(turn), np.float32)[..., None]
    by_column = jnp.asarray(_column_turns(rows.columns or columns))
    if rows.columns is not None:
        by_column = lax.dynamic_slice_in_dim(by_column, rows.column, columns)
    turn = by_row + by_column
    return turn - jnp.trunc(turn)


@functools.cache
def _column_turns(columns: int) -> np.ndarray:
    turns = np.arange(columns, dtype=np.float64) * _COLUMN_TURN
    return (turns - np.trunc(turns)).astype(np.float32)


VALUES = ""
# The arrays of one weight array's moment, by suffix of their keys.
Parts = Mapping[str, jax.Array]
Compute = Callable[[Any, Any, Any], Any]


class MomentRows(Protocol):
    """The storage of one weight array's moment."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of its arrays' keys."""

    def zeros(self, moment_format: MomentFormat) -> Parts: ...
    def decode(self, parts: Parts) -> jax.Array: ...
    def encode(self, moment_format: MomentFormat, values: jax.Array, step: jax.Array) -> Parts: ...


@dataclass(frozen=True)
class Alike:
    """Without scales: one array like the weights, which have ``dtype``."""

    shape: tuple[int, ...]
    dtype: np.dtype
    suffixes = (VALUES,)

    def zeros(self, moment_format: MomentFormat) -> Parts:
        return {VALUES: jnp.zeros(self.shape, moment_format.unscaled_dtype(self.dtype))}

    def decode(self, parts: Parts) -> jax.Array:
        return parts[VALUES].astype(update_dtype(self.dtype))

    def encode(self, moment_format: MomentFormat, values: jax.Array, step: jax.Array) -> Parts:
        return {VALUES: moment_format.plain(values)}


@dataclass(frozen=True)
class ArrayRows:
    """Rows of whole parameters. For a stack, ``decode`` and ``encode`` take one layer."""

    shape: tuple[int, ...]
    dtype: np.dtype
    suffixes = (VALUES, SCALES)

    def zeros(self, moment_format: MomentFormat) -> Parts:
        scales = jnp.zeros((*self.shape[:-1], 1), jnp.float32)
        return {VALUES: jnp.zeros(self.shape, moment_format.dtype), SCALES: scales}

    def decode(self, parts: Parts) -> jax.Array:
        return decode_rows(parts[VALUES], parts[SCALES]).astype(update_dtype(self.dtype))

    def encode(self, moment_format: MomentFormat, values: jax.Array, step: jax.Array) -> Parts:
        lead = values.shape[:-1]
        numbers = jnp.zeros(lead, np.int32)
        for dimension in range(len(lead)):
            below = np.int32(math.prod(lead[dimension + 1 :]))
            numbers += lax.broadcasted_iota(np.int32, lead, dimension) * below
        stored, scale = moment_format.encode(values.astype(jnp.float32), Rows(numbers), step)
        return {VALUES: stored.astype(moment_format.dtype), SCALES: scale}


class MomentArrays:
    """Combines the moments of all weights into an optimizer's state; this class is for any pytree."""

    def rows(self, moment_format: MomentFormat, weights: Any) -> list[MomentRows]:
        """The rows of each weight array."""

        def of(leaf: Any) -> MomentRows:
            scaled = moment_format.scaled and rows_of(leaf.shape)[0] > 1
            return (ArrayRows if scaled else Alike)(tuple(leaf.shape), leaf.dtype)

        return [of(leaf) for leaf in jax.tree.leaves(weights)]

    def zeros(self, moment_format: MomentFormat, weights: Any) -> tuple[Any, Any]:
        """The two trees of a state before the first step: values and scales."""
        parts = [rows.zeros(moment_format) for rows in self.rows(moment_format, weights)]
        return self.join(moment_format, weights, parts)

    def parts(self, rows: list[MomentRows], weights: Any, values: Any, scales: Any) -> list[Parts]:
        """The parts of each weight array's moment, from the two trees of the state."""
        structure: Any = jax.tree.structure(weights)
        trees = {VALUES: structure.flatten_up_to(values)}
        if scales is not None:
            trees[SCALES] = structure.flatten_up_to(scales)
        return [{suffix: trees[suffix][i] for suffix in stored.suffixes} for i, stored in enumerate(rows)]

    def join(self, moment_format: MomentFormat, weights: Any, parts: list[Parts]) -> tuple[Any, Any]:
        """The two trees of the state; the second is None if the format has no scales."""
        structure = jax.tree.structure(weights)
        values = jax.tree.unflatten(structure, [own[VALUES] for own in parts])
        scales = jax.tree.unflatten(structure, [own.get(SCALES) for own in parts])
        return values, scales if moment_format.scaled else None

    def compute_on(
        self, number: int, weights: Any, compute: Compute, held: Any, gradient: Any, numbers: Any
    ) -> Any:
        """``compute(held, gradient, numbers)`` for one weight array, in a context where its rows are known.

        Returns the new ``held``. ``held`` and ``gradient`` are trees of arrays that are sharded like the weights,
        ``numbers`` is a tree of scalars.
        """
        return compute(held, gradient, numbers)
