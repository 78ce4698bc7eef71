"""Many findings of one kind as one line: the sentence, the count, and the first names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from bridge.commands.output import Console, print_line
from bridge.core.text import first_of

_NAMED = 3
_LISTED = 8
_NUMBER = re.compile(r"\b(?:[0-9a-f]{8}|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\b")
_PARAM_GROUP = re.compile(r".*\bparam_groups[./][^./]+")
_NUMBERS = re.compile(r"#(?:,? #)*,?")


def grouped(findings: Iterable[tuple[str, str]], most: int = _NAMED) -> list[str]:
    """Lines ``name: text``. If more than ``most`` texts differ in names and numbers only, they become one line.

        x: chunk at (0,): expected CRC-32C 2fa5ad7d, got 8cd292ef     (2 such findings, one line each)
        a, b, c and 57 more (60 in all), of the first: chunk at (0,): ...      (60 such findings)

    ``--json`` has all of them.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for name, text in findings:
        shape = _NUMBERS.sub("#", _NUMBER.sub("#", text.replace(name, "\0") if name else text))
        kinds.setdefault(shape, []).append((name, text))
    lines = []
    for members in kinds.values():
        if len(members) <= most:
            lines += [f"{name}: {text}" for name, text in members]
            continue
        names = list(dict.fromkeys(name for name, _ in members))
        shown = first_of(names, _NAMED)
        alike = len({text for _, text in members}) == 1
        lines.append(f"{shown} ({len(members)} in all){'' if alike else ', of the first'}: {members[0][1]}")
    return lines


def by_param_group(names: Iterable[str]) -> list[str]:
    """The names, in which each of an optimizer's ``param_groups`` stands once.

    x.param_groups.0.lr, x.param_groups.0.betas -> x.param_groups.0 (2 values)
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        group = _PARAM_GROUP.match(name)
        groups.setdefault(group[0] if group else name, []).append(name)
    return [
        members[0] if len(members) == 1 else f"{group} ({len(members)} values)"
        for group, members in groups.items()
    ]


def print_left_alone(out: Console, names: Mapping[str, str]) -> None:
    """Say which files next to a checkpoint were not read, and why, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in names.items():
        reasons.setdefault(why, []).append(name)
    for why, alike in reasons.items():
        print_line(out, f"not read: {first_of(alike, _LISTED)}: {why}")
