"""Moments with a scale for each row, with the flat buffers of JAX: what of them a device holds.

Of a group of which some parameters have rows of several elements (*scaled* ones),
``jax_impl.runtime.groups.row_arrays`` keeps three arrays for each moment: one as the weights are, in the moment's
dtype; a float32 scale for each scaled row; and the elements of all other parameters, in the dtype of the update. In the
latter two each shard has, for each buffer of the layout, room for as many rows as the shard with most of them has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridge.core.sharding.layout.rows import rows_of
from bridge.planning.cost.buffers import GroupBuffers

_SCALE = 4


@dataclass(frozen=True)
class RowMoment:
    """Of one device: elements of the array like the weights', rows that have a scale, and other elements.

    ``real_...``: the part of them that belongs to parameters.
    """

    elements: int
    rows: int
    others: int
    real_elements: int
    real_rows: int
    real_others: int

    def bytes(self, itemsize: int, others: int) -> tuple[int, int]:
        """Allocated, and the part of it that belongs to parameters. ``others``: of an element without a scale."""
        return (
            self.elements * itemsize + self.rows * _SCALE + self.others * others,
            self.real_elements * itemsize + self.real_rows * _SCALE + self.real_others * others,
        )


def row_moment(group: GroupBuffers, device: int) -> RowMoment | None:
    """None for a group without scaled parameters."""
    sizes = {slot.name: rows_of(slot.shape)[0] for slot in group.layout.slots}
    if not any(size > 1 for size in sizes.values()):
        return None
    level = group.strategy.optimizer
    own = int(group.mesh.shard_by_device(level)[device])
    layout = group.layout
    bounds = np.arange(layout.num_shards + 1, dtype=np.int64)
    rows = {
        scaled: np.zeros((len(layout.shard_sizes), layout.num_shards), np.int64) for scaled in (True, False)
    }
    elements = 0
    for slot in layout.slots:
        starts = bounds * layout.shard_sizes[slot.buffer] - slot.offset
        held = np.diff(np.clip(starts, 0, slot.numel))
        scaled = sizes[slot.name] > 1
        rows[scaled][slot.buffer] += held // max(1, sizes[slot.name])
        elements += int(held[own]) if scaled else 0
    return RowMoment(
        group.size(level),
        int(rows[True].max(1).sum()),
        int(rows[False].max(1).sum()),
        elements,
        int(rows[True][:, own].sum()),
        int(rows[False][:, own].sum()),
    )
