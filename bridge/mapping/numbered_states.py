"""Optimizer states that torch numbers, under the names of the weights that the numbers stand for.

    optimizer.state_dict()                             here
    optimizer.state.0.exp_avg          (5, 4)          optimizer.state.layers.0.weight.exp_avg
    optimizer.param_groups.0.params    [0, 1]          ["layers.0.weight", "layers.0.bias"]

The names are those in `param_names`, which an optimizer has that was made of `named_parameters()`. Without them each
group's numbers follow each other as the weights do. They are taken for known where the shapes leave one way to assign
them; else they stay numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from bridge.formats.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    Checksums,
    Loan,
    TensorInfo,
    TreePath,
    Wanted,
)
from bridge.formats.wrapping import ReadWhenAsked, WrappingReader

_WEIGHTS: Final = ("model", "state_dict", "model_state_dict", "module", "weights", "params", "net")
_BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")
_STATE, _GROUPS = "state", "param_groups"

_Shape = tuple[int, ...]


def with_named_states(reader: CheckpointReader) -> CheckpointReader:
    """``reader`` with names for numbers in its optimizer states, as far as these are known; else ``reader`` itself."""
    prefixes = dict.fromkeys(path[:-3] for info in reader.tensors.values() if _is_numbered(path := info.path))
    names: dict[TreePath, dict[int, str]] = {}
    for prefix in prefixes:
        found = _names(reader, prefix)
        if found is not None:
            names[prefix] = found
    return NamedStates(reader, names) if names else reader


class NamedStates(WrappingReader):
    """``reader``, in which each number of ``names``, by the place of its optimizer, is replaced by a name."""

    def __init__(self, reader: CheckpointReader, names: Mapping[TreePath, Mapping[int, str]]) -> None:
        super().__init__(reader)
        self._own: dict[str, str] = {}
        self._names = names
        tensors: dict[str, TensorInfo] = {}
        for old, info in reader.tensors.items():
            path = info.path
            if _is_numbered(path) and int(path[-2]) in names.get(path[:-3], {}):
                path = (*path[:-2], names[path[:-3]][int(path[-2])], path[-1])
            name = old if path == info.path else ".".join(map(str, path))
            self._own[name] = old
            tensors[name] = dataclasses.replace(info, name=name, path=path)
        self.tensors = tensors
        self.unreadable = {
            name: self.unreadable[old] for name, old in self._own.items() if old in self.unreadable
        }
        self.objects = ReadWhenAsked(reader.object_paths, self._object)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`."""
        return self._reader.read(self._own[name], box)

    def lend(self, name: str, box: Box) -> Loan | None:
        """One block where it is in the file; see `CheckpointReader.lend`."""
        return self._reader.lend(self._own[name], box)

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """All of each of these small tensors into memory; see `CheckpointReader.read_into`."""
        return self._reader.read_into([(self._own[name], target) for name, target in wanted])

    def _object(self, name: str) -> object:
        value, path = self._reader.objects[name], self.object_paths[name]
        known = self._names.get(path[:-3], {})
        if path[-1] == "params" and _GROUPS in path[-3:-2] and isinstance(value, list):
            return [known.get(number, number) if type(number) is int else number for number in value]
        return value


def _is_numbered(path: TreePath) -> bool:
    return len(path) > 2 and path[-3] == _STATE and str(path[-2]).isdecimal() and len(str(path[-2])) < 10


def _names(reader: CheckpointReader, prefix: TreePath) -> dict[int, str] | None:
    groups = _groups(reader, prefix)
    if groups is None:
        return None
    if all(names is not None for _, names in groups):
        pairs = [pair for numbers, names in groups for pair in zip(numbers, names or (), strict=True)]
        return dict(pairs) if len({name for _, name in pairs}) == len(pairs) else None
    shapes = _shapes(reader, prefix)
    for weights in _weights(reader, prefix):
        found: dict[int, str] = {}
        for numbers, _ in groups:
            places = _only_way([shapes.get(number) for number in numbers], [shape for _, shape in weights])
            if places is None:
                break
            found |= {number: weights[place][0] for number, place in zip(numbers, places, strict=True)}
        else:
            if len(set(found.values())) == len(found):
                return found
    return None


def _groups(reader: CheckpointReader, prefix: TreePath) -> list[tuple[list[int], list[str] | None]] | None:
    """The numbers of each group, and their names if the group has them; None where no groups are there."""
    objects = {path: name for name, path in reader.object_paths.items() if path[:-3] == prefix}
    groups = []
    for path, name in objects.items():
        if path[-1] != "params" or path[-3] != _GROUPS:
            continue
        try:
            numbers = reader.objects[name]
            beside = objects.get((*path[:-1], "param_names"))
            names = None if beside is None else reader.objects[beside]
        except CheckpointError:
            return None
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            return None
        whole = (
            isinstance(names, list) and len(names) == len(numbers) and all(isinstance(n, str) for n in names)
        )
        groups.append((numbers, names if whole and isinstance(names, list) else None))
    return groups or None


def _shapes(reader: CheckpointReader, prefix: TreePath) -> dict[int, _Shape]:
    """The shape of each number's weight: that of its moments, which have more axes than its step count."""
    shapes: dict[int, _Shape] = {}
    for info in reader.tensors.values():
        if _is_numbered(info.path) and info.path[:-3] == prefix and info.path[-1] != "step":
            number = int(info.path[-2])
            shapes[number] = max(shapes.get(number, ()), info.shape, key=len)
    return shapes


def _weights(reader: CheckpointReader, prefix: TreePath) -> list[list[tuple[str, _Shape]]]:
    """Names and shapes of what may be the weights, by place: those under the usual keys first."""
    places: dict[TreePath, list[tuple[str, _Shape]]] = {}
    for info in reader.tensors.values():
        last = str(info.path[-1])
        if info.path[: len(prefix)] == prefix and prefix:
            continue
        if _is_numbered(info.path) or info.dtype.kind in "biu" or last.endswith(_BUFFERS):
            continue
        places.setdefault(info.path[:-1], []).append((last, info.shape))
    order = sorted(places, key=lambda place: (not place or place[-1] not in _WEIGHTS, len(place)))
    return [places[place] for place in order]


def _only_way(wanted: Sequence[_Shape | None], there: Sequence[_Shape]) -> list[int] | None:
    """Where in ``there`` each shape of ``wanted`` is, in order; None unless there is exactly one way. None fits all."""
    first = _leftmost(wanted, there)
    last = _leftmost(wanted[::-1], there[::-1])
    if first is None or last is None or first != [len(there) - 1 - place for place in last[::-1]]:
        return None
    return first


def _leftmost(wanted: Sequence[_Shape | None], there: Sequence[_Shape]) -> list[int] | None:
    places, start = [], 0
    for shape in wanted:
        place = next((k for k in range(start, len(there)) if shape is None or there[k] == shape), None)
        if place is None:
            return None
        places.append(place)
        start = place + 1
    return places
