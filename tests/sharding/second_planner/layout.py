"""Where each parameter of a unit lives in the unit's flat buffers.

A unit has one to three flat buffers, each cut into ``num_shards`` equal shards; a rank holds one shard of each. Tensors
lie contiguously in one buffer; a shard boundary may pass through a tensor, but only between two of its *blocks* (a row,
several rows, or the whole tensor). Which rank owns which rows follows from the offsets alone, and is uneven by design::

    plan_layout({"w": (5, 4), "b": (3,)}, num_shards=3)          one buffer, S = 8, total 24

    element   0       4       8       12      16      20  23
              |-------|-------|-------|-------|-------|b|b|b|.|
    w row         0       1       2       3       4
    shard     |------- 0 ----|------- 1 ------|------ 2 ------|

    rank 0 owns w[0:2], rank 1 owns w[2:4], rank 2 owns w[4:5] and b[0:3]; one element is padding.

How the places are found is specified in ``bridge/core/sharding/rules.md``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tests.sharding.second_planner.boxes import Box, row_boxes, rows_of
from tests.sharding.second_planner.granularity import (
    Granularity,
    Shape,
    blocks_by_name,
    checked_count,
    checked_shapes,
)
from tests.sharding.second_planner.places import plan_places
from tests.sharding.second_planner.slot import Slot

__all__ = ["Box", "Layout", "Slot", "plan_layout", "row_boxes"]


@dataclass(frozen=True, repr=False)
class Layout:
    """The plan of one unit; ``slots`` are in model order, which need not be the order of their offsets.

    ``shard_sizes``: elements of one shard of each buffer. A rank's shard is its shards of all buffers, in this order.
    Each is a multiple of ``align``.
    Raises ``ValueError`` at construction when slots overlap, leave their buffer, or are cut inside a block.
    """

    num_shards: int
    shard_sizes: tuple[int, ...]
    slots: tuple[Slot, ...]
    align: int = 1

    def __post_init__(self) -> None:
        checked_count("num_shards", self.num_shards)
        checked_count("align", self.align)
        for field, value in (("shard_sizes", self.shard_sizes), ("slots", self.slots)):
            if not isinstance(value, tuple):
                raise ValueError(f"layout: expected {field} as a tuple, got {value!r:.80}")
        for buffer, size in enumerate(self.shard_sizes):
            if checked_count(f"the shard size of buffer {buffer}", size) % self.align:
                raise ValueError(
                    f"layout: expected shards of buffer {buffer} of a multiple of {self.align}, got {size}"
                )
        if len(self._by_name) != len(self.slots):
            names = Counter(slot.name for slot in self.slots)
            twice = next(name for name, times in names.items() if times > 1)
            raise ValueError(f"layout: expected each parameter once, got {twice!r} more than once")
        for slot in self.slots:
            if slot.numel:
                self._check_slot(slot)
        for buffer, inside in enumerate(self._by_buffer):
            if not inside:
                raise ValueError(f"layout: expected parameters in buffer {buffer}, got none")
            for slot, following in itertools.pairwise(inside):
                if slot.end > following.offset:
                    raise ValueError(
                        f"layout: expected parameter {following.name!r} at element {slot.end} or later (after "
                        f"{slot.name!r}), got offset {following.offset}"
                    )

    def _check_slot(self, slot: Slot) -> None:
        if slot.buffer >= len(self.shard_sizes):
            raise ValueError(
                f"layout: expected parameter {slot.name!r} in one of {len(self.shard_sizes)} buffers, got buffer "
                f"{slot.buffer}"
            )
        size = self.shard_sizes[slot.buffer]
        if slot.end > self.num_shards * size:
            raise ValueError(
                f"layout: expected parameter {slot.name!r} to end within {self.num_shards} x {size} elements, got end "
                f"{slot.end}"
            )
        first = size - slot.offset % size
        # Later boundaries are one shard further each: when two are between blocks, all are.
        for cut in (first, first + size):
            if cut < slot.numel and cut % slot.unit:
                raise ValueError(
                    f"layout: expected shard boundaries between blocks of parameter {slot.name!r} (every {slot.unit} "
                    f"elements), got one after {cut} elements"
                )

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def _by_buffer(self) -> tuple[tuple[Slot, ...], ...]:
        inside: list[list[Slot]] = [[] for _ in self.shard_sizes]
        for slot in self.slots:
            if slot.numel:
                inside[slot.buffer].append(slot)
        return tuple(tuple(sorted(slots, key=lambda slot: slot.offset)) for slots in inside)

    @cached_property
    def shard_size(self) -> int:
        """Elements that a rank holds."""
        return sum(self.shard_sizes)

    @property
    def padded_size(self) -> int:
        """Elements of all buffers."""
        return self.num_shards * self.shard_size

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def slot(self, name: str) -> Slot:
        """Raises ``ValueError`` when the layout has no such parameter."""
        if name not in self._by_name:
            raise ValueError(
                f"layout: expected one of its {len(self.slots)} parameters "
                f"{list(itertools.islice(self._by_name, 10))}, got {name!r}"
            )
        return self._by_name[name]

    def columns(self, buffer: int) -> slice:
        """Where the buffer's shard lies in a rank's shard."""
        start = sum(self.shard_sizes[:buffer])
        return slice(start, start + self.shard_sizes[buffer])

    def start_in_shard(self, slot: Slot, rank: int, row: int) -> int:
        """Where a row that ``rank`` owns starts in its shard."""
        if not slot.numel:
            return 0
        shard = self.columns(slot.buffer)
        return shard.start + slot.offset + row * slot.row_size - rank * self.shard_sizes[slot.buffer]

    def row_bounds(self, name: str) -> tuple[int, ...]:
        """``num_shards + 1`` row indices; rank k owns rows ``[bounds[k], bounds[k + 1])`` of the parameter."""
        slot = self.slot(name)
        return tuple(self.first_row(slot, rank) for rank in range(self.num_shards + 1))

    def row_ranges(self, rank: int) -> dict[str, tuple[int, int]]:
        """Rows ``[r0, r1)`` of every parameter that ``rank`` owns, empty ranges included."""
        if not 0 <= rank < self.num_shards:
            raise ValueError(f"layout: expected a rank from 0 to {self.num_shards - 1}, got {rank}")
        return {s.name: (self.first_row(s, rank), self.first_row(s, rank + 1)) for s in self.slots}

    def first_row(self, slot: Slot, rank: int) -> int:
        """The parameter's first row that lies on ``rank`` or after it."""
        if not slot.numel:
            return 0
        before = rank * self.shard_sizes[slot.buffer] - slot.offset
        return min(max(before, 0), slot.numel) // slot.row_size

    def overhead(self) -> float:
        """Padding as a fraction of the parameters' elements."""
        return self.padded_size / self.numel - 1 if self.numel else 0.0

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal text."""
        slots = [
            {"block": s.block, "buffer": s.buffer, "name": s.name, "offset": s.offset, "shape": s.shape}
            for s in self.slots
        ]
        value = {"num_shards": self.num_shards, "shard_sizes": self.shard_sizes, "slots": slots}
        if self.align != 1:
            value["align"] = self.align
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Raises ``ValueError`` when the text is no JSON, lacks a field, or describes an illegal layout."""
        try:
            parsed = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"layout JSON: expected a JSON text, got one that does not parse ({error})"
            ) from None
        aligned = {"align"} if isinstance(parsed, dict) and parsed.get("align", 1) != 1 else set()
        value = _fields("layout JSON", parsed, {"num_shards", "shard_sizes", "slots"} | aligned)
        slots = []
        for entry in _list("layout JSON: slots", value["slots"]):
            fields = _fields("layout JSON: slot", entry, {"block", "buffer", "name", "offset", "shape"})
            slots.append(Slot(**{**fields, "shape": tuple(_list("layout JSON: shape", fields["shape"]))}))
        sizes = _list("layout JSON: shard_sizes", value["shard_sizes"])
        return cls(value["num_shards"], tuple(sizes), tuple(slots), value.get("align", 1))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def plan_layout(
    shapes: Mapping[str, Shape] | Iterable[tuple[str, Shape]],
    num_shards: int,
    *,
    granularity: Granularity = "row",
    rows: int = 1,
    max_buffers: int = 3,
    align: int | Literal["auto"] = "auto",
) -> Layout:
    """Plan the flat buffers of parameters ``{name: shape}`` over ``num_shards`` ranks.

    ``granularity`` says what no shard boundary may cut: ``"row"``, ``"block"`` (of ``rows`` rows), ``"block(n)"`` (of n
    rows) or ``"tensor"``; or a mapping of parameter names to these, in which names left out have rows.
    Shards are multiples of ``align`` elements; so are starts and cuts of tensors, where that costs next to nothing.
    Deterministic in the arguments and the order of ``shapes``. Raises ``ValueError`` for shapes or numbers that are
    none, a parameter given twice, an unknown granularity and a granularity for an unknown parameter.
    """
    checked_count("num_shards", num_shards)
    checked_count("rows", rows)
    checked_count("max_buffers", max_buffers)
    if align != "auto":
        checked_count("align", align)
    by_name = checked_shapes(shapes)
    asked = blocks_by_name(granularity, rows, by_name)
    blocks = {}
    for name, shape in by_name.items():
        num_rows, block = rows_of(shape)[1], asked[name]
        if block is None or num_rows == 0:
            block = max(num_rows, 1)
        elif num_rows > (rows := shape[-2] if len(shape) > 2 else num_rows):
            # A stack of matrices, in each of which blocks start anew.
            block = rows if rows % block else block
        blocks[name] = max(1, min(block, num_rows))
    filled = [name for name, shape in by_name.items() if 0 not in shape]
    tile, (sizes, places) = plan_places(
        [by_name[name] for name in filled], [blocks[name] for name in filled], num_shards, max_buffers, align
    )
    placed = dict(zip(filled, places, strict=True))
    slots = (Slot(name, shape, blocks[name], *placed.get(name, (0, 0))) for name, shape in by_name.items())
    return Layout(num_shards, sizes, tuple(slots), tile)


def _fields(what: str, value: Any, expected: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != expected:
        actual = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{what}: expected an object with {sorted(expected)}, got {actual}")
    return value


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what}: expected a list, got {value!r}")
    return value
