"""What drawings of tensors share: letters for what is drawn, lines to scale, and which ranks of many are shown."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from bridge.core.sharding.layout.row_bars import Boxed
from bridge.core.sharding.layout.slot import Part, Slot

MAX_RANKS = 16
MAX_TENSORS = 40


def letter(number: int) -> str:
    """What stands for the tensor, or the stored chunk, of this number; letters recur after 52."""
    return string.ascii_letters[number % 52]


def drawn_ranks(num_shards: int, most: int = MAX_RANKS) -> list[int | None]:
    """All ranks when they are at most ``most``; else the first and the last half of that with None between."""
    if num_shards <= most:
        return list(range(num_shards))
    half = most // 2
    return [*range(half), None, *range(num_shards - half, num_shards)]


def shard_line(parts: Iterable[Part], size: int, columns: int) -> str:
    """A shard of ``size`` elements in ``columns`` characters; what several parts share shows the last of them."""
    line = ["."] * columns
    for part in parts:
        first, last = part.start * columns // size, (part.stop - 1) * columns // size
        line[first : last + 1] = letter(part.number) * (last + 1 - first)
    return "".join(line)


def slot_line(number: int, slot: Slot, ranges: Sequence[tuple[int, int] | None]) -> str:
    """A parameter's letter, shape and the rows of the drawn ranks."""
    if not slot.numel:
        return f"-  {slot.name} {slot.shape}: no elements"
    rows = " ".join("..." if range_ is None else "{}:{}".format(*range_) for range_ in ranges)
    block = f" by {slot.block}" if slot.block > 1 else ""
    return f"{letter(number)}  {slot.name} {slot.shape}: rows{block} {rows}"


def slices_text(box: Boxed) -> str:
    """A box as one would index it: ``[0:2, 3:7]``."""
    stops = (offset + size for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(box.offsets, stops, strict=True))}]"


def more_tensors(tensors: int) -> list[str]:
    """The line that says how many of all tensors a drawing leaves out, if any."""
    return [f"... and {tensors - MAX_TENSORS} more tensors"] if tensors > MAX_TENSORS else []
