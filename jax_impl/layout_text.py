"""A layout as text, of bounded length however many tensors and shards there are."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_impl.layout import Layout
    from jax_impl.slot import Slot

_SHOWN_TENSORS = 40
_SHOWN_OWNERS = 8


def layout_text(layout: Layout) -> str:
    """One line for the sizes, one for each of the first tensors: where it lies, and which rank owns which rows."""
    sizes = " + ".join(map(str, layout.shard_sizes)) or "0"
    lines = [
        f"{layout.num_shards} shards x {sizes} elements, {layout.numel} real, "
        f"{100 * layout.overhead():.2f} % padding"
    ]
    shown = layout.slots[:_SHOWN_TENSORS]
    width = max((len(slot.name) for slot in shown), default=0)
    for slot in shown:
        block = f", blocks of {slot.block}" if slot.block > 1 else ""
        place = f"buffer {slot.buffer} at {slot.offset}" if slot.numel else "no elements"
        lines.append(
            f"  {slot.name:<{width}}  {slot.shape!s:<16} {place}{block}  rows {_owners(layout, slot)}"
        )
    if len(layout.slots) > len(shown):
        lines.append(f"  ... and {len(layout.slots) - len(shown)} more")
    return "\n".join(lines)


def _owners(layout: Layout, slot: Slot) -> str:
    if not slot.numel:
        return "-"
    size = layout.shard_sizes[slot.buffer]
    first, last = slot.offset // size, (slot.end - 1) // size
    ranks = range(first, last + 1)
    bounds = [layout.first_row(slot, rank) for rank in range(first, min(last, first + _SHOWN_OWNERS) + 2)]
    owners = [f"{rank}: {r0}-{r1}" for rank, (r0, r1) in zip(ranks, itertools.pairwise(bounds), strict=False)]
    if len(ranks) > _SHOWN_OWNERS:
        owners[_SHOWN_OWNERS:] = [f"... on {len(ranks)} ranks"]
    return ", ".join(owners)
