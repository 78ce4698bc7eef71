"""Layout files: where every parameter of a sharded group lies, as the planners of both runtimes write it.

JSON such as ``{"num_shards":4,"shard_sizes":[27,24],"slots":[{"block":1,"buffer":1,"name":"wq","offset":54,
"shape":[7,6]},...]}``. A group has one flat buffer per shard size, each cut into ``num_shards`` equal shards, and every
tensor is one range of one buffer. Rows and the rules are those of ``torch_impl/README.md``; this reader shares no code
with the planners, so that a file is checked, not trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
import string
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

MAX_DRAWN_RANKS = 16
MAX_DRAWN_TENSORS = 40
_FIELDS = ("num_shards", "shard_sizes", "slots")
_MOST = 2**63 - 1
_SLOT_FIELDS = ("block", "buffer", "name", "offset", "shape")


class LayoutError(Exception):
    """A layout cannot be read or drawn as asked."""


@dataclass(frozen=True)
class PlacedTensor:
    """Elements ``[offset, offset + numel)`` of a buffer; no shard boundary separates ``block`` rows."""

    name: str
    shape: tuple[int, ...]
    block: int
    buffer: int
    offset: int

    @property
    def row_size(self) -> int:
        """Elements of a row: the last dimension from two dimensions on, else one."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 without elements."""
        return self.numel // self.row_size if self.numel else 0

    @property
    def end(self) -> int:
        """The first element of the buffer after the tensor."""
        return self.offset + self.numel


class Part(NamedTuple):
    """Elements ``[start, stop)`` of one rank's shard of a buffer: rows of the tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class PlacedLayout:
    """A layout file's contents, checked: tensors lie inside their buffers, apart, and no boundary cuts a block.

    Raises:
        LayoutError: otherwise.
    """

    num_shards: int
    shard_sizes: tuple[int, ...]
    tensors: tuple[PlacedTensor, ...]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in names:
                raise LayoutError(f"expected every tensor once, got {tensor.name!r} more than once")
            names.add(tensor.name)
            most = max(1, tensor.num_rows)
            if not 1 <= tensor.block <= most:
                raise LayoutError(
                    f"{tensor.name!r}: expected a block of 1 to {most} rows, got {tensor.block}"
                )
            if tensor.numel and tensor.buffer >= len(self.shard_sizes):
                raise LayoutError(
                    f"{tensor.name!r}: expected one of {len(self.shard_sizes)} buffers, got buffer {tensor.buffer}"
                )
            if not tensor.numel and (tensor.buffer or tensor.offset):
                raise LayoutError(
                    f"{tensor.name!r}, without elements: expected buffer 0, offset 0, "
                    f"got buffer {tensor.buffer}, offset {tensor.offset}"
                )
        for buffer, size in enumerate(self.shard_sizes):
            self._check_buffer(buffer, size)

    def _check_buffer(self, buffer: int, size: int) -> None:
        if not self._order[buffer]:
            raise LayoutError(f"buffer {buffer}: expected tensors in it, got none")
        end, before = 0, ""
        for i in self._order[buffer]:
            tensor = self.tensors[i]
            if tensor.offset < end:
                raise LayoutError(
                    f"{tensor.name!r}: expected an offset of at least {end}, the end of {before!r}, "
                    f"got {tensor.offset}"
                )
            end, before = tensor.end, tensor.name
            if end > self.num_shards * size:
                raise LayoutError(
                    f"{tensor.name!r}: expected an end within the {self.num_shards * size} elements of buffer "
                    f"{buffer} ({self.num_shards} shards of {size}), got {end}"
                )
            unit = tensor.block * tensor.row_size
            first = (tensor.offset // size + 1) * size
            # Boundaries are a shard apart, so all are at blocks when the first two are.
            for boundary in (first, first + size):
                if boundary < end and (boundary - tensor.offset) % unit:
                    raise LayoutError(
                        f"{tensor.name!r}: expected shard boundaries at multiples of {unit} elements from its start, "
                        f"got one at {boundary - tensor.offset}"
                    )

    @cached_property
    def _order(self) -> list[list[int]]:
        """Numbers of the tensors with elements in each buffer, by offset."""
        order: list[list[int]] = [[] for _ in self.shard_sizes]
        for i, tensor in enumerate(self.tensors):
            if tensor.numel:
                order[tensor.buffer].append(i)
        return [sorted(members, key=lambda i: self.tensors[i].offset) for members in order]

    @cached_property
    def _ends(self) -> list[list[int]]:
        return [[self.tensors[i].end for i in members] for members in self._order]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def padded_size(self) -> int:
        """Elements of all buffers."""
        return self.num_shards * sum(self.shard_sizes)

    @property
    def overhead(self) -> float:
        """Padding as a fraction of the elements of all tensors; 0.0 without any."""
        return (self.padded_size - self.numel) / self.numel if self.numel else 0.0

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hex, which the planners call by the same name."""
        slots = [{field: getattr(tensor, field) for field in _SLOT_FIELDS} for tensor in self.tensors]
        fields = {"num_shards": self.num_shards, "shard_sizes": self.shard_sizes, "slots": slots}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def buffer_numel(self, buffer: int) -> int:
        """Elements of the tensors in a buffer."""
        return sum(self.tensors[i].numel for i in self._order[buffer])

    def parts(self, rank: int, buffer: int) -> Iterator[Part]:
        """What a rank's shard of a buffer holds, by offset; all between is padding."""
        start = rank * self.shard_sizes[buffer]
        stop = start + self.shard_sizes[buffer]
        members = self._order[buffer]
        for k in range(bisect_right(self._ends[buffer], start), len(members)):
            tensor = self.tensors[members[k]]
            if tensor.offset >= stop:
                return
            yield Part(members[k], max(tensor.offset, start) - start, min(tensor.end, stop) - start)

    def rows(self, tensor: PlacedTensor, rank: int) -> tuple[int, int]:
        """``(r0, r1)``: the rank owns rows ``[r0, r1)`` of the tensor."""
        if not tensor.numel:
            return 0, 0
        start = rank * self.shard_sizes[tensor.buffer] - tensor.offset
        stop = start + self.shard_sizes[tensor.buffer]
        first, last = (min(max(edge, 0), tensor.numel) // tensor.row_size for edge in (start, stop))
        return first, last


def read_layout(path: Path) -> PlacedLayout:
    """The layout in a file. LayoutError, which names the file, when it is none; OSError when it cannot be read."""
    try:
        return parse_layout(path.read_bytes())
    except LayoutError as error:
        raise LayoutError(f"layout file {path}: {error}") from None


def parse_layout(text: str | bytes) -> PlacedLayout:
    """The layout that a JSON text describes. LayoutError when it describes none."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"expected JSON, got a text that does not parse ({error})") from None
    _check_fields("an object", fields, _FIELDS)
    num_shards = _size("num_shards", fields["num_shards"], least=1)
    sizes = _list("shard_sizes", fields["shard_sizes"])
    shard_sizes = tuple(_size("shard_sizes", size, least=1) for size in sizes)
    slots = _list("slots", fields["slots"])
    return PlacedLayout(num_shards, shard_sizes, tuple(_tensor(k, slot) for k, slot in enumerate(slots)))


def drawn_ranks(num_shards: int, most: int) -> list[int | None]:
    """All ranks when they are at most ``most``; else the first and the last half of that with None between."""
    if num_shards <= most:
        return list(range(num_shards))
    half = most // 2
    return [*range(half), None, *range(num_shards - half, num_shards)]


def layout_lines(layout: PlacedLayout, width: int = 80) -> list[str]:
    """Every rank's shards to scale in about ``width`` columns, a letter a tensor, then who owns which rows.

    A column that several tensors share shows the last of them.
    """
    sizes = " + ".join(map(str, layout.shard_sizes)) or "0"
    lines = [
        f"{layout.num_shards} shards x {sizes} elements, {layout.numel} real, {100 * layout.overhead:.2f} % padding"
    ]
    ranks = drawn_ranks(layout.num_shards, MAX_DRAWN_RANKS)
    margin = len(f"rank {layout.num_shards - 1}")
    for rank in ranks:
        if rank is None:
            lines.append("...")
            continue
        buffers = (_shard_line(layout, rank, buffer, width) for buffer in range(len(layout.shard_sizes)))
        lines.append(f"{f'rank {rank}':{margin}} |{'|'.join(buffers)}|")
    for number, tensor in enumerate(layout.tensors[:MAX_DRAWN_TENSORS]):
        title = f"{tensor.name} {list(tensor.shape)}"
        if not tensor.numel:
            lines.append(f"-  {title}: no elements")
            continue
        ranges = ("..." if rank is None else "{}:{}".format(*layout.rows(tensor, rank)) for rank in ranks)
        block = f" by {tensor.block}" if tensor.block > 1 else ""
        lines.append(f"{letter(number)}  {title}: rows{block} {' '.join(ranges)}")
    lines += more_tensors(len(layout.tensors))
    return [*lines, f"fingerprint {layout.fingerprint}"]


def layout_numbers(layout: PlacedLayout) -> dict[str, object]:
    """The numbers of a layout, for JSON; rows by rank only where all ranks are few enough to list."""
    listed = layout.num_shards <= MAX_DRAWN_RANKS
    buffers = []
    for buffer, size in enumerate(layout.shard_sizes):
        elements = layout.buffer_numel(buffer)
        padding = layout.num_shards * size - elements
        buffers.append({"shard_size": size, "elements": elements, "padding": padding})
    tensors = []
    for tensor in layout.tensors:
        rows = [layout.rows(tensor, rank) for rank in range(layout.num_shards)] if listed else None
        tensors.append({**asdict(tensor), "rows": rows})
    return {
        "num_shards": layout.num_shards,
        "elements": layout.numel,
        "padded": layout.padded_size,
        "overhead": layout.overhead,
        "fingerprint": layout.fingerprint,
        "buffers": buffers,
        "tensors": tensors,
    }


def letter(number: int) -> str:
    """What stands for a tensor, or a chunk, in a drawing; letters recur after 52."""
    return string.ascii_letters[number % 52]


def more_tensors(tensors: int) -> list[str]:
    """The line that says how many of all tensors a drawing leaves out, if any."""
    return [f"... and {tensors - MAX_DRAWN_TENSORS} more tensors"] if tensors > MAX_DRAWN_TENSORS else []


def _shard_line(layout: PlacedLayout, rank: int, buffer: int, width: int) -> str:
    size = layout.shard_sizes[buffer]
    columns = max(1, min(size, size * width // sum(layout.shard_sizes)))
    line = ["."] * columns
    for part in layout.parts(rank, buffer):
        first, last = part.start * columns // size, (part.stop - 1) * columns // size
        line[first : last + 1] = letter(part.tensor) * (last + 1 - first)
    return "".join(line)


def _tensor(index: int, slot: object) -> PlacedTensor:
    fields = _check_fields(f"slot {index}: an object", slot, _SLOT_FIELDS)
    name = fields["name"]
    if not isinstance(name, str):
        raise LayoutError(f"slot {index}: expected a name in quotes, got {_short(name)}")
    shape = tuple(_size(f"shape of {name!r}", n) for n in _list(f"shape of {name!r}", fields["shape"]))
    sizes = (_size(f"{field} of {name!r}", fields[field]) for field in ("block", "buffer", "offset"))
    if math.prod(shape) > _MOST:
        raise LayoutError(
            f"{name!r}: expected at most 2**63 - 1 elements, got the shape {_short(list(shape))}"
        )
    return PlacedTensor(name, shape, *sizes)


def _check_fields(what: str, value: object, fields: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise LayoutError(f"expected {what} with {', '.join(fields)}, got {_short(value)}")
    if sorted(value) != list(fields):
        found = ", ".join(map(_short, sorted(value)[:8])) or "none"
        raise LayoutError(f"expected {what} with {', '.join(fields)}, got one with {found}")
    return value


def _list(what: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise LayoutError(f"{what}: expected a list, got {_short(value)}")
    return value


def _size(what: str, value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise LayoutError(f"{what}: expected a whole number from {least} to 2**63 - 1, got {_short(value)}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
