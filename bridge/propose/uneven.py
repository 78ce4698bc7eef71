"""Numbers that only some rules have: the role of a layer in a T5 block, or layers that differ from others.

    decoder.block.{i}.layer.{j}.SelfAttention.q    j is 0 in all, but other rules have a layer 1 and 2:
    decoder.block.{i}.layer.0.SelfAttention.q      the number is written out
    layers.{i}.moe.router                          i is 1 and 2, other rules also have a layer 0: the rule is optional

A conversion expects a tensor for each number that other rules have at the same place (`translation.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bridge.propose.text import ProposedRule

Numbers = tuple[int, ...]
_INDEX = re.compile(r"\{[ijkl]\}")


def settled(rules: Sequence[ProposedRule]) -> list[ProposedRule]:
    """The rules with such numbers written out where possible, and marked optional elsewhere."""
    rules = list(rules)
    # A written number distinguishes the places after it, so all rules are checked again.
    while (uneven := _next(rules)) is not None:
        number, rule = uneven
        rules[number] = rule
    return rules


def _next(rules: Sequence[ProposedRule]) -> tuple[int, ProposedRule] | None:
    """The position of one rule to change, and the changed rule; None if there is none."""
    numbers: dict[tuple[int, str], set[int]] = {}
    for rule in rules:
        for side, where, _, values in () if rule.optional else _places(rule):
            numbers.setdefault((side, where), set()).update(values)
    for position, rule in enumerate(rules):
        uneven = {
            index: values
            for side, where, index, values in (() if rule.optional else _places(rule))
            if set(values) != numbers[side, where]
        }
        paths = [text.partition(" : ")[0] for text in (*rule.a, *rule.b)]
        written = (
            len(values) == 1 and all(index in path for path in paths) for index, values in uneven.items()
        )
        if not all(written):
            return position, replace(rule, optional=True)
        if uneven:
            return position, _written(rule, {index: number for index, (number,) in uneven.items()})
    return None


def _places(rule: ProposedRule) -> Iterator[tuple[int, str, str, Numbers]]:
    """Each index of each path: the side, the text up to the index, the index, and its numbers."""
    for side, (texts, entries) in enumerate(((rule.a, rule.fit.a), (rule.b, rule.fit.b))):
        for text, entry in zip(texts, entries, strict=True):
            path = text.partition(" : ")[0]
            known = dict(zip(_INDEX.findall(entry.path), entry.family.numbers, strict=True))
            for match in _INDEX.finditer(path):
                yield side, path[: match.end()], match.group(), known[match.group()]


def _written(rule: ProposedRule, numbers: Mapping[str, int]) -> ProposedRule:
    a, b = rule.a, rule.b
    for index, number in numbers.items():
        a, b = (tuple(text.replace(index, str(number)) for text in side) for side in (a, b))
    return replace(rule, a=a, b=b)
