"""Which device holds which rows of a plan's parameters, or of an array."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from bridge.core.sharding.layout.holdings import HoldingsDrawing, draw_holdings
from bridge.core.sharding.layout.rows import Box
from jax_impl.runtime.groups.layout_report import layout_report
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

# By device, the slices of an array that it holds.
Indices = Mapping[jax.Device, tuple[slice, ...]]


def visualize(plan: ShardingPlan | jax.Array, name: str = "") -> HoldingsDrawing:
    """Draw which devices hold which rows of the parameters of ``plan``, or of one array, sharded in any way.

    The result draws itself: ``print`` it, or let a notebook show it. Rows are those at rest, the main weights'. Layers
    that are sharded alike share a drawing. No values are read, and all processes draw the same.

    Args:
        plan: of a model; or a ``jax.Array``, or anything else with a shape and a sharding.
        name: draws only the parameter of this path, or those below it.

    Raises ValueError where the plan has no such path, TypeError for what is neither.
    """
    if not isinstance(plan, ShardingPlan):
        if not isinstance(getattr(plan, "sharding", None), jax.sharding.Sharding):
            raise TypeError(f"visualize: expected a ShardingPlan or an array, got {type(plan).__name__}")
        indices = plan.sharding.devices_indices_map(plan.shape)
        boxes = {device.id: _box(plan.shape, index) for device, index in indices.items()}
        return draw_holdings(
            f"{plan.dtype}{list(plan.shape)} with {plan.sharding}", [(name, plan.shape, boxes)]
        )
    paths = [
        path for path in plan.parameters if path == name or f"{path}/".startswith(f"{name}/" if name else "")
    ]
    if not paths:
        raise ValueError(
            f"visualize: expected a parameter of the plan ({list(plan.parameters)[:3]}, ...) or a path above some, "
            f"got {name!r}"
        )
    of_keys = {key: _boxes(plan, key) for key in dict.fromkeys(plan.parameters[path].key for path in paths)}
    devices = [device.id for device in plan.mesh.devices.flat]
    return draw_holdings(
        layout_report(plan).summary(),
        (
            (path, info.shape, {device: of_keys[info.key][path].get(device, ()) for device in devices})
            for path, info in ((path, plan.parameters[path]) for path in paths)
        ),
    )


def _boxes(plan: ShardingPlan, key: str) -> Mapping[str, Mapping[int, Sequence[Box]]]:
    """By parameter of the array ``key`` and by device, the boxes that the device holds."""
    stored = plan.stored(key)
    by_index: dict[tuple[tuple[int | None, int | None], ...], list[int]] = defaultdict(list)
    indices: Indices = plan.sharding(key).devices_indices_map(stored.shape)
    for device, index in indices.items():
        by_index[tuple((part.start, part.stop) for part in index)].append(device.id)
    found: dict[str, dict[int, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for bounds, devices in by_index.items():
        index = tuple(slice(*ends) for ends in bounds)
        (shard,) = _box(stored.shape, index) or (Box((), (0,) * len(stored.shape)),)
        # Values that take no memory: only where they lie matters.
        for piece in stored.pieces(index, np.broadcast_to(np.int8(0), shard.sizes)):
            for device in devices:
                found[piece.path][device].append(Box(piece.offsets, piece.sizes))
    return found


def _box(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[Box, ...]:
    """The part of an array of ``shape`` at ``index`` as a box; none without elements."""
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    sizes = tuple(stop - start for start, stop, _ in ranges)
    return (Box(tuple(start for start, _, _ in ranges), sizes),) if 0 not in sizes else ()
