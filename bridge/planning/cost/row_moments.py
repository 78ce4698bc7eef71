"""Moments with a scale for each row, with the flat buffers of JAX: the bytes of them on a device.

For a group in which some parameters have rows of several elements (*scaled* ones),
``jax_impl.runtime.groups.row_arrays`` keeps three arrays for each moment: one shaped like the weights, in the moment's
dtype; a float32 scale for each scaled row; and the elements of all other parameters, in the dtype of the update. In the
latter two, each shard has, for each buffer of the layout, room for as many rows as the shard with the most rows has.
"""

from __future__ import annotations

from bridge.core.sharding.policy.optimizer_state import SCALE_BYTES
from bridge.planning.cost.buffers import GroupBuffers


def row_moment_bytes(group: GroupBuffers, device: int, itemsize: int, others: int) -> tuple[int, int] | None:
    """The bytes allocated on a device, and the part that belongs to parameters; None for a group without scales.

    itemsize, others: bytes of an element with a scale, and of one without.
    """
    layout, level = group.layout, group.strategy.optimizer
    own = int(group.mesh.shard_by_device(level)[device])
    scaled = {slot.name: slot.row_size > 1 for slot in layout.slots}
    if not any(scaled.values()):
        return None
    rows, single = (layout.rows_by_shard({n for n in scaled if scaled[n] is has}) for has in (True, False))
    elements = layout.elements_by_shard[list(scaled.values()), own].sum()
    allocated = group.size(level) * itemsize + rows.max(1).sum() * SCALE_BYTES + single.max(1).sum() * others
    real = elements * itemsize + rows[:, own].sum() * SCALE_BYTES + single[:, own].sum() * others
    return int(allocated), int(real)
