"""Reads the names of a checkpoint as one of a mapping's conventions.

Weights are found by the rules, whatever stands before their names; so are the entries that an optimizer keeps for
them, which are named after the weight:

    opt_state/1/0/mu/layers/3/mlp/up/kernel
    |---- before ---|------- weight -------|         "mu" is in what stands before: a first moment

    optimizer.state.layers.3.mlp.up.weight.exp_avg
    |--- before ----|------ weight --------|-after-|

The place of the weights is the one, before and after, in which all required rules find theirs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from bridge.formats.base import TensorInfo
from bridge.mapping.conventions import MOMENTS, SECTIONS, WEIGHT, Convention, Section
from bridge.mapping.errors import MappingError
from bridge.mapping.rules import MappingTable, Rule

_AFTER: Mapping[str, Mapping[str, Section]] = {
    ".": {"": "weights", ".exp_avg": "exp_avg", ".exp_avg_sq": "exp_avg_sq", ".step": "step"},
    "/": {"": "weights", "/value": "weights"},
}
_INSIDE: Mapping[str, Section] = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_OPTIMIZER = frozenset({"optimizer", "optimizers", "optim", "opt_state", "opt"})

Places = dict[tuple[str, str], dict[str, TensorInfo]]
"""For what stands before and after the weight: the tensor of each weight there."""


@dataclass(frozen=True)
class Found:
    """A checkpoint's tensors by section and weight. ``convention``: with the places where they were found.

    count: the one step count of a convention that has one. others: what belongs to no weight, by name as the
    convention writes it.
    """

    convention: Convention
    sections: Mapping[Section, Mapping[str, TensorInfo]]
    count: TensorInfo | None
    others: Mapping[str, TensorInfo]


class NameIndex:
    """Which rules of a convention know a weight's name: one regular expression for all, then single ones."""

    def __init__(self, rules: Iterable[Rule], convention: str) -> None:
        self._rules = [(entry.path, rule) for rule in rules for entry in rule.entries(convention)]
        self._any = re.compile("|".join(f"(?:{path.regex})" for path, _ in self._rules) or r"(?!)")
        self._owners: dict[str, list[Rule]] = {}

    def knows(self, weight: str) -> bool:
        """Whether any rule has a tensor of this name."""
        return self._any.fullmatch(weight) is not None

    def rules_of(self, weight: str) -> list[Rule]:
        """All rules that have."""
        if weight not in self._owners:
            known = self._rules if self.knows(weight) else []
            self._owners[weight] = [rule for path, rule in known if path.match(weight) is not None]
        return self._owners[weight]


def find(tensors: Iterable[TensorInfo], mapping: MappingTable, only: str | None, where: str) -> Found:
    """The tensors as the one convention whose required rules all find theirs; of several, the one that finds most.

    only: the convention that it is, if that is known. MappingError, beginning with the mapping's name, when two fit
    equally, or weights are in two places. Where none fits, the one that finds most, for what it lacks to be told.
    """
    tensors = list(tensors)
    names = [only] if only is not None else list(mapping.conventions)
    if only is not None and only not in mapping.conventions:
        raise MappingError(
            f"expected a convention of mapping {mapping.name} ({', '.join(mapping.conventions)}), got {only!r}"
        )
    found = {name: _as(tensors, mapping, mapping.conventions[name], where) for name in names}
    # Of names that say nothing, such as "w", the usual place decides.
    ranks = {
        name: (
            _fits(f, mapping),
            len(f.sections["weights"]),
            f.convention.places["weights"] == mapping.conventions[name].places["weights"],
        )
        for name, f in found.items()
    }
    best = max(ranks.values())
    chosen = [name for name, rank in ranks.items() if rank == best]
    if len(chosen) > 1 and best[1]:
        raise MappingError(
            f"mapping {mapping.name}: the names in {where} fit the conventions {' and '.join(chosen)} alike: say which "
            "it is (--from)"
        )
    return found[chosen[0]]


def _fits(found: Found, mapping: MappingTable) -> bool:
    """Whether every rule that the convention requires has a tensor."""
    index = NameIndex(mapping.rules, found.convention.name)
    used = {id(rule) for weight in found.sections["weights"] for rule in index.rules_of(weight)}
    return all(
        rule.optional or id(rule) in used for rule in mapping.rules if rule.entries(found.convention.name)
    )


def _as(tensors: Sequence[TensorInfo], mapping: MappingTable, convention: Convention, where: str) -> Found:
    index = NameIndex(mapping.rules, convention.name)
    named = {convention.joined(info.path): info for info in tensors}
    places: dict[Section, Places] = {section: defaultdict(dict) for section in SECTIONS}
    for name, info in named.items():
        for before, weight, after, section in _candidates(name, convention.separator):
            if index.knows(weight):
                places[section][before, after][weight] = info
    required = [rule for rule in mapping.rules if rule.entries(convention.name) and not rule.optional]
    chosen: dict[Section, tuple[str, str]] = {}
    for section in SECTIONS:
        if section == "step" and convention.one_step:
            continue
        usual = cast(tuple[str, str], tuple(convention.places[section].split(WEIGHT)))
        needed = required if section == "weights" else []
        chosen[section] = _place(places[section], usual, index, needed, section, mapping, where)
    sections = {section: places[section].get(place, {}) for section, place in chosen.items()}
    where_found = {section: f"{before}{WEIGHT}{after}" for section, (before, after) in chosen.items()}
    count = None
    if convention.one_step:
        where_found["step"] = _count_name(convention, chosen["exp_avg"][0])
        count = named.get(where_found["step"])
    taken = {info.name for section in sections.values() for info in section.values()}
    others = {
        name: info
        for name, info in named.items()
        if info.name not in taken and (count is None or info.name != count.name)
    }
    return Found(convention.at(where_found), {**{"step": {}}, **sections}, count, others)


def _candidates(name: str, separator: str) -> Iterator[tuple[str, str, str, Section]]:
    """Every way of seeing a weight in a name: what stands before it, itself, what stands after it, and its section."""
    starts = [0, *(match.end() for match in re.finditer(re.escape(separator), name))]
    for after, by_end in _AFTER[separator].items():
        if not name.endswith(after):
            continue
        stop = len(name) - len(after)
        for start in starts:
            if start >= stop:
                break
            before = name[:start]
            section = by_end
            if separator == "/":
                inside = [_INSIDE[part] for part in before.split("/") if part in _INSIDE]
                section = inside[-1] if inside else by_end
            if section != "weights" or before.partition(separator)[0] not in _OPTIMIZER:
                yield before, name[start:stop], after, section


def _place(
    places: Places,
    usual: tuple[str, str],
    index: NameIndex,
    required: Sequence[Rule],
    section: Section,
    mapping: MappingTable,
    where: str,
) -> tuple[str, str]:
    """The place of a section: where all required rules find a tensor; else the usual one, or the fullest."""
    whole = [
        place
        for place, weights in places.items()
        if {id(rule) for weight in weights for rule in index.rules_of(weight)} >= {id(r) for r in required}
    ]
    if usual in whole:
        return usual
    if len(whole) > 1 and section in MOMENTS and not required:
        # Names of other weights that end alike; the place of a whole model has the most.
        most = max(len(places[place]) for place in whole)
        whole = [place for place in whole if len(places[place]) == most]
    if len(whole) > 1:
        shown = " and ".join(repr(f"{before}{WEIGHT}{after}") for before, after in whole)
        raise MappingError(
            f"mapping {mapping.name}: expected the {section} of one model in {where}, found them at {shown}: leave the "
            "others out (--select, --drop), or give the place in the mapping's [convention] table"
        )
    if whole:
        return whole[0]
    return max(places, key=lambda place: len(places[place])) if places and usual not in places else usual


def _count_name(convention: Convention, before: str) -> str:
    """The step count beside the first moments: `opt_state/0/mu/` -> `opt_state/0/count`."""
    parts = before.split("/")
    if "mu" not in parts:
        return convention.places["step"]
    return "/".join([*parts[: len(parts) - 1 - parts[::-1].index("mu")], "count"])
