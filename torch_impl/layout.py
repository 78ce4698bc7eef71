"""Where each parameter of a group sits in its flat buffer, and which rows each rank owns.

A parameter group is stored in one flat buffer cut into ``num_shards`` equal shards of ``shard_size``
elements; rank k holds elements ``[k * shard_size, (k + 1) * shard_size)``. Every parameter is one contiguous
range, and a shard boundary never cuts an *atom* of a parameter: a row, a block of rows or the whole tensor.
So what a rank holds of a parameter is a range of whole rows, uneven by design and possibly empty.

``print(plan_layout({"wq": (7, 9), "wo": (5, 7), "scale": (6,), "head": (3, 11)}, 4))``::

    4 shards x 36 elements, 137 real, 5.11 % padding, granularity row
    rank 0 |ddddddddddddddddddddddddddddddddd...|
    rank 1 |aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa|
    rank 2 |aaaaaaaaaaaaaaaaaaaaaaaaaaa..bbbbbbb|
    rank 3 |bbbbbbbbbbbbbbbbbbbbbbbbbbbbcccccc..|
    a  wq (7, 9): rows 0:0 0:4 4:7 7:7
    b  wo (5, 7): rows 0:0 0:0 0:1 1:5
    c  scale (6,): rows 0:0 0:0 0:0 0:6
    d  head (3, 11): rows 0:3 3:3 3:3 3:3

(one letter per tensor, ``.`` is padding; ``torch_impl.rows`` says what a row is). A tensor without elements
occupies nothing. The planner is deterministic, pure Python and uses no framework, so two programs that plan
the same shapes cut alike.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch_impl.layout_text import render
from torch_impl.rows import Box, row_boxes, rows_of

__all__ = ["GRANULARITIES", "Box", "Layout", "Slot", "plan_layout", "row_boxes", "rows_of"]

GRANULARITIES = ("row", "block", "tensor")

_MAX_TRIES = 64


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer: elements ``[offset, offset + numel)``, row-major."""

    name: str
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name of a tensor: expected a str, got {self.name!r}")
        if not isinstance(self.shape, tuple) or not all(_is_size(d) for d in self.shape):
            raise ValueError(f"shape of {self.name!r}: expected a tuple of ints >= 0, got {self.shape!r}")
        if not _is_size(self.offset):
            raise ValueError(f"offset of {self.name!r}: expected an int >= 0, got {self.offset!r}")
        if self.numel == 0 and self.offset != 0:
            raise ValueError(f"offset of {self.name!r}, which has no elements: expected 0, got {self.offset}")

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @cached_property
    def row_size(self) -> int:
        """Elements of one row; 0 when the parameter has no elements."""
        return rows_of(self.shape)[0]

    @cached_property
    def num_rows(self) -> int:
        """Rows of the parameter; 0 when it has no elements."""
        return rows_of(self.shape)[1]


@dataclass(frozen=True)
class Layout:
    """A checked placement of parameters in ``num_shards`` equal shards of one flat buffer.

    Args:
        num_shards: ranks the buffer is cut over, >= 1.
        shard_size: elements of each shard.
        granularity: what no boundary cuts: "row", "block" (of ``rows`` rows) or "tensor".
        rows: rows of a block; used by granularity "block" only.
        slots: one per parameter, in model order.

    Raises:
        ValueError: a field is out of range, slots overlap or leave the buffer, or a boundary cuts an atom.
    """

    num_shards: int
    shard_size: int
    granularity: str
    rows: int
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        _check_options(self.num_shards, self.granularity, self.rows)
        if not _is_size(self.shard_size):
            raise ValueError(f"shard_size: expected an int >= 0, got {self.shard_size!r}")
        if len(self._by_name) != len(self.slots):
            twice = next(s.name for s in self.slots if self._by_name[s.name] is not s)
            raise ValueError(f"tensor names: expected each once, got {twice!r} more than once")
        self._check_bounds()
        for slot in self.slots:
            self._check_cuts(slot)

    def _check_bounds(self) -> None:
        end, before = 0, ""
        for slot in sorted((s for s in self.slots if s.numel), key=lambda s: s.offset):
            if slot.offset < end:
                raise ValueError(
                    f"offset of {slot.name!r}: expected at least {end}, the end of {before!r}, "
                    f"got {slot.offset}"
                )
            end, before = slot.offset + slot.numel, slot.name
        if end > self.padded_size:
            raise ValueError(
                f"{before!r}: expected to end within the {self.padded_size} elements of the buffer "
                f"({self.num_shards} shards of {self.shard_size}), got end {end}"
            )

    def _check_cuts(self, slot: Slot) -> None:
        if slot.numel == 0:
            return
        size, end = self.shard_size, slot.offset + slot.numel
        first = (slot.offset // size + 1) * size
        atom = _atom(slot.shape, self.granularity, self.rows)
        # All later boundaries are one shard further each, so the first two decide.
        for boundary in (first, first + size):
            if boundary < end and (boundary - slot.offset) % atom:
                raise ValueError(
                    f"{slot.name!r}: expected shard boundaries at multiples of {atom} elements from its "
                    f"start (granularity {self.granularity}), got one at {boundary - slot.offset}"
                )

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    @property
    def padded_size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.num_shards * self.shard_size

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def overhead(self) -> float:
        """Padding as a fraction of the real elements; 0.0 for an empty buffer."""
        return self.padded_size / self.numel - 1 if self.numel else 0.0

    def slot(self, name: str) -> Slot:
        """The slot of a parameter; ValueError when the layout has none of that name."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(list(self._by_name)[:5])
            raise ValueError(
                f"tensor name: expected one of the layout ({known}, ...), got {name!r}"
            ) from None

    def row_bounds(self, name: str) -> tuple[int, ...]:
        """``num_shards + 1`` row indices ``b``: rank k owns rows ``[b[k], b[k+1])`` of the parameter."""
        slot = self.slot(name)
        if slot.numel == 0:
            return (0,) * (self.num_shards + 1)
        return tuple(self._rows_before(slot, rank) for rank in range(self.num_shards + 1))

    def row_ranges(self, rank: int) -> dict[str, tuple[int, int]]:
        """``{name: (r0, r1)}``, the rows ``[r0, r1)`` of every parameter that a rank owns, in model order."""
        if not 0 <= rank < self.num_shards:
            raise ValueError(f"rank: expected 0 <= rank < {self.num_shards}, got {rank}")
        return {
            s.name: (self._rows_before(s, rank), self._rows_before(s, rank + 1)) if s.numel else (0, 0)
            for s in self.slots
        }

    def _rows_before(self, slot: Slot, rank: int) -> int:
        return min(max(rank * self.shard_size - slot.offset, 0), slot.numel) // slot.row_size

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; equal layouts give equal text."""
        slots = [{"name": s.name, "shape": list(s.shape), "offset": s.offset} for s in self.slots]
        fields = {
            "num_shards": self.num_shards,
            "shard_size": self.shard_size,
            "granularity": self.granularity,
            "rows": self.rows,
            "slots": slots,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Layout:
        """The layout ``to_json`` wrote; ValueError when the text is not a valid layout."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"layout: expected JSON, got text that fails to parse ({error})") from None
        _check_keys("layout", fields, ("granularity", "num_shards", "rows", "shard_size", "slots"))
        if not isinstance(fields["slots"], list):
            raise ValueError(f"layout slots: expected a list, got {type(fields['slots']).__name__}")
        for slot in fields["slots"]:
            _check_keys("layout slot", slot, ("name", "offset", "shape"))
            if not isinstance(slot["shape"], list):
                raise ValueError(f"shape of {slot['name']!r}: expected a list, got {slot['shape']!r}")
        slots = tuple(Slot(s["name"], tuple(s["shape"]), s["offset"]) for s in fields["slots"])
        return Layout(**{**fields, "slots": slots})

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hex: equal on two ranks exactly when they cut alike."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        return self.render()

    def render(self, width: int = 80) -> str:
        """The buffer drawn to scale in at most ``width`` columns a shard, then who owns which rows."""
        return render(self, width)


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]], num_shards: int, *, granularity: str = "row", rows: int = 1
) -> Layout:
    """Place parameters in one flat buffer of ``num_shards`` equal shards with little padding.

    When a tensor's atom divides the shard size, any number of boundaries may cross the tensor; one crossed
    only once merely needs a suitable offset. A shard size that all atoms divide always works; a search upwards
    from the ideal size then looks for a smaller one, divided by the atoms of tensors longer than two shards.

    Args:
        shapes: parameter name -> shape, in model order.
        num_shards: shards to cut the buffer into, >= 1; may exceed the number of rows.
        granularity: "row", "block" (never cut blocks of ``rows`` rows) or "tensor".
        rows: rows of a block.

    Raises:
        ValueError: a negative dimension, an unknown granularity, ``num_shards`` or ``rows`` below 1.
    """
    _check_options(num_shards, granularity, rows)
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    items = _placing_order([Slot(name, shape, 0) for name, shape in shapes.items()], granularity, rows)
    shard_size = _smallest_shard(items, num_shards)
    placed = _place(items, shard_size) if items else ()
    assert placed is not None, "the search returns only sizes that it placed"
    offsets = {item.name: offset for item, offset in zip(items, placed, strict=True)}
    slots = tuple(Slot(name, shape, offsets.get(name, 0)) for name, shape in shapes.items())
    return Layout(num_shards, shard_size, granularity, rows, slots)


class _Item(NamedTuple):
    name: str
    numel: int
    atom: int


def _placing_order(slots: Sequence[Slot], granularity: str, rows: int) -> list[_Item]:
    """Tensors with elements, coarse atoms first: what is hardest to align meets an empty buffer."""
    items = [_Item(s.name, s.numel, _atom(s.shape, granularity, rows)) for s in slots if s.numel]
    return sorted(items, key=lambda item: (-item.atom, -item.numel))


def _smallest_shard(items: Sequence[_Item], num_shards: int) -> int:
    total = sum(item.numel for item in items)
    if total == 0:
        return 0
    ideal = -(-total // num_shards)
    best = _strict_shard(items, num_shards, ideal)
    kinds = {(item.numel, item.atom) for item in items}
    size = ideal
    for _ in range(_MAX_TRIES):
        pinned = [(numel, atom) for numel, atom in kinds if numel > 2 * size]
        aligned = _round_up(size, math.lcm(*(atom for _, atom in pinned)))
        # A tensor that fits in two shards pins nothing: reaching that may take less than the next common multiple.
        freed = min((_round_up(numel, 2) // 2 for numel, atom in pinned if size % atom), default=aligned)
        size = min(aligned, freed)
        if freed < aligned:
            continue
        if size >= best:
            break
        end = _end(items, _place(items, size))
        if end is None:
            size += max(1, size // 64)
        elif end <= num_shards * size:
            return size
        else:
            size += max(1, -(-(end - num_shards * size) // num_shards))
    return best


def _strict_shard(items: Sequence[_Item], num_shards: int, ideal: int) -> int:
    grid = math.lcm(*(item.atom for item in items))
    size = _round_up(ideal, grid)
    while (end := _end(items, _place(items, size))) is None or end > num_shards * size:
        size += grid
    return size


def _place(items: Sequence[_Item], size: int) -> list[int] | None:
    """Offset of each item, one after the other; None when one fits nowhere."""
    cursor = 0
    offsets = []
    for _, numel, atom in items:
        offset = _earliest(cursor, numel, atom, size)
        if offset is None:
            return None
        offsets.append(offset)
        cursor = offset + numel
    return offsets


def _end(items: Sequence[_Item], offsets: Sequence[int] | None) -> int | None:
    return None if offsets is None else offsets[-1] + items[-1].numel


def _earliest(cursor: int, numel: int, atom: int, size: int) -> int | None:
    """A legal offset at or after the cursor for ``numel`` elements whose atoms must stay whole."""
    boundary = (cursor // size + 1) * size
    if cursor + numel <= boundary:
        return cursor
    if size % atom == 0:
        return _round_up(cursor, atom)
    shifted = cursor + (boundary - cursor) % atom  # crosses only this boundary, between two atoms
    if shifted < boundary and shifted + numel <= boundary + size:
        return shifted
    if numel <= size:
        return boundary
    shifted = boundary + size % atom  # crosses only the next boundary
    if shifted < boundary + size and shifted + numel <= boundary + 2 * size:
        return shifted
    return None


def _atom(shape: Sequence[int], granularity: str, rows: int) -> int:
    numel = math.prod(shape)
    if granularity == "tensor":
        return numel
    row_size, _ = rows_of(shape)
    return min(rows * row_size, numel) if granularity == "block" else row_size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_options(num_shards: object, granularity: object, rows: object) -> None:
    if not _is_size(num_shards) or num_shards == 0:
        raise ValueError(f"num_shards: expected an int >= 1, got {num_shards!r}")
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity: expected one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if not _is_size(rows) or rows == 0:
        raise ValueError(f"rows: expected an int >= 1, got {rows!r}")


def _check_keys(what: str, value: object, keys: tuple[str, ...]) -> None:
    found = ", ".join(sorted(map(str, value))) if isinstance(value, dict) else repr(value)[:80]
    if not isinstance(value, dict) or sorted(map(str, value)) != list(keys):
        raise ValueError(f"{what}: expected an object with keys {', '.join(keys)}, got {found}")
