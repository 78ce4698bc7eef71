"""A layout as text: the flat buffer drawn to scale, one line a shard, then who owns which rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_impl.layout import Layout, Slot

_MAX_DRAWN_SHARDS = 16


def render(layout: Layout, width: int) -> str:
    """The buffer drawn to scale in at most ``width`` columns a shard, then who owns which rows."""
    grain = (
        f"{layout.granularity} of {layout.rows} rows" if layout.granularity == "block" else layout.granularity
    )
    lines = [
        f"{layout.num_shards} shards x {layout.shard_size} elements, {layout.numel} real, "
        f"{100 * layout.overhead():.2f} % padding, granularity {grain}"
    ]
    placed = [s for s in layout.slots if s.numel]
    letters = {s.name: chr(ord("a") + i % 26) for i, s in enumerate(placed)}
    drawn = _ends(layout.num_shards)
    lines += [
        "  ..." if k is None else f"rank {k} |{_draw(layout, k, placed, letters, width)}|" for k in drawn
    ]
    for s in layout.slots:
        if not s.numel:
            lines.append(f"-  {s.name} {s.shape}: no elements")
            continue
        bounds = layout.row_bounds(s.name)
        ranges = " ".join("..." if k is None else f"{bounds[k]}:{bounds[k + 1]}" for k in drawn)
        lines.append(f"{letters[s.name]}  {s.name} {s.shape}: rows {ranges}")
    return "\n".join(lines)


def _draw(layout: Layout, rank: int, placed: Sequence[Slot], letters: Mapping[str, str], width: int) -> str:
    columns = min(width, layout.shard_size)
    line = ["."] * columns
    start = rank * layout.shard_size
    for s in placed:
        first = max(s.offset - start, 0)
        last = min(s.offset + s.numel - start, layout.shard_size) - 1
        if first <= last:
            left, right = first * columns // layout.shard_size, last * columns // layout.shard_size
            line[left : right + 1] = letters[s.name] * (right + 1 - left)
    return "".join(line)


def _ends(num_shards: int) -> list[int | None]:
    """Ranks worth drawing: all of a few, else the first and last with None between."""
    if num_shards <= _MAX_DRAWN_SHARDS:
        return list(range(num_shards))
    half = _MAX_DRAWN_SHARDS // 2
    return [*range(half), None, *range(num_shards - half, num_shards)]
