"""A layout as text: every rank's shards drawn to scale, one line a rank, then who owns which rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.sharding.layout import Layout, Slot

_MAX_DRAWN_SHARDS = 16
_MAX_LISTED_TENSORS = 40


def render(layout: Layout, width: int) -> str:
    """The shards drawn to scale in about ``width`` columns a rank, then who owns which rows."""
    sizes = " + ".join(map(str, layout.shard_sizes)) or "0"
    lines = [
        f"{layout.num_shards} shards x {sizes} elements, {layout.numel} real, "
        f"{100 * layout.overhead():.2f} % padding"
    ]
    placed = [s for s in layout.slots if s.numel]
    letters = {s.name: chr(ord("a") + i % 26) for i, s in enumerate(placed)}
    drawn = _ends(layout.num_shards)
    lines += [
        "  ..." if k is None else f"rank {k} |{_draw(layout, k, placed, letters, width)}|" for k in drawn
    ]
    for s in layout.slots[:_MAX_LISTED_TENSORS]:
        if not s.numel:
            lines.append(f"-  {s.name} {s.shape}: no elements")
            continue
        ranges = " ".join("..." if k is None else "{}:{}".format(*layout.row_range(s.name, k)) for k in drawn)
        block = f" by {s.block}" if s.block > 1 else ""
        lines.append(f"{letters[s.name]}  {s.name} {s.shape}: rows{block} {ranges}")
    if len(layout.slots) > _MAX_LISTED_TENSORS:
        lines.append(f"   ... and {len(layout.slots) - _MAX_LISTED_TENSORS} more tensors")
    return "\n".join(lines)


def _draw(layout: Layout, rank: int, placed: Sequence[Slot], letters: Mapping[str, str], width: int) -> str:
    """One rank's shards, separated by bars."""
    lines = []
    scale = min(1.0, width / max(layout.shard_size, 1))
    for buffer, size in enumerate(layout.shard_sizes):
        columns = max(1, round(size * scale))
        line = ["."] * columns
        start = rank * size
        for s in placed:
            first = max(s.offset - start, 0)
            last = min(s.offset + s.numel - start, size) - 1
            if s.buffer == buffer and first <= last:
                left, right = first * columns // size, last * columns // size
                line[left : right + 1] = letters[s.name] * (right + 1 - left)
        lines.append("".join(line))
    return "|".join(lines)


def _ends(num_shards: int) -> list[int | None]:
    """Ranks worth drawing: all of a few, else the first and last with None between."""
    if num_shards <= _MAX_DRAWN_SHARDS:
        return list(range(num_shards))
    half = _MAX_DRAWN_SHARDS // 2
    return [*range(half), None, *range(num_shards - half, num_shards)]
