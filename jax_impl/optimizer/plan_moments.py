"""Moments of a plan's arrays, with one scale per row also in a device's shard of a flat group.

Each rank has other rows, but all ranks run one program. A *window* is a part of a shard, of the same length on every
rank, that contains all of the shard's rows of one parameter, and perhaps rows of others::

    rank 0   |c c c c a a a|        window of a, 5 rows:   [ . . a a a ]     the last 5, where the shard ends with a
    rank 1   |a a a a a b b|                               [ a a a a a ]     else the first 5
    rank 2   |d d d d d d d|                               [ . . . . . ]     nothing in it is a's

Windows are read, computed and written one after another; rows of other parameters are written back unchanged. So the
program grows with the number of parameters, not of devices, and works on one copy of the shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from bridge.core.sharding.layout.slot import Slot
from bridge.core.sharding.policy.parallel import Cut
from jax_impl.comm.collectives import fence
from jax_impl.optimizer.moments import (
    Alike,
    ArrayRows,
    Compute,
    MomentArrays,
    MomentFormat,
    MomentRows,
    Parts,
    Rows,
    decode_rows,
)
from jax_impl.runtime.groups.flat_group import FlatGroup
from jax_impl.runtime.groups.logical_group import Group
from jax_impl.runtime.groups.precision import update_dtype
from jax_impl.runtime.groups.row_arrays import SCALED, SCALES, UNSCALED, RowArray, is_scaled
from jax_impl.runtime.groups.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class _Window:
    """The rows of a parameter on ranks ``first`` to ``last``; rank ``first`` has ``held`` rows.

    ``rows``: the number of rows in the window. ``whole``: the number of rows in a shard that contains only these.
    ``start``: the window's start in a shard, on the first rank and on later ranks; ``place``: in the same way, the
    start of the rows' numbers in their array.
    """

    path: str
    scaled: bool
    slot: Slot
    rows: int
    first: int
    last: int
    held: int
    whole: int
    start: tuple[int, int]
    place: tuple[int, int]

    def number(self, rank: Any) -> Any:
        """The index of the window's first row in the parameter; negative if the window begins before the parameter."""
        later = self.held + (rank - self.first - 1) * self.whole
        return _on_first(self, rank, self.held - self.rows, later)

    def owned(self, rank: Any) -> jax.Array:
        """Mask of the window's rows that belong to the parameter, [rows]."""
        numbers = self.number(rank) + lax.iota(np.int32, self.rows)
        there = (numbers >= 0) & (numbers < self.slot.num_rows)
        return there & (rank >= self.first) & (rank <= self.last)

    def read(self, shard: jax.Array, rank: Any) -> jax.Array:
        """[rows, columns]"""
        start = _on_first(self, rank, *self.start)
        values = lax.dynamic_slice_in_dim(shard, start, self.rows * self.slot.row_size)
        return values.reshape(self.rows, self.slot.row_size)

    def write(self, shard: jax.Array, rank: Any, values: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(
            shard, values.reshape(-1), _on_first(self, rank, *self.start), 0
        )


def _on_first(window: _Window, rank: Any, there: int, later: Any) -> Any:
    if window.first == window.last:
        return there
    return jnp.where(rank == window.first, there, later)


@dataclass(frozen=True)
class ShardRows:
    """The rows of a flat group. Methods run with all mesh axes manual, on one layer of a shard."""

    group: FlatGroup

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (SCALED, *self._numbers)

    def zeros(self, moment_format: MomentFormat) -> dict[str, jax.Array]:
        """Whole arrays."""
        numbers = {suffix: jnp.zeros(array.shape, array.dtype) for suffix, array in self._numbers.items()}
        return {SCALED: jnp.zeros(self.group.shape, moment_format.dtype), **numbers}

    def decode(self, parts: Parts) -> jax.Array:
        rank, numbers = self._rank, self._padded(parts)
        values = parts[SCALED].astype(update_dtype(self.group.dtype))
        for window in self._windows:
            # One window after another, so that the shard is updated in place.
            (old,) = fence((window.read(values, rank),))
            own = window.owned(rank)[:, None]
            number = self._number(window, numbers, rank)[:, None]
            new = decode_rows(old, number).astype(old.dtype) if window.scaled else number
            values = window.write(values, rank, jnp.where(own, new, old))
        return values

    def encode(self, moment_format: MomentFormat, values: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
        rank = self._rank
        numbers = self._padded(
            {suffix: jnp.zeros(array.rows, array.dtype) for suffix, array in self._numbers.items()}
        )
        last: Any = ()
        for window in self._windows:
            # One window after another: collectives without dependences between them hang the simulator.
            (old, _) = fence((window.read(values, rank), last))
            own = window.owned(rank)
            if window.scaled:
                rows = self._rows(window, rank)
                new, number = moment_format.encode(old.astype(jnp.float32), rows, step)
                last = number
            else:
                new, number = jnp.zeros_like(old), old
            suffix = SCALES if window.scaled else UNSCALED
            kept = jnp.where(own, number[:, 0], self._number(window, numbers, rank))
            numbers[suffix] = lax.dynamic_update_slice_in_dim(
                numbers[suffix], kept, self._place(window, rank), 0
            )
            values = window.write(values, rank, jnp.where(own[:, None], new.astype(old.dtype), old))
        arrays = {SCALED: values.astype(moment_format.dtype)}
        for suffix, array in self._numbers.items():
            margin = self._margins[suffix]
            arrays[suffix] = numbers[suffix][margin : margin + array.rows]
        return arrays

    @property
    def _rank(self) -> Any:
        levels = self.group.wire.axes.names[: self.group.strategy.optimizer]
        return lax.axis_index(levels) if levels and self.group.layout.num_shards > 1 else np.int32(0)

    def _number(self, window: _Window, numbers: Parts, rank: Any) -> jax.Array:
        """The numbers of the window's rows, [rows], from the array of all rows' numbers."""
        array = numbers[SCALES if window.scaled else UNSCALED]
        return lax.dynamic_slice_in_dim(array, self._place(window, rank), window.rows)

    def _place(self, window: _Window, rank: Any) -> Any:
        margin = self._margins[SCALES if window.scaled else UNSCALED]
        return _on_first(window, rank, *(start + margin for start in window.place))

    def _padded(self, parts: Parts) -> dict[str, jax.Array]:
        """Arrays of the rows' numbers with margins, so that every window fits."""
        return {suffix: jnp.pad(parts[suffix], margin) for suffix, margin in self._margins.items()}

    def _rows(self, window: _Window, rank: Any) -> Rows:
        """The rows of the whole parameter to which the window's rows belong."""
        numbers = window.number(rank) + lax.iota(np.int32, window.rows)
        cuts = self.group.cuts_of(window.path)
        part, whole = window.slot.shape, self.group.layer_shape(window.path)
        if not cuts:
            return Rows(numbers)
        *lead, last = (_offset(dimension, cuts, part) for dimension in range(len(part)))
        whole_numbers: Any = 0
        for dimension in reversed(range(len(lead))):
            below = int(np.prod(whole[dimension + 1 : -1], dtype=np.int64))
            whole_numbers += (numbers % part[dimension] + lead[dimension]) * below
            numbers = numbers // part[dimension]
        over = tuple(cut.axis for cut in cuts if cut.dimension == len(part) - 1)
        if not over:
            return Rows(whole_numbers)
        return Rows(whole_numbers, last, whole[-1], lambda largest: lax.pmax(largest, over))

    @cached_property
    def _numbers(self) -> dict[str, RowArray]:
        """Arrays with a number for each row, by suffix."""
        both = {SCALES: RowArray(self.group, scaled=True), UNSCALED: RowArray(self.group, scaled=False)}
        return {suffix: array for suffix, array in both.items() if array.rows}

    @cached_property
    def _margins(self) -> dict[str, int]:
        return {
            suffix: max(window.rows for window in self._windows if window.scaled == array.scaled)
            for suffix, array in self._numbers.items()
        }

    @cached_property
    def _windows(self) -> tuple[_Window, ...]:
        pairs = zip(self.group.paths, self.group.layout.slots, strict=True)
        return tuple(self._window(path, slot) for path, slot in pairs if slot.numel)

    def _window(self, path: str, slot: Slot) -> _Window:
        layout, scaled = self.group.layout, is_scaled(self.group, path)
        numbers = self._numbers[SCALES if scaled else UNSCALED]
        size, base = layout.shard_sizes[slot.buffer], layout.shard_slices[slot.buffer].start
        first, last = slot.offset // size, (slot.end - 1) // size
        whole = size // slot.row_size
        held = slot.rows_before((first + 1) * size)
        number = numbers.first_rows[slot.name]
        if first == last:
            start, rows = slot.offset - first * size, held
        else:
            tail = slot.num_rows - slot.rows_before(last * size)
            rows = max(held, tail, whole if last - first > 1 else 0)
            start, number = size - rows * slot.row_size, number - (rows - held)
        starts, number_starts = (base + start, base), (number, numbers.starts[slot.buffer])
        return _Window(path, scaled, slot, rows, first, last, held, whole, starts, number_starts)


def _offset(dimension: int, cuts: tuple[Cut, ...], part: tuple[int, ...]) -> Any:
    """The offset of a device's part in the whole parameter."""
    axis = next((cut.axis for cut in cuts if cut.dimension == dimension), None)
    return 0 if axis is None else lax.axis_index(axis) * part[dimension]


class PlanMoments(MomentArrays):
    """Moments of a plan's arrays, by key."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._groups: dict[str, Group] = {key: group for group in plan.groups for key in group.stored}

    def rows(self, moment_format: MomentFormat, weights: Any) -> list[MomentRows]:
        def of(key: str, array: Any) -> MomentRows:
            shape, dtype, group = tuple(array.shape), array.dtype, self._groups[key]
            if not moment_format.scaled or key + SCALES not in self._plan.row_arrays:
                return Alike(shape, dtype)
            return ShardRows(group) if isinstance(group, FlatGroup) else ArrayRows(shape, dtype)

        return [of(*item) for item in _items(weights)]

    def parts(self, rows: list[MomentRows], weights: Any, values: Any, scales: Any) -> list[Parts]:
        return [
            {suffix: (scales if suffix == SCALES else values)[key + suffix] for suffix in stored.suffixes}
            for (key, _), stored in zip(_items(weights), rows, strict=True)
        ]

    def join(self, moment_format: MomentFormat, weights: Any, parts: list[Parts]) -> tuple[Any, Any]:
        values: dict[str, jax.Array] = {}
        scales: dict[str, jax.Array] = {}
        for (key, _), own in zip(_items(weights), parts, strict=True):
            for suffix, array in own.items():
                (scales if suffix == SCALES else values)[key + suffix] = array
        return values, scales if moment_format.scaled else None

    def compute_on(
        self, number: int, weights: Any, compute: Compute, held: Any, gradient: Any, numbers: Any
    ) -> Any:
        key, _ = _items(weights)[number]
        group = self._groups[key]
        run = compute if group.layers is None else _by_layer(compute, group.layers)
        if not isinstance(group, FlatGroup):
            return run(held, gradient, numbers)
        specs = [jax.tree.map(lambda _: group.spec, tree) for tree in (held, gradient)]
        whole = jax.tree.map(lambda _: PartitionSpec(), numbers)
        placed = jax.shard_map(
            run, mesh=self._plan.mesh, in_specs=(*specs, whole), out_specs=specs[0], check_vma=False
        )
        return placed(held, gradient, numbers)


class ParameterMoments(PlanMoments):
    """Moments of a plan's parameters by path, for an optimizer that gets parameters (``optimizer/logical.py``)."""

    def rows(self, moment_format: MomentFormat, weights: Any) -> list[MomentRows]:
        scaled = self._plan.row_arrays if moment_format.scaled else {}
        return [
            (ArrayRows if path + SCALES in scaled else Alike)(tuple(array.shape), array.dtype)
            for path, array in _items(weights)
        ]

    def compute_on(
        self, number: int, weights: Any, compute: Compute, held: Any, gradient: Any, numbers: Any
    ) -> Any:
        path, _ = _items(weights)[number]
        layers = self._plan.layers_of(path)
        run = compute if layers is None else _by_layer(compute, layers)
        return run(held, gradient, numbers)


def _items(weights: Any) -> list[tuple[str, Any]]:
    """Items in the order of the leaves."""
    return sorted(weights.items())


def _by_layer(compute: Compute, layers: int) -> Compute:
    """``compute`` on one layer after another, in place, so that temporary arrays are as large as one layer."""

    def computed(held: Any, gradient: Any, numbers: Any) -> Any:
        def layer(number: Any, held: Any) -> Any:
            def of(x: jax.Array) -> jax.Array:
                return lax.dynamic_index_in_dim(x, number, keepdims=False)

            new = compute(jax.tree.map(of, held), jax.tree.map(of, gradient), numbers)
            return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, number, 0), held, new)

        return lax.fori_loop(0, layers, layer, held)

    return computed
