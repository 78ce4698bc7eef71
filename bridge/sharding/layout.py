"""Where each parameter of a group sits in its flat buffers, and which rows each rank owns.

A parameter group is stored in one to three flat buffers, each cut into ``num_shards`` equal shards; rank k holds
shard k of every buffer, so all ranks hold equally much. Every parameter is one contiguous range of one buffer, and a
shard boundary never cuts one of its *units*: a row, a block of rows or the whole tensor. So what a rank holds of a
parameter is a range of whole rows, uneven by design and possibly empty.

``print(plan_layout({"wq": (7, 6), "wo": (6, 7), "up": (9, 6), "down": (6, 9), "norm": (6,)}, 4))``::

    4 shards x 27 + 24 elements, 198 real, 3.03 % padding
    rank 0 |ddddddddddddddddddddddddddd|cccccccccccccccccccccccc|
    rank 1 |ddddddddddddddddddddddddddd|cccccccccccccccccccccccc|
    rank 2 |eeeeeebbbbbbbbbbbbbbbbbbbbb|ccccccaaaaaaaaaaaaaaaaaa|
    rank 3 |bbbbbbbbbbbbbbbbbbbbb......|aaaaaaaaaaaaaaaaaaaaaaaa|
    a  wq (7, 6): rows 0:0 0:0 0:3 3:7
    b  wo (6, 7): rows 0:0 0:0 0:3 3:6
    c  up (9, 6): rows 0:4 4:8 8:9 9:9
    d  down (6, 9): rows 0:3 3:6 6:6 6:6
    e  norm (6,): rows 0:0 0:0 0:6 6:6

(one letter per tensor, ``.`` is padding; ``bridge.sharding.rows`` says what a row is). In memory the buffers follow
each other, whole as well as within a rank's shard::

    whole       |buffer 0: shard 0 | shard 1 | shard 2 | shard 3|buffer 1: shard 0 | shard 1 | shard 2 | shard 3|
    of rank 2                                |buffer 0 | buffer 1|

``packing`` finds the shard size and the offsets of one buffer, ``partition`` chooses the buffers; the README of this
package has the rules and proofs. All of it is deterministic pure Python without a framework, so two programs that plan
the same shapes cut alike.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from bridge.sharding.aligned_packing import pack_aligned
from bridge.sharding.drawing import render
from bridge.sharding.granularity import Granularity, blocks_of
from bridge.sharding.packing import Kind
from bridge.sharding.partition import plan_buffers, total_size
from bridge.sharding.rows import Box, row_boxes, rows_of
from bridge.sharding.slot import Slot, check_shape, is_size

__all__ = ["Box", "Granularity", "Layout", "Slot", "plan_layout", "row_boxes", "rows_of"]

Shapes = Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]]

_KEYS = ("num_shards", "shard_sizes", "slots")
_SLOT_KEYS = ("block", "buffer", "name", "offset", "shape")


@dataclass(frozen=True, repr=False)
class Layout:
    """A checked placement of parameters in flat buffers of ``num_shards`` equal shards each.

    Args:
        num_shards: ranks the buffers are cut over, >= 1.
        shard_sizes: elements of each shard, by buffer; no buffer is empty.
        slots: one per parameter, in model order.

    Raises:
        ValueError: a field is out of range, slots overlap or leave their buffer, or a boundary cuts a unit.
    """

    num_shards: int
    shard_sizes: tuple[int, ...]
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        _check_num_shards(self.num_shards)
        if not isinstance(self.slots, tuple) or not all(isinstance(slot, Slot) for slot in self.slots):
            raise ValueError(f"slots: expected a tuple of Slot, got {type(self.slots).__name__}")
        if not isinstance(self.shard_sizes, tuple) or not all(is_size(s) and s for s in self.shard_sizes):
            raise ValueError(f"shard_sizes: expected a tuple of ints >= 1, got {self.shard_sizes!r}")
        if len(self._by_name) != len(self.slots):
            twice = next(s.name for s in self.slots if self._by_name[s.name] is not s)
            raise ValueError(f"tensor names: expected each once, got {twice!r} more than once")
        held: list[list[Slot]] = [[] for _ in self.shard_sizes]
        for slot in self.slots:
            if slot.numel:
                if slot.buffer >= len(held):
                    raise ValueError(
                        f"buffer of {slot.name!r}: expected one of {len(held)}, got {slot.buffer}"
                    )
                held[slot.buffer].append(slot)
        for buffer, (size, slots) in enumerate(zip(self.shard_sizes, held, strict=True)):
            if not slots:
                raise ValueError(f"buffer {buffer}: expected parameters in it, got none")
            self._check_bounds(buffer, size, slots)
            for slot in slots:
                slot.check_cuts(size)

    def _check_bounds(self, buffer: int, size: int, slots: list[Slot]) -> None:
        end, before = 0, ""
        for slot in sorted(slots, key=lambda s: s.offset):
            if slot.offset < end:
                raise ValueError(
                    f"offset of {slot.name!r}: expected at least {end}, the end of {before!r}, "
                    f"got {slot.offset}"
                )
            end, before = slot.offset + slot.numel, slot.name
        if end > self.num_shards * size:
            raise ValueError(
                f"{before!r}: expected to end within the {self.num_shards * size} elements of buffer {buffer} "
                f"({self.num_shards} shards of {size}), got end {end}"
            )

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where each buffer starts in a rank's shard."""
        return (0, *accumulate(self.shard_sizes))

    @property
    def shard_size(self) -> int:
        """Elements that a rank holds: a shard of every buffer, padding included."""
        return self._starts[-1]

    @property
    def padded_size(self) -> int:
        """Elements of all buffers, padding included."""
        return self.num_shards * self.shard_size

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def overhead(self) -> float:
        """Padding as a fraction of the real elements; 0.0 without elements."""
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

    def start(self, name: str) -> int:
        """The parameter's first element when all buffers lie whole, one after the other."""
        slot = self.slot(name)
        return self.num_shards * self._starts[slot.buffer] + slot.offset

    def shard_start(self, name: str, rank: int) -> int:
        """The first element, in the shard of ``rank``, of the rows that it owns; meaningless when it owns none."""
        slot = self.slot(name)
        if not slot.numel:
            return 0
        first = max(slot.offset - rank * self.shard_sizes[slot.buffer], 0)
        return self._starts[slot.buffer] + first

    @property
    def shard_slices(self) -> tuple[slice, ...]:
        """For each buffer, its part of what a rank holds."""
        return tuple(slice(a, b) for a, b in zip(self._starts, self._starts[1:], strict=False))

    def merged(self, count: int) -> Layout:
        """The same buffers in ``num_shards / count`` shards: every ``count`` consecutive ones become one."""
        if count == 1:
            return self
        if count < 1 or self.num_shards % count:
            raise ValueError(f"count: expected a divisor of the {self.num_shards} shards, got {count}")
        sizes = tuple(size * count for size in self.shard_sizes)
        return Layout(self.num_shards // count, sizes, self.slots)

    def row_bounds(self, name: str) -> tuple[int, ...]:
        """``num_shards + 1`` row indices ``b``: rank k owns rows ``[b[k], b[k+1])`` of the parameter."""
        slot = self.slot(name)
        return tuple(self._rows_before(slot, rank) for rank in range(self.num_shards + 1))

    def row_range(self, name: str, rank: int) -> tuple[int, int]:
        """``(r0, r1)``: the rank owns rows ``[r0, r1)`` of the parameter."""
        slot = self.slot(name)
        return self._rows_before(slot, rank), self._rows_before(slot, rank + 1)

    def row_ranges(self, rank: int) -> dict[str, tuple[int, int]]:
        """``{name: (r0, r1)}``, the rows ``[r0, r1)`` of every parameter that a rank owns, in model order."""
        if not 0 <= rank < self.num_shards:
            raise ValueError(f"rank: expected 0 <= rank < {self.num_shards}, got {rank}")
        return {s.name: (self._rows_before(s, rank), self._rows_before(s, rank + 1)) for s in self.slots}

    def _rows_before(self, slot: Slot, rank: int) -> int:
        if not slot.numel:
            return 0
        before = rank * self.shard_sizes[slot.buffer] - slot.offset
        return min(max(before, 0), slot.numel) // slot.row_size

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; equal layouts give equal text."""
        slots = [
            {"block": s.block, "buffer": s.buffer, "name": s.name, "offset": s.offset, "shape": s.shape}
            for s in self.slots
        ]
        fields = {"num_shards": self.num_shards, "shard_sizes": self.shard_sizes, "slots": slots}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Layout:
        """The layout ``to_json`` wrote; ValueError when the text is not a valid layout."""
        try:
            fields = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"layout: expected JSON, got text that fails to parse ({error})") from None
        _check_keys("layout", fields, _KEYS)
        for key in ("shard_sizes", "slots"):
            if not isinstance(fields[key], list):
                raise ValueError(f"layout {key}: expected a list, got {type(fields[key]).__name__}")
        for slot in fields["slots"]:
            _check_keys("layout slot", slot, _SLOT_KEYS)
            if not isinstance(slot["shape"], list):
                raise ValueError(f"shape of {slot['name']!r}: expected a list, got {slot['shape']!r}")
        slots = tuple(Slot(**{**slot, "shape": tuple(slot["shape"])}) for slot in fields["slots"])
        return Layout(fields["num_shards"], tuple(fields["shard_sizes"]), slots)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hex: equal on two ranks exactly when they cut alike."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __repr__(self) -> str:
        return self.render()

    def render(self, width: int = 80) -> str:
        """The buffers drawn to scale in about ``width`` columns a rank, then who owns which rows."""
        return render(self, width)


def plan_layout(
    shapes: Shapes, num_shards: int, *, granularity: Granularity = "row", rows: int = 1, max_buffers: int = 3
) -> Layout:
    """Place parameters in at most ``max_buffers`` flat buffers of ``num_shards`` equal shards, with little padding.

    Args:
        shapes: parameter name -> shape, or pairs of them, in model order.
        num_shards: shards to cut each buffer into, >= 1; may exceed the number of rows.
        granularity: what no boundary cuts: "row", "block" (of ``rows`` rows), "block(n)" or "tensor"; or which of
            these for which parameter, "row" for those left out.
        rows: rows of a "block".
        max_buffers: >= 1; fewer buffers pad more. All of a group's travel in one collective anyway.

    Raises:
        ValueError: a negative dimension, a name twice, an unknown granularity or parameter, ``num_shards``, ``rows``
            or ``max_buffers`` below 1.
    """
    _check_num_shards(num_shards)
    if not is_size(max_buffers) or max_buffers == 0:
        raise ValueError(f"max_buffers: expected an int >= 1, got {max_buffers!r}")
    named = _named(shapes)
    block_of = blocks_of([name for name, _ in named], granularity, rows)
    tensors: list[Kind] = []
    coarse: list[Kind] = []
    # There may be a hundred thousand tensors, of few shapes.
    known: dict[tuple[tuple[int, ...], int | None], tuple[int, Kind, Kind]] = {}
    blocks = []
    for name, shape in named:
        key = shape, block_of(name)
        if key not in known:
            known[key] = _units(*key)
        block, tensor, slices = known[key]
        blocks.append(block)
        if tensor.numel:
            tensors.append(tensor)
            coarse.append(slices)
    sizes, places = _places(tensors, coarse, num_shards, max_buffers) if tensors else ((), [])
    found = iter(places)
    slots = [
        Slot(name, shape, block, *(next(found) if math.prod(shape) else (0, 0)))
        for (name, shape), block in zip(named, blocks, strict=True)
    ]
    return Layout(num_shards, sizes, tuple(slots))


def _places(
    tensors: Sequence[Kind], coarse: Sequence[Kind], num_shards: int, max_buffers: int
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Shard sizes, and ``(buffer, offset)`` of each tensor."""
    members: dict[Kind, list[int]] = {}
    for i, tensor in enumerate(tensors):
        members.setdefault(tensor, []).append(i)
    kinds = sorted(members, key=lambda kind: (-kind.unit, -kind.numel))
    packings = plan_buffers(kinds, [len(members[kind]) for kind in kinds], num_shards, max_buffers)
    size = total_size(packings)
    best = None
    for candidate in [tensors] if coarse == tensors else [tensors, coarse]:
        aligned = pack_aligned(candidate, num_shards, size)
        if aligned is not None:
            best, size = aligned, aligned[0]
    if best is not None:
        return (best[0],), [(0, offset) for offset in best[1]]
    waiting = {kind: iter(indices) for kind, indices in members.items()}
    places = [(0, 0)] * len(tensors)
    for buffer, packing in enumerate(packings):
        for run in packing.runs:
            kind = kinds[run.kind]
            for i in range(run.many):
                places[next(waiting[kind])] = buffer, run.offset + i * kind.numel
    return tuple(packing.shard_size for packing in packings), places


def _named(shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, each checked; a list as shape will do."""
    if not isinstance(shapes, Iterable):
        raise ValueError(f"shapes: expected a mapping or pairs of a name and a shape, got {shapes!r}")
    named: list[tuple[str, tuple[int, ...]]] = []
    pairs: Iterable[Any] = shapes.items() if isinstance(shapes, Mapping) else shapes
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"shapes: expected pairs of a name and a shape, got {pair!r}")
        name, shape = pair
        shape = tuple(shape) if isinstance(shape, tuple | list) else shape
        check_shape(name, shape)
        named.append((name, shape))
    return named


def _units(shape: tuple[int, ...], block: int | None) -> tuple[int, Kind, Kind]:
    """The block, at most all rows; the tensor in such blocks; and in blocks of slices of dimension 0.

    Planners that know no rows inside a slice see stacks of three dimensions and more in the latter way.
    """
    row_size, num_rows = rows_of(shape)
    block = max(1, num_rows if block is None else min(block, num_rows))
    tensor = Kind(row_size * num_rows, block * row_size)
    if len(shape) <= 2 or not num_rows:
        return block, tensor, tensor
    return block, tensor, Kind(tensor.numel, min(block * (tensor.numel // shape[0]), tensor.numel))


def _check_num_shards(num_shards: object) -> None:
    if not is_size(num_shards) or num_shards == 0:
        raise ValueError(f"num_shards: expected an int >= 1, got {num_shards!r}")


def _check_keys(what: str, value: object, keys: tuple[str, ...]) -> None:
    found = ", ".join(sorted(map(str, value))) if isinstance(value, dict) else repr(value)[:80]
    if not isinstance(value, dict) or sorted(map(str, value)) != list(keys):
        raise ValueError(f"{what}: expected an object with keys {', '.join(keys)}, got {found}")
