"""Which moments are in CPU memory, and how many of their bytes an update has on the device.

Both runtimes pick whole arrays one by one, so that the picked arrays are the wished share of the arrays seen so far.
PyTorch picks the moments of a parameter together, in the model's order; JAX picks the moments of a flat buffer, in the
order of units, the root last. A stack of scanned layers is one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from bridge.core.sharding.policy.optimizer_state import offloaded
from bridge.planning.cost.buffers import buffers_of
from bridge.planning.cost.mesh import MeshShape
from bridge.planning.cost.units import UnitKind
from bridge.planning.models.model import Model


def in_cpu_memory(
    model: Model, units: Mapping[str, UnitKind], mesh: MeshShape, runtime: str, share: Fraction
) -> frozenset[str]:
    """Paths of the parameters whose moments are in CPU memory."""
    if not share:
        return frozenset()
    if runtime == "torch":
        return offloaded({leaf.path: leaf.numel for leaf in model.parameters}, float(share))
    sizes: dict[str, int] = {}
    members: dict[str, list[str]] = {}
    for path, kind in units.items():
        layer = model.layer_of(path)
        name = f"{layer[0]}.*.{layer[2]}" if layer else path
        for number, group in enumerate(buffers_of(kind, mesh)):
            if group.shape.trainable:
                # A unit has several buffers if weights are gathered as float8, or cut over model axes.
                key = f"{name} {number}"
                # An array contains the parts of all places of these model axes.
                places = math.prod(size for axis, size in mesh.model if axis in group.shape.over)
                sizes[key] = sizes.get(key, 0) + places * group.padded
                own = [f"{path}.{parameter}".lstrip(".") for parameter in group.shape.names]
                members[key] = members.get(key, []) + own
    return frozenset(path for name in offloaded(sizes, float(share)) for path in members[name])


def travelling(arrays: Iterable[int]) -> int:
    """Bytes on the device while arrays of these sizes, one for each key, travel there and back in JAX.

    The arrays of two keys; with more keys, arrays travel in two parts, and a part exists twice while they are joined.
    """
    largest = sorted(arrays, reverse=True)
    return sum(largest[:2]) + (largest[0] // 2 if len(largest) > 2 else 0)
