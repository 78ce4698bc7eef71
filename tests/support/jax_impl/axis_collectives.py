"""The collectives of a compiled program, with the mesh axes of each collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from bridge.core.hlo.collectives import groups_of
from bridge.core.hlo.text import read_module
from jax_impl.diagnostics.scheduled import Array, read_collectives


class OverAxes(NamedTuple):
    """``arrays``: full ones; ``times``: how often it runs."""

    operation: str
    axes: tuple[str, ...]
    arrays: tuple[Array, ...]
    times: int


def collectives_over_axes(text: str, mesh: Mesh) -> list[OverAxes]:
    """Collectives of a program compiled for ``mesh``, whose devices are numbered in mesh order."""
    operations = {
        operation.name: operation
        for computation in read_module(text).computations.values()
        for operation in computation.operations
    }
    return [
        OverAxes(
            collective.kind,
            _axes(groups_of(operations[collective.name], mesh.devices.size)[0], mesh),
            collective.arrays,
            collective.times,
        )
        for collective in read_collectives(text)
    ]


def _axes(group: Sequence[int], mesh: Mesh) -> tuple[str, ...]:
    shape = mesh.devices.shape
    coordinates = np.array(np.unravel_index(group, shape)).T
    over = [axis for axis in range(len(shape)) if len(set(coordinates[:, axis])) > 1]
    assert len(group) == math.prod(shape[axis] for axis in over), f"no group of whole axes: {group}"
    return tuple(mesh.axis_names[axis] for axis in over)
