"""Which device holds which rows of a plan's parameters, or of an array."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bridge.core.sharding.layout.holdings import HoldingsDrawing, draw_holdings
from bridge.core.sharding.layout.rows import Box
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

Boxes = dict[int, list[Box]]
"""By a device's id."""


def visualize(plan: ShardingPlan | jax.Array, name: str = "") -> HoldingsDrawing:
    """Draw which devices hold which rows of the parameters of ``plan``, or of one array, sharded in any way.

    The result draws itself: ``print`` it, or let a notebook show it. Rows are those at rest, the main weights'. Layers
    that are sharded alike share a drawing. No values are read, and all processes draw the same.

    name: draws only the parameter of this path, or those below it.

    Raises ValueError where the plan has no parameter of that name, TypeError for what is neither plan nor array.
    """
    if not isinstance(plan, ShardingPlan):
        if not isinstance(getattr(plan, "sharding", None), jax.sharding.Sharding):
            raise TypeError(f"visualize: expected a ShardingPlan or a jax.Array, got {type(plan).__name__}")
        indices: Mapping[Any, tuple[slice, ...]] = plan.sharding.devices_indices_map(plan.shape)
        boxes = {device.id: [_box(plan.shape, index)] for device, index in indices.items()}
        spec = f", {plan.sharding.spec}" if isinstance(plan.sharding, jax.sharding.NamedSharding) else ""
        return draw_holdings(f"{plan.dtype} on {len(boxes)} devices{spec}", [(name, plan.shape, boxes)])
    infos = {
        path: info
        for path, info in plan.parameters.items()
        if not name or path == name or path.startswith(f"{name}/")
    }
    if not infos:
        raise ValueError(
            f"visualize: expected parameters at or below {name!r}, got a plan of {list(plan.parameters)[:3]}, ..."
        )
    held = {key: _boxes(plan, key) for key in {info.key for info in infos.values()}}
    return draw_holdings(
        plan.summary(), ((path, info.shape, held[info.key][path]) for path, info in infos.items())
    )


def _boxes(plan: ShardingPlan, key: str) -> dict[str, Boxes]:
    """By parameter of the array ``key``, the boxes that each device holds."""
    stored, devices = plan.stored(key), [device.id for device in plan.mesh.devices.flat]
    boxes: dict[str, Boxes] = defaultdict(lambda: {device: [] for device in devices})
    indices: Mapping[Any, tuple[slice, ...]] = plan.sharding(key).devices_indices_map(stored.shape)
    for device, index in indices.items():
        # Values that take no memory: only where they lie matters.
        values = np.broadcast_to(np.int8(0), _box(stored.shape, index).sizes)
        for piece in stored.pieces(index, values):
            boxes[piece.path][device.id].append(Box(piece.offsets, piece.sizes))
    return boxes


def _box(shape: tuple[int, ...], index: tuple[slice, ...]) -> Box:
    """The part of an array of ``shape`` at ``index``."""
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return Box(tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges))
