"""Where each parameter of a unit lives in the unit's flat buffer.

One flat buffer is cut into ``num_shards`` equal shards of ``shard_size`` elements. Tensors lie contiguously; a shard
boundary may pass through a tensor, but only between two of its *atoms* (a row, a block of rows, or the whole tensor).
Which rank owns which rows follows from the offsets alone, and is uneven by design::

    plan_layout({"w": (5, 4), "b": (3,)}, num_shards=3)          S = 8, total 24

    element   0       4       8       12      16      20  23
              |-------|-------|-------|-------|-------|b|b|b|.|
    w row         0       1       2       3       4
    shard     |------- 0 ----|------- 1 ------|------ 2 ------|

    rank 0 owns w[0:2], rank 1 owns w[2:4], rank 2 owns w[4:5] and b[0:3]; one element is padding.

Pure Python: no array library is imported here, so a layout can be planned, compared and stored anywhere.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

GRANULARITIES = ("row", "block", "tensor")

_SEARCH_STEPS = 64


class Box(NamedTuple):
    """A rectangular region of a parameter, in the parameter's own global coordinates."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements ``[offset, offset + numel)`` of the flat buffer, C order.

    ``row_size`` elements make a row: 1 for vectors and scalars, ``shape[1]`` for matrices, ``shape[-1]`` for stacks.
    A parameter without elements has ``row_size == num_rows == offset == 0``.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"parameter {self.name!r}: expected dimensions >= 0, got shape {self.shape}")
        if self.offset < 0:
            raise ValueError(f"parameter {self.name!r}: expected an offset >= 0, got {self.offset}")
        if self.numel == 0 and self.offset:
            raise ValueError(f"parameter {self.name!r} has no elements: expected offset 0, got {self.offset}")

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def row_size(self) -> int:
        if self.numel == 0:
            return 0
        return 1 if len(self.shape) < 2 else self.shape[-1]

    @cached_property
    def num_rows(self) -> int:
        return self.numel // self.row_size if self.numel else 0

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def atom(self, granularity: str, rows: int) -> int:
        """Elements that no shard boundary may separate; 0 for a parameter without elements."""
        if granularity == "tensor":
            return self.numel
        return min(rows * self.row_size, self.numel) if granularity == "block" else self.row_size


@dataclass(frozen=True)
class Layout:
    """The plan of one flat buffer; ``slots`` are in model order, which need not be the order of their offsets.

    Raises ``ValueError`` at construction when slots overlap, leave the buffer, or are cut inside an atom.
    """

    num_shards: int
    shard_size: int
    granularity: str
    rows: int
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        _check_request(self.num_shards, self.granularity, self.rows)
        if self.shard_size < 0:
            raise ValueError(f"layout: expected shard_size >= 0, got {self.shard_size}")
        if len(self._by_name) != len(self.slots):
            names = [slot.name for slot in self.slots]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"layout: expected each parameter once, got {twice!r} more than once")
        for slot, following in itertools.pairwise(self._by_offset):
            if slot.end > following.offset:
                raise ValueError(
                    f"layout: expected parameter {following.name!r} at element {slot.end} or later (after "
                    f"{slot.name!r}), got offset {following.offset}"
                )
        if self._by_offset and self._by_offset[-1].end > self.padded_size:
            last = self._by_offset[-1]
            raise ValueError(
                f"layout: expected parameter {last.name!r} to end within {self.num_shards} x {self.shard_size} "
                f"elements, got end {last.end}"
            )
        starts = [slot.offset for slot in self._by_offset]
        for rank in range(1, self.num_shards if starts else 1):
            boundary = rank * self.shard_size
            slot = self._by_offset[bisect.bisect_right(starts, boundary) - 1]
            cut = boundary - slot.offset
            if 0 < cut < slot.numel and cut % slot.atom(self.granularity, self.rows):
                raise ValueError(
                    f"layout: expected shard boundaries between {self.granularity}s of parameter {slot.name!r} "
                    f"(every {slot.atom(self.granularity, self.rows)} elements), got one after {cut} elements"
                )

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def _by_offset(self) -> tuple[Slot, ...]:
        return tuple(sorted((slot for slot in self.slots if slot.numel), key=lambda slot: slot.offset))

    @property
    def padded_size(self) -> int:
        """Elements of the whole flat buffer."""
        return self.num_shards * self.shard_size

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def slot(self, name: str) -> Slot:
        """Raises ``ValueError`` when the layout has no such parameter."""
        if name not in self._by_name:
            raise ValueError(f"layout: expected one of its parameters {list(self._by_name)}, got {name!r}")
        return self._by_name[name]

    def occupied(self) -> tuple[Slot, ...]:
        """Slots that hold elements, by offset."""
        return self._by_offset

    def row_bounds(self, name: str) -> tuple[int, ...]:
        """``num_shards + 1`` row indices; rank k owns rows ``[bounds[k], bounds[k + 1])`` of the parameter."""
        slot = self.slot(name)
        return tuple(self._first_row(slot, rank) for rank in range(self.num_shards + 1))

    def row_ranges(self, rank: int) -> dict[str, tuple[int, int]]:
        """Rows ``[r0, r1)`` of every parameter that ``rank`` owns, empty ranges included."""
        if not 0 <= rank < self.num_shards:
            raise ValueError(f"layout: expected a rank from 0 to {self.num_shards - 1}, got {rank}")
        return {s.name: (self._first_row(s, rank), self._first_row(s, rank + 1)) for s in self.slots}

    def _first_row(self, slot: Slot, rank: int) -> int:
        if not slot.numel:
            return 0
        return min(max(rank * self.shard_size - slot.offset, 0), slot.numel) // slot.row_size

    def overhead(self) -> float:
        """Padding as a fraction of the parameters' elements."""
        return self.padded_size / self.numel - 1 if self.numel else 0.0

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal text."""
        value = {
            "num_shards": self.num_shards,
            "shard_size": self.shard_size,
            "granularity": self.granularity,
            "rows": self.rows,
            "slots": [{"name": s.name, "shape": list(s.shape), "offset": s.offset} for s in self.slots],
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Raises ``ValueError`` when the text is no JSON, lacks a field, or describes an illegal layout."""
        value = json.loads(text)
        fields = {"num_shards", "shard_size", "granularity", "rows", "slots"}
        if not isinstance(value, dict) or set(value) != fields:
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"layout JSON: expected an object with {sorted(fields)}, got {found}")
        for field in ("num_shards", "shard_size", "rows"):
            _expect_int(f"layout JSON: {field}", value[field])
        return cls(
            num_shards=value["num_shards"],
            shard_size=value["shard_size"],
            granularity=value["granularity"],
            rows=value["rows"],
            slots=tuple(
                _slot_from_json(entry) for entry in _expect_list("layout JSON: slots", value["slots"])
            ),
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        lines = [
            f"{self.num_shards} shards x {self.shard_size} elements, granularity {self.granularity}, "
            f"padding {100 * self.overhead():.2f} %"
        ]
        width = max((len(slot.name) for slot in self.slots), default=0)
        for slot in self.slots:
            bounds = self.row_bounds(slot.name)
            owners = ", ".join(
                f"{rank}: {r0}-{r1}" for rank, (r0, r1) in enumerate(itertools.pairwise(bounds)) if r0 < r1
            )
            lines.append(
                f"  {slot.name:<{width}}  {slot.shape!s:<16} at {slot.offset:>10}  rows {owners or '-'}"
            )
        return "\n".join(lines)


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]], num_shards: int, *, granularity: str = "row", rows: int = 1
) -> Layout:
    """Plan the flat buffer of parameters ``{name: shape}`` over ``num_shards`` equal shards.

    ``granularity`` says what no shard boundary may cut: ``"row"``, ``"block"`` (of ``rows`` rows) or ``"tensor"``.
    Deterministic in the arguments and the order of ``shapes``. Raises ``ValueError`` for a negative dimension, an
    unknown granularity, ``num_shards < 1`` or ``rows < 1``.

    The search starts at the ideal shard size (no padding), grows it until everything fits, and falls back to a
    multiple of the least common multiple of all atoms, which always fits. The smallest legal padding is not
    guaranteed; never more than that multiple's is.
    """
    _check_request(num_shards, granularity, rows)
    slots = [Slot(name, tuple(shape), 0) for name, shape in shapes.items()]
    atoms = [slot.atom(granularity, rows) for slot in slots]
    order = sorted((i for i, s in enumerate(slots) if s.numel), key=lambda i: (-atoms[i], -slots[i].numel, i))
    items = [(slots[i].numel, atoms[i]) for i in order]
    shard_size = _shard_size(items, num_shards)
    offsets = dict(zip(order, _place(items, shard_size) or (), strict=True))
    placed = tuple(Slot(slot.name, slot.shape, offsets.get(i, 0)) for i, slot in enumerate(slots))
    return Layout(num_shards, shard_size, granularity, rows, placed)


def _shard_size(items: list[tuple[int, int]], num_shards: int) -> int:
    total = sum(size for size, _ in items)
    if total == 0:
        return 0
    ideal = -(-total // num_shards)
    step = math.lcm(*{atom for _, atom in items})
    best = _round_up(ideal, step)
    while not _fits(items, _place(items, best), num_shards * best):
        best += step
    size = ideal
    for _ in range(_SEARCH_STEPS):
        # A tensor longer than two shards has whole shards inside it, so its atoms must divide the shard.
        pinning = {(n, atom) for n, atom in items if n > 2 * size}
        divided = _round_up(size, math.lcm(*(atom for _, atom in pinning)))
        # Growing to half of a tensor that does not divide yet releases it; that may come sooner.
        released = min((-(-n // 2) for n, atom in pinning if size % atom), default=divided)
        if released < divided:
            size = released
            continue
        size = divided
        if size >= best:
            break
        offsets = _place(items, size)
        if _fits(items, offsets, num_shards * size):
            return size
        if offsets is None:
            size += max(1, size // 64)
        else:
            size += max(1, -(-(_end(items, offsets) - num_shards * size) // num_shards))
    return best


def _place(items: list[tuple[int, int]], shard_size: int) -> list[int] | None:
    """Offsets of ``(size, atom)`` items laid out one after another, or ``None`` when one cannot be placed."""
    offsets, cursor = [], 0
    for size, atom in items:
        offset = _earliest(cursor, size, atom, shard_size)
        if offset is None:
            return None
        offsets.append(offset)
        cursor = offset + size
    return offsets


def _earliest(cursor: int, size: int, atom: int, shard_size: int) -> int | None:
    """The first offset at or after ``cursor`` where no shard boundary cuts an atom of the item."""
    boundary = (cursor // shard_size + 1) * shard_size
    if cursor + size <= boundary:
        return cursor
    if shard_size % atom == 0:
        return _round_up(cursor, atom)
    crossing = cursor + (boundary - cursor) % atom
    if crossing < boundary and crossing + size <= boundary + shard_size:
        return crossing
    if size <= shard_size:
        return boundary
    crossing = boundary + shard_size % atom
    if crossing < boundary + shard_size and crossing + size <= boundary + 2 * shard_size:
        return crossing
    return None


def _end(items: list[tuple[int, int]], offsets: list[int]) -> int:
    return offsets[-1] + items[-1][0]


def _fits(items: list[tuple[int, int]], offsets: list[int] | None, capacity: int) -> bool:
    return offsets is not None and _end(items, offsets) <= capacity


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def row_boxes(shape: tuple[int, ...], r0: int, r1: int) -> tuple[Box, ...]:
    """Rows ``[r0, r1)`` of a parameter as boxes in its global coordinates, in row order; empty when ``r0 == r1``.

    For stacks (ndim >= 3) a range of rows may start and end inside a slice and then needs several boxes.
    Raises ``ValueError`` when the range leaves the parameter.
    """
    slot = Slot("", tuple(shape), 0)
    if not 0 <= r0 <= r1 <= slot.num_rows:
        raise ValueError(f"expected rows within [0, {slot.num_rows}) of shape {shape}, got [{r0}, {r1})")
    if r0 == r1:
        return ()
    if not shape:
        return (Box((), ()),)
    lead = shape[:-1] if len(shape) > 1 else shape
    tail = shape[len(lead) :]
    zeros = (0,) * len(tail)
    return tuple(Box(o + zeros, s + tail) for o, s in _lead_boxes(lead, r0, r1))


def _lead_boxes(lead: tuple[int, ...], r0: int, r1: int) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the C-order index range ``[r0, r1)`` of an array of shape ``lead`` into head, middle and tail boxes."""
    inner = math.prod(lead[1:])
    if len(lead) == 1:
        yield (r0,), (r1 - r0,)
        return
    first, last = -(-r0 // inner), r1 // inner
    if first > last:
        index = r0 // inner
        for offsets, sizes in _lead_boxes(lead[1:], r0 - index * inner, r1 - index * inner):
            yield (index, *offsets), (1, *sizes)
        return
    if r0 < first * inner:
        for offsets, sizes in _lead_boxes(lead[1:], r0 - (first - 1) * inner, inner):
            yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in lead[1:])), (last - first, *lead[1:])
    if last * inner < r1:
        for offsets, sizes in _lead_boxes(lead[1:], 0, r1 - last * inner):
            yield (last, *offsets), (1, *sizes)


def _check_request(num_shards: int, granularity: str, rows: int) -> None:
    if num_shards < 1:
        raise ValueError(f"layout: expected num_shards >= 1, got {num_shards}")
    if granularity not in GRANULARITIES:
        raise ValueError(f"layout: expected a granularity among {list(GRANULARITIES)}, got {granularity!r}")
    if rows < 1:
        raise ValueError(f"layout: expected rows >= 1, got {rows}")


def _slot_from_json(entry: Any) -> Slot:
    if not isinstance(entry, dict) or set(entry) != {"name", "shape", "offset"}:
        raise ValueError(f"layout JSON: expected slots with name, shape and offset, got {entry!r}")
    if not isinstance(entry["name"], str) or not isinstance(entry["shape"], list):
        raise ValueError(f"layout JSON: expected a text name and a list as shape, got {entry!r}")
    for size in (*entry["shape"], entry["offset"]):
        _expect_int(f"layout JSON: slot {entry['name']!r}", size)
    return Slot(entry["name"], tuple(entry["shape"]), entry["offset"])


def _expect_list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what}: expected a list, got {value!r}")
    return value


def _expect_int(what: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{what}: expected an integer, got {value!r}")
