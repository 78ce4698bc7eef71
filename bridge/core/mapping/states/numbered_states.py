"""Optimizer states that torch numbers, under the names of the numbered weights.

    optimizer.state_dict()                             here
    optimizer.state.0.exp_avg          (5, 4)          optimizer.state.layers.0.weight.exp_avg
    optimizer.param_groups.0.params    [0, 1]          ["layers.0.weight", "layers.0.bias"]

The names come from `param_names`, which an optimizer has if it was made from `named_parameters()`. Without them, the
shapes decide, if they leave only one way to assign a weight to each number. If several weights have one shape, as in
consecutive layers, nothing in the file tells which number belongs to which weight: an optimizer may list weights in any
order. Then the user gives the order, or the states stay numbered, which no mapping accepts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader, TensorInfo, TreePath
from bridge.core.formats.tensors.wrapping import AlteredReader, ReadWhenAsked
from bridge.core.mapping.language.relation import identity
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.states.beside_weights import is_carried
from bridge.core.mapping.states.tied import alike
from bridge.core.text import first_of
from bridge.core.text_files import read_text

_WEIGHTS: Final = ("model", "state_dict", "model_state_dict", "module", "weights", "params", "net")
_BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")
_STATE, _GROUPS = "state", "param_groups"

MODEL_ORDER: Final = "model"
"""The order of an optimizer whose groups follow the model's order."""

_MAX_ORDER_BYTES: Final = 16 << 20

_Shape = tuple[int, ...]
_Groups = Sequence[Sequence[tuple[int, _Shape | None]]]
_Weights = Sequence[tuple[str, _Shape]]
"""Names and shapes. For numbers in groups, the shape is None if no state tells it."""


def with_named_states(
    reader: CheckpointReader, mapping: MappingTable, order: str | None = None
) -> CheckpointReader:
    """``reader`` with names for numbers in its optimizer states, as far as names are known; else ``reader`` itself.

    mapping: tells which weight may be a second name of another; an optimizer has one number for both. order: "model",
    if each group lists weights in the model's order; or a text file with the name of one weight on each line, in the
    order of the numbers, several optimizers one after the other; None: from `param_names` and shapes. Raises
    CheckpointError for a file that does not fit.
    """
    prefixes = _prefixes(reader)
    if not prefixes:
        return reader
    if order not in (None, MODEL_ORDER):
        return NamedStates(reader, _listed(reader, prefixes, _lines(Path(order or ""))))
    names = {
        prefix: by_number
        for prefix in prefixes
        if (by_number := _names(reader, prefix, mapping, order == MODEL_ORDER)) is not None
    }
    return NamedStates(reader, names) if names else reader


def unnamed(reader: CheckpointReader, prefix: TreePath) -> str:
    """How to say which weights the numbers in the states of the optimizer at ``prefix`` mean."""
    shapes = _shapes(reader, prefix)
    alike: dict[_Shape, list[str]] = {}
    for weights in _weights(reader, prefix)[:1]:
        for name, shape in weights:
            alike.setdefault(shape, []).append(name)
    names = next((names for shape, names in alike.items() if len(names) > 1 and shape in shapes.values()), [])
    such = f": {first_of(names)} have one shape" if names else ""
    return (
        f"{'.'.join(map(str, (*prefix, _STATE)))} of {reader.path} numbers its {len(shapes)} weights, and nothing "
        f"tells which number belongs to which weight{such}. If the optimizer has all of model.parameters(), or groups "
        "that each follow the model's order, say so (--optimizer-order model). Otherwise give a file with the name "
        "of one weight on each line, in the optimizer's order (--optimizer-order FILE), or save the optimizer with "
        "names (model.named_parameters() in torch 2.6 and later), or leave its state out (--weights-only)"
    )


class NamedStates(AlteredReader):
    """``reader`` with each number in ``names``, by the place of its optimizer, replaced by a name."""

    def __init__(self, reader: CheckpointReader, names: Mapping[TreePath, Mapping[int, str]]) -> None:
        super().__init__(reader)
        self._numbered: dict[str, str] = {}
        self._names = names
        tensors: dict[str, TensorInfo] = {}
        for old, info in reader.tensors.items():
            path = self.renamed(info.path)
            name = old if path == info.path else ".".join(map(str, path))
            self._numbered[name] = old
            tensors[name] = dataclasses.replace(info, name=name, path=path)
        self.tensors = tensors
        self.unreadable = {
            name: self.unreadable[old] for name, old in self._numbered.items() if old in self.unreadable
        }
        self.objects = ReadWhenAsked(reader.object_paths, self._object)

    def renamed(self, path: TreePath) -> TreePath:
        """The path here of the leaf at ``path`` of the wrapped reader."""
        if is_numbered(path) and int(path[-2]) in self._names.get(path[:-3], {}):
            return (*path[:-2], self._names[path[:-3]][int(path[-2])], path[-1])
        return path

    def _own(self, name: str) -> str:
        return self._numbered[name]

    def _object(self, name: str) -> object:
        value, path = self._reader.objects[name], self.object_paths[name]
        known = self._names.get(path[:-3], {})
        if path[-1] == "params" and _GROUPS in path[-3:-2] and isinstance(value, list):
            return [known.get(number, number) if type(number) is int else number for number in value]
        return value


def is_numbered(path: TreePath) -> bool:
    """Whether this is the path of an optimizer's state for a numbered weight."""
    return len(path) > 2 and path[-3] == _STATE and str(path[-2]).isdecimal() and len(str(path[-2])) < 10


def _prefixes(reader: CheckpointReader) -> list[TreePath]:
    """The places of the optimizers that number their weights."""
    numbered = (info for info in reader.tensors.values() if is_numbered(info.path))
    return [*dict.fromkeys(info.path[:-3] for info in numbered if not is_carried(info, between_trees=False))]


def _names(
    reader: CheckpointReader, prefix: TreePath, mapping: MappingTable, in_model_order: bool
) -> dict[int, str] | None:
    groups = _groups(reader, prefix)
    if groups is None:
        return None
    if all(names is not None for _, names in groups):
        pairs = [pair for numbers, names in groups for pair in zip(numbers, names or (), strict=True)]
        return dict(pairs) if len({name for _, name in pairs}) == len(pairs) else None
    shapes = _shapes(reader, prefix)
    wanted = [[(number, shapes.get(number)) for number in numbers] for numbers, _ in groups]
    assign = _in_order if in_model_order else _only_assignment
    for weights in _weights(reader, prefix):
        if _fits(wanted, weights):
            once = _without_second_names(reader, weights, mapping)
            return assign(wanted, weights) or (assign(wanted, once) if _fits(wanted, once) else None)
    return None


def _fits(groups: _Groups, weights: _Weights) -> bool:
    """Whether there are weights with these shapes, one for each number. None fits any shape."""
    numbers = [pair for group in groups for pair in group]
    have = Counter(shape for _, shape in weights)
    need = Counter(shape for _, shape in numbers if shape is not None)
    return len(numbers) <= len(weights) and all(need[shape] <= have[shape] for shape in need)


def _in_order(groups: _Groups, weights: _Weights) -> dict[int, str] | None:
    """A weight for each number, in order within each group; None unless there is exactly one way."""
    names: dict[int, str] = {}
    for group in groups:
        places = _only_way([shape for _, shape in group], [shape for _, shape in weights])
        if places is None:
            return None
        names |= {number: weights[path][0] for (number, _), path in zip(group, places, strict=True)}
    return names if len(set(names.values())) == len(names) else None


def _without_second_names(
    reader: CheckpointReader, weights: _Weights, mapping: MappingTable
) -> list[tuple[str, _Shape]]:
    """``weights`` without those that have the same bits as the weight to which ``mapping`` ties them."""
    shapes = dict(weights)
    names = {str(info.path[-1]): name for name, info in reader.tensors.items() if not is_numbered(info.path)}
    second = set()
    for rule in mapping.rules:
        first = mapping.rule_of(rule.tied_to) if rule.tied_to else rule
        for convention in rule.sides if first is not rule else ():
            ends = [[entry.path.text for entry in side.entries(convention)] for side in (rule, first)]
            for end, other in itertools.product(*ends):
                for name in (n for n in shapes if f".{n}".endswith(f".{end}")):
                    same = name.removesuffix(end) + other
                    if same not in shapes:
                        continue
                    info, first_info = (reader.tensors[names[n]] for n in (name, same))
                    if alike(reader, identity(info.name, info.shape, info.dtype), first_info):
                        second.add(name)
    return [pair for pair in weights if pair[0] not in second]


def _lines(file: Path) -> list[str]:
    expected = "a text file with the order of an optimizer's weights"
    try:
        text = read_text(file, CheckpointError, most=_MAX_ORDER_BYTES, expected=expected)
    except OSError as error:
        raise CheckpointError(f"{file}: expected {expected}: {error.strerror}") from error
    return [line for line in map(str.strip, text.splitlines()) if line]


def _listed(
    reader: CheckpointReader, prefixes: Sequence[TreePath], lines: Sequence[str]
) -> dict[TreePath, dict[int, str]]:
    """The name on each number's line. CheckpointError unless the names belong to weights of these shapes."""
    shapes = {
        (prefix, number): shape for prefix in prefixes for number, shape in _shapes(reader, prefix).items()
    }
    numbers: list[tuple[TreePath, int]] = []
    for prefix in prefixes:
        groups = _groups(reader, prefix) or []
        own = {number for group, _ in groups for number in group} | {n for p, n in shapes if p == prefix}
        numbers += [(prefix, number) for number in sorted(own)]
    where = " and ".join(".".join(map(str, (*prefix, _STATE))) for prefix in prefixes)
    if len(lines) != len(numbers) or len(set(lines)) != len(lines):
        raise CheckpointError(
            f"expected {len(numbers)} different names for the numbers of {where} in {reader.path}, got {len(lines)} "
            f"names, of which {len(set(lines))} differ"
        )
    there = [dict(weights) for weights in _weights(reader, prefixes[0])]
    weights = next((w for w in there if w.keys() >= set(lines)), None)
    if weights is None:
        other = next(line for line in lines if line not in (there[0] if there else {}))
        raise CheckpointError(f"expected names of weights of {reader.path} for {where}, got {other!r:.200}")
    for (prefix, number), name in zip(numbers, lines, strict=True):
        if shapes.get((prefix, number), weights[name]) != weights[name]:
            raise CheckpointError(
                f"{'.'.join(map(str, (*prefix, _STATE)))}.{number} of {reader.path} is assigned to {name}: expected a "
                f"state of shape {weights[name]}, found {shapes[prefix, number]}"
            )
    name_of = dict(zip(numbers, lines, strict=True))
    return {prefix: {n: name for (p, n), name in name_of.items() if p == prefix} for prefix in prefixes}


def _only_assignment(groups: _Groups, weights: _Weights) -> dict[int, str] | None:
    """A weight for each number; None if there are several ways. There are weights of all shapes."""
    numbers = [pair for group in groups for pair in group]
    by_shape: dict[_Shape, list[str]] = {}
    for name, shape in weights:
        by_shape.setdefault(shape, []).append(name)
    with_shape = [(number, shape) for number, shape in numbers if shape is not None]
    if any(len(by_shape[shape]) > 1 for _, shape in with_shape):
        return None
    names = {number: by_shape[shape][0] for number, shape in with_shape}
    rest = [name for name, _ in weights if name not in set(names.values())]
    open_numbers = [number for number, shape in numbers if shape is None]
    if len(open_numbers) > 1 or (open_numbers and len(rest) > 1):
        return None
    return names | dict(zip(open_numbers, rest, strict=False))


def _groups(reader: CheckpointReader, prefix: TreePath) -> list[tuple[list[int], list[str] | None]] | None:
    """The numbers of each group, and their names if the group has them; None if there are no groups."""
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
    """The shape of each number's weight: the shape of its moments, which have more axes than its step count."""
    shapes: dict[int, _Shape] = {}
    for info in reader.tensors.values():
        if is_numbered(info.path) and info.path[:-3] == prefix and info.path[-1] != "step":
            number = int(info.path[-2])
            shapes[number] = max(shapes.get(number, ()), info.shape, key=len)
    return shapes


def _weights(reader: CheckpointReader, prefix: TreePath) -> list[list[tuple[str, _Shape]]]:
    """Names and shapes of possible weights, by place, usual keys first."""
    places: dict[TreePath, list[tuple[str, _Shape]]] = {}
    for info in reader.tensors.values():
        last = str(info.path[-1])
        if info.path[: len(prefix)] == prefix and prefix:
            continue
        if is_numbered(info.path) or info.dtype.kind in "biu" or last.endswith(_BUFFERS):
            continue
        places.setdefault(info.path[:-1], []).append((last, info.shape))
    order = sorted(places, key=lambda path: (not path or path[-1] not in _WEIGHTS, len(path)))
    return [places[path] for path in order]


def _only_way(wanted: Sequence[_Shape | None], there: Sequence[_Shape]) -> list[int] | None:
    """Where in ``there`` each shape of ``wanted`` is, in order; None unless there is one way. None fits any shape."""
    first = _leftmost(wanted, there)
    last = _leftmost(wanted[::-1], there[::-1])
    if first is None or last is None or first != [len(there) - 1 - position for position in last[::-1]]:
        return None
    return first


def _leftmost(wanted: Sequence[_Shape | None], there: Sequence[_Shape]) -> list[int] | None:
    places, start = [], 0
    for shape in wanted:
        position = next((k for k in range(start, len(there)) if shape is None or there[k] == shape), None)
        if position is None:
            return None
        places.append(position)
        start = position + 1
    return places
