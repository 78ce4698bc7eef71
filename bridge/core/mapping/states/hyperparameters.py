"""Hyperparameters of PyTorch's optimizers, which name weights: the names follow the weights into other conventions.

    optimizer.param_groups.0.params = ["layers.0.wq.weight", ...]        a group's weights, in a list
    optimizer.param_groups.layers.0.wq.weight.lr = 0.1                   flattened: a value for each weight

Trees store them unchanged. They are translated when a convention with dotted names is written, from a tree or from
another convention with dotted names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bridge.core.formats.tensors.base import CheckpointReader, TreePath
from bridge.core.mapping.language.conventions import Convention
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.table import MappingTable

_GROUPS = "param_groups"


@dataclass(frozen=True)
class _Place:
    """A weight's place in the rules: one rule, with values of the path's indices. parts: the axes of each part."""

    rule: int
    values: Mapping[str, int]
    parts: frozenset[frozenset[str]]


def followed(
    reader: CheckpointReader,
    paths: Mapping[str, TreePath],
    mapping: MappingTable,
    target: Convention,
    weights: Iterable[str],
) -> tuple[dict[str, TreePath], dict[TreePath, object]]:
    """Objects by name in the source with their paths in the target, and further objects by path with new values.

    paths: of the source's objects. weights: all weights of the target.

    Raises MappingError if weights that become one weight have different hyperparameters.
    """
    lists = {name: path for name, path in paths.items() if _is_list(path)}
    values = {name: key for name, path in paths.items() if (key := _flat_key(path)) is not None}
    if target.is_tree or not (lists or values):
        return dict(paths), {}
    listed = {name: reader.objects[name] for name in lists}
    named = {w for value in listed.values() for w in (value if isinstance(value, list | tuple) else ())}
    named = {w for w in named if isinstance(w, str)}
    candidates = {key.rpartition(".")[0] for key in values.values()}
    written = _convention(mapping, named | candidates)
    if written is None or written == target.name:
        return dict(paths), {}
    known = _places(mapping, written, named | candidates)
    there = _places(mapping, target.name, _optimized(mapping, target.name, weights))
    by_rule: dict[int, list[tuple[str, _Place]]] = {}
    for w, group in there.items():
        by_rule.setdefault(group.rule, []).append((w, group))
    renamed = {
        weight: [w for w, other in by_rule.get(group.rule, []) if _same(group, other)]
        for weight, group in known.items()
    }
    result = {name: path for name, path in paths.items() if name not in lists and name not in values}
    new: dict[TreePath, object] = {}
    for name, value in listed.items():
        assert isinstance(value, list | tuple)
        new[lists[name]] = list(dict.fromkeys(w for weight in value for w in renamed[weight]))
    origin: dict[TreePath, str] = {}
    for name, key in values.items():
        weight, _, entry = key.rpartition(".")
        for w in renamed[weight]:
            path = (*paths[name][:-1], f"{_GROUPS}.{w}.{entry}")
            value = reader.objects[name]
            if path in new and new[path] != value:
                raise MappingError(
                    f"expected equal hyperparameters of weights that become {w}, got {new[path]!r} in {origin[path]} "
                    f"and {value!r} in {name}"
                )
            new[path], origin[path] = value, name
    return result, new


def _is_list(path: TreePath) -> bool:
    return len(path) > 2 and path[-3] == _GROUPS and path[-1] == "params"


def _flat_key(path: TreePath) -> str | None:
    """The part of a flattened optimizer's key after ``param_groups.``."""
    last = path[-1]
    return (
        last.removeprefix(_GROUPS + ".") if isinstance(last, str) and last.startswith(_GROUPS + ".") else None
    )


def _convention(mapping: MappingTable, weights: Iterable[str]) -> str | None:
    """The one convention that knows all of these names; None if no convention does, or several."""
    names = set(weights)
    fitting = [
        name
        for name, convention in mapping.conventions.items()
        if not convention.is_tree and names == _places(mapping, name, names).keys()
    ]
    return fitting[0] if names and len(fitting) == 1 else None


def _optimized(mapping: MappingTable, convention: str, weights: Iterable[str]) -> Iterator[str]:
    """The names that an optimizer uses for these weights: a rule's moments may have separate names."""
    for weight, group in _places(mapping, convention, weights, moments=False).items():
        rule = mapping.rules[group.rule]
        own = rule.moments.get(convention)
        yield from (entry.path.format(group.values) for entry in own) if own else (weight,)


def _places(
    mapping: MappingTable, convention: str, weights: Iterable[str], *, moments: bool = True
) -> dict[str, _Place]:
    entries = [
        (k, e) for k, rule in enumerate(mapping.rules) for e in rule.entries(convention, moments=moments)
    ]
    groups = {}
    for weight in weights:
        for number, entry in entries:
            values = entry.path.match(weight)
            if values is not None:
                groups[weight] = _Place(number, values, frozenset(entry.axis_sets))
                break
    return groups


def _same(a: _Place, b: _Place) -> bool:
    """Whether two weights of one rule share elements: a common part, with equal values of common indices."""
    shared = a.values.keys() & b.values.keys()
    return not a.parts.isdisjoint(b.parts) and all(a.values[index] == b.values[index] for index in shared)
