"""Moments with a scale for each row, in the shard of a flat group that a device has, updated in place.

Which rows a device has differs from rank to rank, but all run one program. A *window* is a part of a shard, as long on
every rank, that has all rows of a parameter wherever there are some, and maybe rows of others::

    rank 0   |c c c c a a a|        window of a, 5 rows:   [ . . a a a ]     the last 5, where the shard ends with a
    rank 1   |a a a a a b b|                               [ a a a a a ]     else the first 5
    rank 2   |d d d d d d d|                               [ . . . . . ]     nothing in it is a's

Windows are computed one after the other, each in *pieces* of some rows; rows that are not the parameter's are written
back as they were. So the program grows with the number of parameters, not with that of devices, and beside the shard a
device holds what one piece needs in the dtype of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bridge.sharding.parallel import Cut
from bridge.sharding.slot import Slot
from jax_impl.comm.collectives import fence
from jax_impl.optimizer.moments import MomentFormat, Rows, decoded
from jax_impl.runtime.flat_group import FlatGroup
from jax_impl.runtime.precision import update_dtype
from jax_impl.runtime.row_arrays import SCALED, SCALES, UNSCALED, VALUES, RowArray, is_scaled

Parts = Mapping[str, jax.Array]
PIECE = 1 << 20
"""Elements that are computed together, unless a row has more."""


@dataclass(frozen=True)
class _Window:
    """Where rows of a parameter are on ranks ``first`` to ``last``, ``held`` of them on the first.

    ``rows``: how many the window has. ``whole``: how many a shard full of them has. ``start``: of the window in a
    shard, on the first rank and on later ones; ``place``: of the rows' numbers in their array, likewise.
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
        """Which row of the parameter is the first in the window; negative where it comes before."""
        later = self.held + (rank - self.first - 1) * self.whole
        return _on_first(self, rank, self.held - self.rows, later)

    @property
    def size(self) -> int:
        """How many rows a piece has."""
        pieces = -(-self.rows * self.slot.row_size // PIECE)
        return min(self.rows, -(-self.rows // pieces))


def _on_first(window: _Window, rank: Any, there: int, later: Any) -> Any:
    if window.first == window.last:
        return there
    return jnp.where(rank == window.first, there, later)


@dataclass(frozen=True)
class _Piece:
    """Rows of one window: ``first`` of them in the window, of ``layer``, on ``rank``."""

    window: _Window
    margin: int
    layer: Any
    rank: Any
    first: Any

    def read(self, suffix: str, array: jax.Array) -> jax.Array:
        """[rows, columns], of what has a number for each row [rows, 1]"""
        columns = self._columns(suffix)
        size = self.window.size
        place = self.layer, self._place(suffix)
        return lax.dynamic_slice(array, place, (1, size * columns)).reshape(size, columns)

    def written(self, suffix: str, array: jax.Array, values: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(array, values.reshape(1, -1), (self.layer, self._place(suffix)))

    def _columns(self, suffix: str) -> int:
        return 1 if suffix in (SCALES, UNSCALED) else self.window.slot.row_size

    def _place(self, suffix: str) -> Any:
        if suffix in (SCALES, UNSCALED):
            return _on_first(self.window, self.rank, *self.window.place) + self.margin + self.first
        return _on_first(self.window, self.rank, *self.window.start) + self.first * self.window.slot.row_size


@dataclass(frozen=True)
class PieceRows:
    """Rows of one parameter: values [rows, columns], numbers of rows [rows, 1]."""

    scaled: bool
    rows: Rows
    dtype: np.dtype

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the arrays that there are of these rows."""
        return (VALUES, SCALED, SCALES) if self.scaled else (VALUES, UNSCALED)

    def decode(self, parts: Parts) -> jax.Array:
        if not self.scaled:
            return parts[UNSCALED]
        return decoded(parts[SCALED], parts[SCALES]).astype(self.dtype)

    def encode(self, kind: MomentFormat, values: jax.Array, step: jax.Array) -> Parts:
        if not self.scaled:
            return {UNSCALED: values}
        stored, scale = kind.encode(values.astype(jnp.float32), self.rows, step)
        return {SCALED: stored.astype(kind.dtype), SCALES: scale}


@dataclass(frozen=True)
class ShardRows:
    """The rows of a flat group."""

    group: FlatGroup

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (SCALED, *self._numbers)

    def zeros(self, kind: MomentFormat) -> dict[str, jax.Array]:
        """Whole arrays."""
        group = self.group
        found = {SCALED: jnp.zeros(group.shape, kind.dtype)}
        for suffix, array in self._numbers.items():
            found[suffix] = jnp.zeros(array.shape, array.dtype)
        return found

    def computed(
        self, rows: Sequence[Any], compute: Callable[..., Any], held: Any, given: Any, numbers: Any
    ) -> Any:
        """``compute(rows, held, given, numbers)`` of one piece after the other: ``held`` anew.

        Runs where all axes of the mesh are manual. ``held`` and ``given``: trees of arrays like the shard, and of
        ``Parts``. ``rows``: how moments are stored; those of this group become ``PieceRows``.
        """
        layers, dtypes = self.group.layers, jax.tree.map(lambda x: x.dtype, held)
        if layers is None:
            held, given = jax.tree.map(lambda x: x[None], (held, given))
        # To write a piece of a float8 array XLA:CPU converts the whole array.
        held = self._padded(jax.tree.map(_as_integers, held))

        def run(placed: PieceRows, old: Any, slopes: Any) -> Any:
            old = jax.tree.map(_as_floats, old, _by_suffix(lambda _, x: x, placed.suffixes, dtypes))
            kept = tuple(placed if isinstance(one, ShardRows) else one for one in rows)
            return old, compute(kept, old, slopes, numbers)

        def layer(number: Any, held: Any) -> Any:
            for window in self._windows:
                # One after the other: collectives that do not depend on each other hang the simulator.
                held = fence(held)

                def piece(turn: Any, held: Any, window: _Window = window) -> Any:
                    return self._piece(window, number, turn, run, held, given)

                pieces = -(-window.rows // window.size)
                held = lax.fori_loop(0, pieces, piece, held) if pieces > 1 else piece(0, held)
            return held

        held = layer(0, held) if layers is None else lax.fori_loop(0, layers, layer, held)
        held = jax.tree.map(_as_floats, self._cropped(held), dtypes)
        return held if layers is not None else jax.tree.map(lambda x: x[0], held)

    def _piece(
        self, window: _Window, layer: Any, turn: Any, run: Callable[..., Any], held: Any, given: Any
    ) -> Any:
        rank, size = self._rank, window.size
        # The last piece ends with its window, and may have rows of the piece before.
        first = jnp.minimum(turn * size, window.rows - size)
        piece = _Piece(window, self._margin(window.scaled), layer, rank, first)
        in_window = first + lax.iota(np.int32, size)
        of_parameter = window.number(rank) + in_window
        own = (of_parameter >= 0) & (of_parameter < window.slot.num_rows) & (in_window >= turn * size)
        own &= (rank >= window.first) & (rank <= window.last)
        placed = PieceRows(window.scaled, self._rows(window, of_parameter), update_dtype(self.group.dtype))
        # Read as a whole before anything is written: XLA then writes in place.
        read = fence([_by_suffix(piece.read, placed.suffixes, tree) for tree in (held, given)])
        old, new = run(placed, *read)

        def written(suffix: str, array: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
            values = jnp.where(own[:, None], new.astype(old.dtype), old)
            return piece.written(suffix, array, _as_integers(values))

        return _by_suffix(written, placed.suffixes, held, old, new, keep=True)

    @property
    def _rank(self) -> Any:
        levels = self.group.wire.axes.names[: self.group.strategy.optimizer]
        return lax.axis_index(levels) if levels and self.group.layout.num_shards > 1 else np.int32(0)

    def _padded(self, held: Any) -> Any:
        """Arrays of the rows' numbers with margins, so that every window is inside."""

        def padded(suffix: str, array: jax.Array) -> jax.Array:
            margin = self._margin(suffix == SCALES)
            return jnp.pad(array, ((0, 0), (margin, margin)))

        return _by_suffix(padded, (SCALES, UNSCALED), held, keep=True)

    def _cropped(self, held: Any) -> Any:
        def cropped(suffix: str, array: jax.Array) -> jax.Array:
            margin = self._margin(suffix == SCALES)
            return array[:, margin : array.shape[1] - margin]

        return _by_suffix(cropped, (SCALES, UNSCALED), held, keep=True)

    def _margin(self, scaled: bool) -> int:
        return max(window.rows for window in self._windows if window.scaled == scaled)

    def _rows(self, window: _Window, numbers: jax.Array) -> Rows:
        """Which rows of the whole parameter these are of the part that a device has."""
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
        place = numbers.first_rows[slot.name]
        if first == last:
            start, rows = slot.offset - first * size, held
        else:
            tail = slot.num_rows - slot.rows_before(last * size)
            rows = max(held, tail, whole if last - first > 1 else 0)
            start, place = size - rows * slot.row_size, place - (rows - held)
        starts, places = (base + start, base), (place, numbers.starts[slot.buffer])
        return _Window(path, scaled, slot, rows, first, last, held, whole, starts, places)


def _as_integers(x: jax.Array) -> jax.Array:
    return x if x.dtype.itemsize > 1 else lax.bitcast_convert_type(x, np.uint8)


def _as_floats(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _by_suffix(function: Any, suffixes: Sequence[str], tree: Any, *others: Any, keep: bool = False) -> Any:
    """``function(suffix, array, ...)`` of the arrays of these suffixes; of the others the array, if they are kept."""

    def mapped(parts: Any, *others: Any) -> Any:
        if not isinstance(parts, dict):
            return function(VALUES, parts, *others) if VALUES in suffixes else parts
        found = {
            suffix: function(suffix, array, *(other[suffix] for other in others))
            for suffix, array in parts.items()
            if suffix in suffixes
        }
        return {**parts, **found} if keep else found

    return jax.tree.map(mapped, tree, *others, is_leaf=lambda x: isinstance(x, dict))


def _offset(dimension: int, cuts: tuple[Cut, ...], part: tuple[int, ...]) -> Any:
    """Where the part that a device has begins in the whole parameter."""
    axis = next((cut.axis for cut in cuts if cut.dimension == dimension), None)
    return 0 if axis is None else lax.axis_index(axis) * part[dimension]
