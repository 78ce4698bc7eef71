"""Reads the names of a checkpoint as one of a mapping's conventions.

The rules find weights under any prefix. They also find an optimizer's entries, which are named after their weights:

    opt_state/1/0/mu/layers/3/mlp/up/kernel
    |---- before ---|------- weight -------|         "before" contains "mu": a first moment

    optimizer.state.layers.3.mlp.up.weight.exp_avg
    |--- before ----|------ weight --------|-after-|

The place of the weights is the pair of "before" and "after" with which all required rules find their tensors. There may
be several optimizer states, each for different weights, as made by optax's `partition`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from bridge.core.formats.tensors.base import TensorInfo
from bridge.core.mapping.fit.problems import complete, needed
from bridge.core.mapping.language.conventions import (
    BY_WEIGHT,
    WEIGHT,
    WORDS,
    Convention,
    Section,
    State,
    tree_places,
)
from bridge.core.mapping.language.entries import Rule
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.states.beside_weights import OPTIMIZER_KEYS
from bridge.core.text import did_you_mean

_BEHIND = ("", "/value")
"""Possible suffixes of a weight's name in a tree: nnx stores the values of its variables under a key."""

_INSIDE: Mapping[str, Section] = {word: section for section, word in WORDS.items()}

Tensors = dict[str, TensorInfo]
"""By weight."""


@dataclass(frozen=True)
class SourceState:
    """One optimizer state: for each section the tensor of each weight. count: the one step count of all weights."""

    sections: Mapping[Section, Tensors]
    count: TensorInfo | None


@dataclass(frozen=True)
class SourceTree:
    """A checkpoint's tensors. ``convention``: has the places where they were found; its states are as in ``states``.

    others: the tensors that belong to no weight, by name in the convention. elsewhere: other possible places.
    """

    convention: Convention
    weights: Tensors
    states: tuple[SourceState, ...]
    others: Mapping[str, TensorInfo]
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Seen:
    """One way to read a tensor's name as a weight's name. before, after: the text around the weight's name.

    node, inner: for an optimizer state, the text before the moment's name, and from there to the weight's name.
    """

    weight: str
    section: Section
    before: str
    after: str
    node: str = ""
    inner: str = ""


class NameIndex:
    """Finds the rules of a convention that know a weight's name: by one regular expression for all rules, then by each.

    moments: whether the names are those of optimizer state.
    """

    def __init__(self, rules: Iterable[Rule], convention: str, *, moments: bool = False) -> None:
        self._rules = [
            (entry.path, rule) for rule in rules for entry in rule.entries(convention, moments=moments)
        ]
        self._any = re.compile("|".join(f"(?:{path.regex})" for path, _ in self._rules) or r"(?!)")
        self._owners: dict[str, list[Rule]] = {}

    def knows(self, weight: str) -> bool:
        """Whether any rule has a tensor of this name."""
        return self._any.fullmatch(weight) is not None

    def rules_of(self, weight: str) -> list[Rule]:
        """All rules that have a tensor of this name."""
        if weight not in self._owners:
            known = self._rules if self.knows(weight) else []
            self._owners[weight] = [rule for path, rule in known if path.match(weight) is not None]
        return self._owners[weight]


def find(tensors: Iterable[TensorInfo], mapping: MappingTable, only: str | None, where: str) -> SourceTree:
    """Read the tensors as the convention whose required rules all find tensors; among several, the one that finds most.

    only: the convention, if it is known. If no convention fits, the one that finds most is returned, so that an error
    can list the missing tensors.

    Raises MappingError, beginning with the mapping's name, if two conventions, or two places of the weights, fit.
    """
    tensors = list(tensors)
    names = list(mapping.conventions)
    if only is not None:
        known = mapping.convention_of(only)
        if known is None:
            raise MappingError(
                f"expected a convention of mapping {mapping.name} ({', '.join(mapping.conventions)}), got {only!r}"
                f"{did_you_mean(only, mapping.conventions)}"
            )
        names = [known]
    trees = {name: _as(tensors, mapping, mapping.conventions[name], where) for name in names}
    # If names are not distinctive, such as "w", the usual place decides. Then the convention with longer names, which
    # leave less to a root, wins, as with "transformer.wte" and "wte". Some differ only in their optimizer state.
    ranks = {
        name: (
            fits(f, mapping),
            len(f.weights),
            f.convention.places["weights"] == mapping.conventions[name].places["weights"],
            -len(f.convention.places["weights"]),
            sum(len(tensors) for state in f.states for tensors in state.sections.values()),
        )
        for name, f in trees.items()
    }
    best = max(ranks.values())
    chosen = [name for name, rank in ranks.items() if rank == best]
    if len(chosen) > 1 and best[1] and not _alike(chosen, mapping.rules, trees[chosen[0]].weights):
        raise MappingError(
            f"mapping {mapping.name}: the names in {where} fit the conventions {' and '.join(chosen)} equally "
            "well; choose one (--from)"
        )
    if elsewhere := trees[chosen[0]].elsewhere:
        shown = " and ".join(map(repr, (trees[chosen[0]].convention.places["weights"], *elsewhere)))
        raise MappingError(
            f"mapping {mapping.name}: expected the weights of one model in {where}, found them at {shown}: leave the "
            "others out (of a source: --select, --drop), or give the place in the mapping's [convention] table"
        )
    return trees[chosen[0]]


def _alike(conventions: Sequence[str], rules: Iterable[Rule], weights: Iterable[str]) -> bool:
    """Whether these conventions know these weights by the same entries, and so read them in the same way."""
    first, *others = conventions
    index = NameIndex(rules, first)
    used = {id(rule): rule for weight in weights for rule in index.rules_of(weight)}
    return all(rule.entries(other) == rule.entries(first) for rule in used.values() for other in others)


def fits(tree: SourceTree, mapping: MappingTable) -> bool:
    """Whether every rule that the convention requires has a tensor."""
    index = NameIndex(mapping.rules, tree.convention.name)
    return complete(_used(tree.weights, index, mapping), needed(mapping.rules, tree.convention.name))


def _used(weights: Iterable[str], index: NameIndex, mapping: MappingTable) -> set[int]:
    """The rules of these weights, by id. A second name also counts for the first one."""
    rules = [rule for weight in weights for rule in index.rules_of(weight)]
    firsts = [mapping.rule_of(rule.tied_to) for rule in rules if rule.is_second_name]
    return {id(rule) for rule in (*rules, *firsts)}


def _as(
    tensors: Sequence[TensorInfo], mapping: MappingTable, convention: Convention, where: str
) -> SourceTree:
    index = NameIndex(mapping.rules, convention.name)
    kept_index = NameIndex(mapping.rules, convention.name, moments=True)
    named = {convention.joined(info.path): info for info in tensors}
    weights: dict[tuple[str, str], Tensors] = defaultdict(dict)
    kept: dict[tuple[str, str, str], dict[Section, Tensors]] = defaultdict(lambda: defaultdict(dict))
    for name, info in named.items():
        for seen in _candidates(name, convention):
            if seen.section == "weights":
                if index.knows(seen.weight):
                    weights[seen.before, seen.after][seen.weight] = info
            elif kept_index.knows(seen.weight):
                # Shorter names belong to other weights with the same ending.
                kept[seen.node, seen.inner, seen.after][seen.section][seen.weight] = info
                break
    needs = needed(mapping.rules, convention.name)
    usual = cast(tuple[str, str], tuple(convention.places["weights"].split(WEIGHT)))
    (before, after), *elsewhere = _places(weights, usual, index, needs, mapping)
    places, states = [], []
    for prefix, sections in _states(kept, convention):
        paths = (info.path for tensors in sections.values() for info in tensors.values())
        texts = _texts(prefix, next(paths), convention)
        count = named.get(prefix[0] + "count" + prefix[2]) if convention.one_step else None
        members = frozenset(w for tensors in sections.values() for w in tensors)
        places.append(State(texts, members))
        states.append(SourceState(sections, count))
    if len(places) == 1:
        places = [State(places[0].places)]
    of_weights = weights.get((before, after), {})
    taken = {info.name for info in of_weights.values()}
    taken |= {info.name for s in states for tensors in s.sections.values() for info in tensors.values()}
    taken |= {s.count.name for s in states if s.count is not None}
    others = {name: info for name, info in named.items() if info.name not in taken}
    at = convention.at(f"{before}{WEIGHT}{after}", tuple(places))
    return SourceTree(at, of_weights, tuple(states), others, tuple(f"{b}{WEIGHT}{a}" for b, a in elsewhere))


def _candidates(name: str, convention: Convention) -> Iterator[_Seen]:
    """Every way to read a name as a weight's name, the longest weight names first."""
    separator = convention.separator
    starts = [0, *(match.end() for match in re.finditer(re.escape(separator), name))]
    if not convention.is_tree:
        for section in (*BY_WEIGHT, "step"):
            if name.endswith(f".{section}"):
                stop = len(name) - len(section) - 1
                for start in (s for s in starts if s < stop and f".{name[:s]}".endswith(".state.")):
                    yield _Seen(name[start:stop], section, "", "", node=name[:start])
    for after in _BEHIND if convention.is_tree else ("",):
        if not name.endswith(after):
            continue
        stop = len(name) - len(after)
        for start in (s for s in starts if s < stop):
            before = name[:start]
            words = [part for part in before.split("/") if part in _INSIDE] if convention.is_tree else []
            if words:
                node, _, inner = f"/{before}".rpartition(f"/{words[-1]}/")
                node = f"{node}/".removeprefix("/")
                yield _Seen(name[start:stop], _INSIDE[words[-1]], before, after, node, inner)
            elif before.partition(separator)[0] not in OPTIMIZER_KEYS and "optimizer.state." not in before:
                yield _Seen(name[start:stop], "weights", before, after)


def _states(
    kept: Mapping[tuple[str, str, str], dict[Section, Tensors]], convention: Convention
) -> Iterator[tuple[tuple[str, str, str], dict[Section, Tensors]]]:
    """The optimizer states. In a tree, all have the same text between a moment's name and a weight's."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for (_, inner, after), sections in kept.items():
        counts[inner, after] += sum(map(len, sections.values()))
    most = max(counts.values(), default=0)
    for prefix, sections in kept.items():
        if not convention.is_tree or counts[prefix[1:]] == most:
            yield prefix, sections


def _texts(
    prefix: tuple[str, str, str], path: Sequence[str | int], convention: Convention
) -> dict[Section, str]:
    """The places of a state, from the path of one of its tensors, which distinguishes lists from keys."""
    node, inner, after = prefix
    if not convention.is_tree:
        return {section: f"{node}{WEIGHT}.{section}" for section in (*BY_WEIGHT, "step")}
    depth, within = node.count("/"), inner.count("/")
    start = convention.written(tuple(path[:depth]))
    between = convention.written(tuple(path[depth + 1 : depth + 1 + within]))
    return tree_places(start + "/" if start else "", between + "/" if between else "", after)


def _places(
    places: Mapping[tuple[str, str], Tensors],
    usual: tuple[str, str],
    index: NameIndex,
    needs: Mapping[str, set[int]],
    mapping: MappingTable,
) -> list[tuple[str, str]]:
    """The place of the weights, and other possible places.

    It is the place where all required rules find a tensor; else the usual place, or the place with the most tensors.
    For a part of a model, which no rule requires, it is the place with the most tensors, since short names recur.
    """
    whole = [prefix for prefix, weights in places.items() if complete(_used(weights, index, mapping), needs)]
    if not any(needs.values()):
        most = max((len(weights) for weights in places.values()), default=0)
        whole = [prefix for prefix, weights in places.items() if len(weights) == most]
    if usual in whole:
        return [usual]
    if whole:
        return whole
    return [max(places, key=lambda prefix: len(places[prefix])) if places and usual not in places else usual]
