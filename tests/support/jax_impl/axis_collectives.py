"""The collectives of a compiled program, with the mesh axes that each is over."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jax_impl.diagnostics.scheduled import Array, read_collectives

_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# From jax 0.11 on.
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


class OverAxes(NamedTuple):
    """``arrays``: full ones; ``times``: how often it runs."""

    kind: str
    axes: tuple[str, ...]
    arrays: tuple[Array, ...]
    times: int
    line: str


def collectives_over_axes(text: str, mesh: Mesh) -> list[OverAxes]:
    """Of a program that was compiled for ``mesh``, whose devices are numbered in its order."""
    lines = {}
    for line in text.splitlines():
        named = re.match(r"\s+(?:ROOT )?%(\S+) = ", line)
        if named:
            lines[named[1]] = line
    return [
        OverAxes(one.kind, _axes(lines[one.name], mesh), one.arrays, one.times, lines[one.name].strip())
        for one in read_collectives(text)
    ]


def _axes(line: str, mesh: Mesh) -> tuple[str, ...]:
    places = np.arange(math.prod(mesh.devices.shape)).reshape(mesh.devices.shape)
    group = _first_group(line)
    coordinates = np.array([np.argwhere(places == device)[0] for device in group])
    over = [i for i in range(places.ndim) if len(set(coordinates[:, i])) > 1]
    expected = math.prod(places.shape[i] for i in over)
    assert len(group) == expected, f"no group of whole axes: {line}"
    return tuple(mesh.axis_names[i] for i in over)


def _first_group(line: str) -> list[int]:
    listed = _LISTED.search(line)
    if listed:
        return [int(x) for x in listed[1].split("}")[0].strip("{").split(",")]
    iota = _IOTA.search(line)
    if iota:
        shape, dimensions = ([int(x) for x in part.split(",")] for part in iota.groups()[:2])
        order = [int(x) for x in iota[3].split(",")] if iota[3] else range(len(dimensions))
        return [
            int(x)
            for x in np.arange(math.prod(dimensions)).reshape(dimensions).transpose(order).reshape(shape)[0]
        ]
    named = _NAMED.search(line)
    assert named, line
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
    over = re.findall(r"'([^']*)'", named[2])
    places = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    index = tuple(slice(None) if name in over else 0 for name in sizes)
    return [int(x) for x in places[index].reshape(-1)]
