"""Where each parameter of a group is in its flat buffers, and which rows each rank owns.

A parameter group is stored in one to three flat buffers, each cut into ``num_shards`` equal shards; rank k holds shard
k of every buffer, so all ranks hold the same number of elements. Every parameter is one contiguous range of one buffer,
and a shard boundary never cuts one of its *blocks*: a row, several rows or the whole tensor. So each rank's part of a
parameter is a range of whole rows; parts are uneven by design, and may be empty.

``print(plan_layout({"wq": (7, 6), "wo": (6, 7), "up": (9, 6), "down": (6, 9), "norm": (6,)}, 4, align=1))``::

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

(one letter per tensor, ``.`` is padding; ``bridge.core.sharding.layout.rows`` says what a row is). In memory the
buffers are consecutive, both as a whole and within a rank's shard::

    whole       |buffer 0: shard 0 | shard 1 | shard 2 | shard 3|buffer 1: shard 0 | shard 1 | shard 2 | shard 3|
    of rank 2                                |buffer 0 | buffer 1|

``planner`` finds the places; ``docs/explanation/layouts.md`` states its guarantees.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bridge.core.sharding.layout import drawing
from bridge.core.sharding.layout.slot import Part, Slot, is_size
from bridge.core.views import Viewed

SLOT_FIELDS = ("block", "buffer", "name", "offset", "shape")
_FIELDS = ("num_shards", "shard_sizes", "slots")
_ALIGNED_FIELDS = ("align", *_FIELDS)
_MOST = 2**63 - 1


@dataclass(frozen=True, repr=False)
class Layout(Viewed):
    """A checked placement of parameters in flat buffers of ``num_shards`` equal shards each.

    Args:
        num_shards: ranks the buffers are cut over, >= 1.
        shard_sizes: elements of each shard, by buffer; no buffer is empty.
        slots: one per parameter, in model order.
        align: every shard size is a multiple of this number of elements, >= 1.

    Raises:
        ValueError: a field is out of range, slots overlap or leave their buffer, or a boundary cuts a block.
    """

    num_shards: int
    shard_sizes: tuple[int, ...]
    slots: tuple[Slot, ...]
    align: int = 1

    def __post_init__(self) -> None:
        check_count("num_shards", self.num_shards)
        if not isinstance(self.slots, tuple) or not all(isinstance(slot, Slot) for slot in self.slots):
            raise ValueError(f"slots: expected a tuple of Slot, got {type(self.slots).__name__}")
        if not isinstance(self.shard_sizes, tuple) or not all(is_size(s) and s for s in self.shard_sizes):
            raise ValueError(f"shard_sizes: expected a tuple of ints >= 1, got {self.shard_sizes!r}")
        check_count("align", self.align)
        for buffer, size in enumerate(self.shard_sizes):
            if size % self.align:
                raise ValueError(
                    f"shard size of buffer {buffer}: expected a multiple of align, {self.align}, got {size}"
                )
        if len(self._by_name) != len(self.slots):
            twice = next(s.name for s in self.slots if self._by_name[s.name] is not s)
            raise ValueError(f"tensor names: expected each once, got {twice!r} more than once")
        for slot in self.slots:
            if slot.numel and slot.buffer >= len(self.shard_sizes):
                raise ValueError(
                    f"buffer of {slot.name!r}: expected one of {len(self.shard_sizes)}, got {slot.buffer}"
                )
        for buffer, size in enumerate(self.shard_sizes):
            if not self._order[buffer]:
                raise ValueError(f"buffer {buffer}: expected parameters in it, got none")
            self._check_buffer(buffer, size)

    def _check_buffer(self, buffer: int, size: int) -> None:
        end, before = 0, ""
        for slot in self.occupied(buffer):
            if slot.offset < end:
                raise ValueError(
                    f"offset of {slot.name!r}: expected at least {end}, the end of {before!r}, "
                    f"got {slot.offset}"
                )
            end, before = slot.end, slot.name
        if end > self.num_shards * size:
            raise ValueError(
                f"{before!r}: expected to end within the {self.num_shards * size} elements of buffer {buffer} "
                f"({self.num_shards} shards of {size}), got end {end}"
            )
        for slot in self.occupied(buffer):
            slot.check_cuts(size)

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def _order(self) -> tuple[tuple[int, ...], ...]:
        """For each buffer, the numbers of its slots by offset."""
        held: list[list[int]] = [[] for _ in self.shard_sizes]
        for number, slot in enumerate(self.slots):
            if slot.numel:
                held[slot.buffer].append(number)
        return tuple(tuple(sorted(numbers, key=lambda i: self.slots[i].offset)) for numbers in held)

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
        """The slot of a parameter; ValueError if the layout has none with that name."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(list(self._by_name)[:5])
            raise ValueError(
                f"tensor name: expected one of the layout ({known}, ...), got {name!r}"
            ) from None

    def start(self, name: str) -> int:
        """The parameter's first element if all whole buffers are stored one after the other."""
        slot = self.slot(name)
        return self.num_shards * self._starts[slot.buffer] + slot.offset

    def shard_start(self, name: str, rank: int) -> int:
        """The first element, in the shard of ``rank``, of the rows that it owns; meaningless if it owns none."""
        slot = self.slot(name)
        if not slot.numel:
            return 0
        first = max(slot.offset - rank * self.shard_sizes[slot.buffer], 0)
        return self._starts[slot.buffer] + first

    @property
    def shard_slices(self) -> tuple[slice, ...]:
        """For each buffer, its slice of the elements that a rank holds."""
        return tuple(slice(a, b) for a, b in zip(self._starts, self._starts[1:], strict=False))

    def occupied(self, buffer: int) -> tuple[Slot, ...]:
        """The slots of a buffer that have elements, by offset."""
        return tuple(self.slots[number] for number in self._order[buffer])

    def parts(self, rank: int, buffer: int) -> Iterator[Part]:
        """The parts of a buffer in the shard of ``rank``, by offset; everything between them is padding."""
        size, numbers = self.shard_sizes[buffer], self._order[buffer]
        start = rank * size
        for k in range(bisect_right(numbers, start, key=lambda i: self.slots[i].end), len(numbers)):
            slot = self.slots[numbers[k]]
            if slot.offset >= start + size:
                return
            yield Part(numbers[k], max(slot.offset - start, 0), min(slot.end - start, size))

    def merged(self, count: int) -> Layout:
        """The same buffers in ``num_shards / count`` shards: every ``count`` consecutive shards become one."""
        if count == 1:
            return self
        if count < 1 or self.num_shards % count:
            raise ValueError(f"count: expected a divisor of the {self.num_shards} shards, got {count}")
        sizes = tuple(size * count for size in self.shard_sizes)
        return Layout(self.num_shards // count, sizes, self.slots, self.align)

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

    @cached_property
    def elements_by_shard(self) -> NDArray[np.int64]:
        """``[slots, num_shards]``: elements of each parameter in each shard."""
        bounds = np.arange(self.num_shards + 1, dtype=np.int64)
        counts = np.zeros((len(self.slots), self.num_shards), np.int64)
        for slot, own in zip(self.slots, counts, strict=True):
            if slot.numel:
                starts = bounds * self.shard_sizes[slot.buffer] - slot.offset
                own[:] = np.diff(np.clip(starts, 0, slot.numel))
        return counts

    def rows_by_shard(self, names: Collection[str]) -> NDArray[np.int64]:
        """``[buffers, num_shards]``: rows of these parameters in each shard."""
        counts = np.zeros((len(self.shard_sizes), self.num_shards), np.int64)
        for slot, elements in zip(self.slots, self.elements_by_shard, strict=True):
            if slot.numel and slot.name in names:
                counts[slot.buffer] += elements // slot.row_size
        return counts

    def _rows_before(self, slot: Slot, rank: int) -> int:
        return slot.rows_before(rank * self.shard_sizes[slot.buffer]) if slot.numel else 0

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ``align`` only if it is not 1; equal layouts give equal text."""
        slots = [{key: getattr(slot, key) for key in SLOT_FIELDS} for slot in self.slots]
        aligned = {"align": self.align} if self.align > 1 else {}
        fields = {**aligned, "num_shards": self.num_shards, "shard_sizes": self.shard_sizes, "slots": slots}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> Layout:
        """The layout that ``to_json`` wrote. The text is not trusted; raises ValueError if it is not a layout."""
        try:
            fields = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"expected JSON, got a text that does not parse ({error})") from None
        aligned = isinstance(fields, dict) and "align" in fields
        _check_fields("", fields, _ALIGNED_FIELDS if aligned else _FIELDS)
        # 1 is not written, so that equal layouts have one text.
        align = _size("align", fields["align"], least=2) if aligned else 1
        num_shards = _size("num_shards", fields["num_shards"], least=1)
        sizes = (_size("shard_sizes", size, least=1) for size in _list("shard_sizes", fields["shard_sizes"]))
        slots = (_slot(number, slot) for number, slot in enumerate(_list("slots", fields["slots"])))
        return Layout(num_shards, tuple(sizes), tuple(slots), align)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hex: equal on two ranks exactly if their layouts are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        return self.render()

    def summary(self) -> str:
        """One line: the size of shards, and padding."""
        sizes = " + ".join(map(str, self.shard_sizes)) or "0"
        aligned = f", align {self.align}" if self.align > 1 else ""
        padding = f"{self.numel} real, {100 * self.overhead():.2f} % padding"
        return f"{self.num_shards} shards x {sizes} elements, {padding}{aligned}"

    def render(self, width: int = 80) -> str:
        """The buffers drawn to scale in about ``width`` columns a rank, then who owns which rows."""
        lines = [self.summary()]
        ranks = drawing.drawn_ranks(self.num_shards)
        for rank in ranks:
            if rank is None:
                lines.append("  ...")
                continue
            buffers = []
            for buffer, size in enumerate(self.shard_sizes):
                columns = max(1, min(size, size * width // self.shard_size))
                buffers.append(drawing.shard_line(self.parts(rank, buffer), size, columns))
            lines.append(f"rank {rank:<{len(str(self.num_shards - 1))}} |{'|'.join(buffers)}|")
        for number, slot in enumerate(self.slots[: drawing.MAX_TENSORS]):
            ranges = [None if rank is None else self.row_range(slot.name, rank) for rank in ranks]
            lines.append(drawing.slot_line(number, slot, ranges))
        return "\n".join([*lines, *drawing.more_tensors(len(self.slots))])


def check_count(what: str, value: object) -> None:
    """ValueError unless it is an int of at least 1."""
    if not is_size(value) or value == 0:
        raise ValueError(f"{what}: expected an int >= 1, got {value!r}")


def _slot(number: int, value: object) -> Slot:
    fields = _check_fields(f"slot {number}: ", value, SLOT_FIELDS)
    name = fields["name"]
    if not isinstance(name, str):
        raise ValueError(f"slot {number}: expected a name in quotes, got {_short(name)}")
    shape = tuple(_size(f"shape of {name!r}", n) for n in _list(f"shape of {name!r}", fields["shape"]))
    if math.prod(shape) > _MOST:
        raise ValueError(f"{name!r}: expected at most 2**63 - 1 elements, got shape {_short(list(shape))}")
    field = (_size(f"{key} of {name!r}", fields[key]) for key in ("block", "buffer", "offset"))
    return Slot(name, shape, *field)


def _check_fields(what: str, value: object, fields: Sequence[str]) -> dict[str, object]:
    if isinstance(value, dict) and sorted(value) == list(fields):
        return value
    keys = ", ".join(map(_short, sorted(value)[:8])) or "none" if isinstance(value, dict) else ""
    description = f"one with {keys}" if keys else _short(value)
    raise ValueError(f"{what}expected an object with {', '.join(fields)}, got {description}")


def _list(what: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{what}: expected a list, got {_short(value)}")
    return value


def _size(what: str, value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{what}: expected a whole number from {least} to 2**63 - 1, got {_short(value)}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
