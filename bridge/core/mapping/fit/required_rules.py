"""Which tensors a model must have: for required rules, for parts of the model, and for all numbers.

    [[rule]]                                   # a model has it
    [[rule]]
    optional = true                            # a model may have it
    [[rule]]
    optional = "decoder"                       # a part: a model has all of the part's tensors, or none
    [[rule]]
    optional = "experts of layer {i}"          # a part of each layer: layers may differ, such as dense ones and experts

A rule that has a tensor for one layer must have one for each layer, unless it is optional or belongs to a part of each
layer. Only this check notices that the tensors of the last layer are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bridge.core.mapping.fit.problems import NAMES
from bridge.core.mapping.language.entries import PathPattern, Rule
from bridge.core.text import first_of


def needed(rules: Sequence[Rule], convention: str) -> dict[str, set[int]]:
    """The required rules of a convention, by id, for each part of the model that needs them; "": any model."""
    by_part: dict[str, set[int]] = {"": set()}
    for rule in rules:
        if rule.entries(convention) and not rule.is_second_name and (rule.part or not rule.optional):
            by_part.setdefault(rule.part, set()).add(id(rule))
    return by_part


def complete(used: set[int], needs: Mapping[str, set[int]]) -> bool:
    """Whether all required rules have tensors, and for each part either all of its rules or none."""
    return all(used >= rules or (part and not used & rules) for part, rules in needs.items())


def idle(rules: Sequence[Rule], convention: str, owners: Mapping[str, Rule]) -> list[Rule]:
    """The required rules that have no tensor. owners: the rule of each weight."""
    used = {id(rule) for rule in owners.values()}
    parts = {rule.part for rule in owners.values()} | {""}
    due = set().union(*(ids for part, ids in needed(rules, convention).items() if part in parts))
    return [rule for rule in rules if id(rule) in due - used]


def num_layers(convention: str, owners: Mapping[str, Rule]) -> int:
    """The highest count of numbers in names with one number; 0 if no name counts, or if blocks count separately."""
    seen: dict[str, set[int]] = {}
    for weight, rule in owners.items():
        if convention in rule.cases:
            return 0
        for entry in rule.entries(convention):
            values = entry.path.match(weight) or {}
            if len(values) == 1:
                seen.setdefault(entry.path.text.partition("{")[0], set()).update(values.values())
    return max(map(len, seen.values()), default=0)


def uneven(rules: Sequence[Rule], convention: str, owners: Mapping[str, Rule]) -> Iterator[tuple[str, str]]:
    """Find rules without a tensor for a number that other rules have. owners: the rule of each weight.

    A problem is a sentence with `NAMES` in it, and the rule to name there, see `Problems.add`.
    """
    by_id = {id(rule): rule for rule in rules}
    # Numbers are grouped by the name before them, so that blocks and the experts of each layer are counted separately.
    seen: dict[str, dict[int, set[int]]] = {}
    parts: dict[tuple[str, str], set[int]] = {}
    for weight, rule in owners.items():
        for entry in rule.entries(convention):
            values = entry.path.match(weight)
            if values is None or (rule.optional and not rule.part):
                continue
            if rule.of_each:
                parts.setdefault((rule.part, rule.part_at(values)), set()).add(id(rule))
            for index, value in values.items():
                if index not in rule.part:
                    before = entry.path.text.partition(index)[0]
                    layer_part = PathPattern(before).format(values) + index if before else index
                    seen.setdefault(layer_part, {}).setdefault(id(rule), set()).add(value)
    for layer_part, numbers in seen.items():
        everything = set().union(*numbers.values())
        for key, there in numbers.items():
            if missing := sorted(everything - there):
                yield (
                    f"rule {NAMES}: expected a tensor for each {layer_part} that other rules have, found none for "
                    f"{first_of(missing)}; if the model really lacks the tensor, mark the rule optional",
                    str(by_id[key]),
                )
    due = needed(rules, convention)
    lacking: dict[int, list[str]] = {}
    for (part, at), have in parts.items():
        for key in due[part] - have:
            lacking.setdefault(key, []).append(at)
    for key, places in lacking.items():
        yield (
            f"rule {NAMES}: expected a tensor wherever other rules of the same part match one, found none for "
            f"{first_of(places)}",
            str(by_id[key]),
        )
