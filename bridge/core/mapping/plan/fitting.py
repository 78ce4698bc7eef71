"""Which shipped families have the names of one checkpoint in one convention, and the names of another in another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bridge.core.mapping.language.conventions import Convention
from bridge.core.mapping.language.rules import family_names, load_mapping
from bridge.core.mapping.states.source_tree import NameIndex

_SAMPLE = 60
_MOST = 0.9
"""The least fraction of names that a convention must know; optimizer state is not recognized by name."""


def fitting(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
    """The families that may translate names ``a`` to names ``b``, and the convention of ``b``; from names alone."""
    fitting_names = []
    left, right = _sample(a), _sample(b)
    for name in family_names() if left and right else ():
        table = load_mapping(name)
        known = {c: NameIndex(table.rules, c) for c in table.conventions}
        sides = {c: [_fits(names, known[c], table.conventions[c]) for names in (left, right)] for c in known}
        into = [c for c, (_, of_b) in sides.items() if of_b]
        if into and any(of_a for c, (of_a, _) in sides.items() if c != into[0]):
            fitting_names.append((name, into[0]))
    return fitting_names


def _sample(names: Sequence[str]) -> list[str]:
    weights = [name for name in names if not re.search(r"optim|opt_state|step|count|rng", name)]
    return weights[:: max(1, len(weights) // _SAMPLE)]


def _fits(names: Iterable[str], index: NameIndex, convention: Convention) -> bool:
    separator = convention.separator
    other = "." if separator == "/" else "/"
    answers = [
        any(
            index.knows(name[start:])
            for start in (0, *(m.end() for m in re.finditer(re.escape(separator), name)))
        )
        for name in (
            candidate if separator in candidate else candidate.replace(other, separator)
            for candidate in names
        )
    ]
    return sum(answers) >= _MOST * len(answers)
