"""TOML rules that pair the tensors of two or more naming conventions; see docs/reference/mapping-language.md.

A convention with ``like`` and ``without = "bert."`` has the entries with this prefix, without the prefix: a model
without its heads, whose weights are at the root. A rule with an entry of only one convention gives a second name, under
which that convention stores the tensor again.

``interleaved(d)``: rotary positions rotate pairs of elements of ``d``. Hugging Face and flax store the first elements
of all pairs before the second elements (two halves), Meta and torchtitan store each pair together::

    d = 6     d                0 1 2 | 3 4 5        pair p, element e of it, at  3 e + p
              interleaved(d)   0 3 | 1 4 | 2 5                                   2 p + e

``interleaved(d, choice)`` is interleaved if the axis ``choice`` is 1, and plain ``d`` if it is 0: MaxText stores pairs
together only in Llama 3.1. A `config.json` decides, or the caller.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from bridge.core.mapping.language.entries import Entry, Rule
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.numbers import Numbering, parse_numbers
from bridge.core.mapping.language.table import MappingTable, Tied, convention_of_rules, parse_models
from bridge.core.text import did_you_mean
from bridge.core.text_files import MAX_TOML, parse_toml, read_text

_EXPECTED = "a mapping file (TOML)"
_ROTARY = re.compile(r"interleaved\(\s*(\w+)\s*[,)]")


def family_names() -> list[str]:
    """The mappings that ship with the package."""
    folder = files("bridge.core.mapping") / "families"
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load_mapping(name_or_path: str | Path) -> MappingTable:
    """A mapping by the name of a shipped family, or from a TOML file (a path with a separator or ending in .toml).

    Raises MappingError naming the file and, for a bad rule, its number.
    """
    text = str(name_or_path)
    if text in family_names():
        return parse_mapping(
            (files("bridge.core.mapping") / "families" / f"{text}.toml").read_text(encoding="utf-8"), text
        )
    path = Path(text)
    if path.suffix != ".toml" and path.name == text:
        known = ", ".join(family_names())
        raise MappingError(
            f"expected a mapping file (*.toml) or one of the families {known}, got {text!r}"
            f"{did_you_mean(text, family_names())}"
        )
    if "://" in text:
        raise MappingError(
            f"{text}: expected a mapping file on this machine, got a URL: copy the file here first"
        )
    try:
        content = read_text(path, MappingError, most=MAX_TOML, expected=_EXPECTED)
    except (OSError, ValueError) as error:
        raise MappingError(f"cannot read the mapping file {path}: {error}") from error
    return parse_mapping(content, str(path))


MappingLike = str | os.PathLike[str] | Mapping[str, object] | MappingTable
"""A mapping as callers give it: a family, a file, the content of a file as a table, or a loaded mapping."""


def mapping_table(
    mapping: MappingLike | None,
    axes: Mapping[str, int] | None = None,
    tied: Tied | None = None,
    *,
    any_model: bool = False,
) -> MappingTable | None:
    """The table of a ``mapping`` argument. The caller's axis sizes and ties override the table's own.

    any_model: use the table for any model that a `config.json` names. Raises MappingError, or ValueError if there are
    ``axes``, ``tied`` or ``any_model`` but no mapping.
    """
    if mapping is None:
        if axes:
            raise ValueError(f"expected a mapping for the axis sizes {dict(axes)}, got none")
        if tied is not None:
            raise ValueError(f"tied={tied}: expected a mapping, which says which weights are tied, got none")
        if any_model:
            raise ValueError("expected a mapping that is to be used for any model, got none")
        return None
    if isinstance(mapping, MappingTable):
        table = mapping
    elif isinstance(mapping, Mapping):
        table = mapping_of(mapping, "(given as a table)")
    else:
        table = load_mapping(os.fspath(mapping))
    table = table.for_any_model() if any_model else table
    table = replace(table.with_axes(axes), asked=frozenset(axes)) if axes else table
    return table.with_tied(tied)


def parse_mapping(content: str, origin: str) -> MappingTable:
    """A mapping from TOML text; ``origin`` names it in errors. Raises MappingError."""
    return mapping_of(parse_toml(content, f"mapping {origin}", MappingError, _EXPECTED), origin)


def mapping_of(table: Mapping[str, Any], origin: str) -> MappingTable:
    """A mapping from the content of a mapping file; ``origin`` names it in errors. Raises MappingError."""
    _only_keys(
        table,
        {"name", "description", "drop", "axes", "config", "rule", "convention", "models", "numbers", "tied"},
        f"mapping {origin}",
    )
    rules = table.get("rule", [])
    if not isinstance(rules, list) or not rules:
        raise MappingError(f"expected [[rule]] tables in mapping {origin}, got none")
    drop = table.get("drop", [])
    if not _is_texts(drop):
        raise MappingError(f"expected a list of tensor names for drop in mapping {origin}, got {drop!r}")
    axes = table.get("axes", {})
    for axis, value in axes.items() if isinstance(axes, dict) else ():
        if isinstance(value, bool) or not (isinstance(value, str) or (isinstance(value, int) and value >= 0)):
            raise MappingError(
                f"expected a number, a tensor name or another axis for axis {axis} of mapping {origin}, got {value!r}"
            )
    if not isinstance(axes, dict):
        raise MappingError(f"expected a table [axes] in mapping {origin}, got {axes!r}")
    config = table.get("config", {})
    if not isinstance(config, dict) or not all(_is_texts(texts) for texts in config.values()):
        raise MappingError(
            f"expected a table [config] of lists of fields in mapping {origin}, got {config!r:.200}"
        )
    tables = table.get("convention", {"torch": {}, "jax": {}})
    if not isinstance(tables, dict) or not all(_is_text_table(data) for data in tables.values()):
        raise MappingError(
            f"expected tables [convention.NAME] of texts in mapping {origin}, got {tables!r:.200}"
        )
    like = {name: data["like"] for name, data in tables.items() if "like" in data}
    for name, other in like.items():
        if other not in tables or other in like:
            known = ", ".join(known for known in tables if known not in like)
            raise MappingError(
                f"expected another convention of mapping {origin} ({known}) that convention {name} is like, "
                f"got {other!r}"
            )
    conventions = {name: (like.get(name, ""), data.get("without", "")) for name, data in tables.items()}
    alone = [name for name, (other, without) in conventions.items() if without and not other]
    if alone:
        raise MappingError(
            f"expected a convention that convention {alone[0]} of mapping {origin} is like, but for the beginning "
            f"{tables[alone[0]]['without']!r} of its names, got none"
        )
    models = parse_models(table.get("models", {}), f"mapping {origin}")
    numbers = parse_numbers(table.get("numbers", {}), f"mapping {origin}")
    parsed = tuple(
        _parse_rule(rule, conventions, numbers, number, origin) for number, rule in enumerate(rules, 1)
    )
    try:
        made = {name: convention_of_rules(name, data, parsed) for name, data in tables.items()}
        name = str(table.get("name", Path(origin).stem))
        fields = {axis: tuple(texts) for axis, texts in config.items()}
        return MappingTable(name, parsed, axes, tuple(drop), made, table.get("tied"), fields, models)
    except MappingError as error:
        raise MappingError(f"mapping {origin}: {error}") from error


def _is_texts(data: object) -> bool:
    return isinstance(data, list) and all(isinstance(text, str) for text in data)


def _is_text_table(data: object) -> bool:
    return isinstance(data, dict) and all(isinstance(value, str) for value in data.values())


def _parse_rule(
    rule: object,
    conventions: Mapping[str, tuple[str, str]],
    numbers: Mapping[str, Numbering],
    number: int,
    origin: str,
) -> Rule:
    """A rule from its table.

    conventions: by name, the convention whose entries it uses if it has none, or "", and the entries' prefix to drop.
    """
    where = f"rule {number} of mapping {origin}"
    if not isinstance(rule, dict):
        raise MappingError(f"expected a table for {where}, got {rule!r}")
    _only_keys(rule, {*conventions, "optional", "tied_to"}, where)
    texts = _RuleTexts.of(rule, conventions, numbers, where)
    optional, tied_to = rule.get("optional", False), rule.get("tied_to", "")
    if not isinstance(optional, bool | str) or optional == "":
        raise MappingError(
            f"expected true or false for optional, or the name of a part of the model, in {where}, got {optional!r}"
        )
    if not isinstance(tied_to, str):
        raise MappingError(f"expected a path of another rule for tied_to in {where}, got {tied_to!r}")
    part = optional if isinstance(optional, str) else ""
    try:
        return texts.rule(numbers, bool(optional), tied_to, part)
    except MappingError as error:
        raise MappingError(f"{where}: {error}") from error
    except RecursionError:
        raise MappingError(f"{where}: expected fewer nested parentheses") from None


@dataclass(frozen=True)
class _RuleTexts:
    """The entries of a rule, by convention: of weights, of moments if they differ, and of each case."""

    weights: dict[str, list[str]] = field(default_factory=dict)
    moments: dict[str, list[str]] = field(default_factory=dict)
    cases: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @staticmethod
    def of(
        rule: Mapping[str, Any],
        conventions: Mapping[str, tuple[str, str]],
        numbers: Mapping[str, Numbering],
        where: str,
    ) -> _RuleTexts:
        texts = _RuleTexts()
        for name in conventions:
            value = rule.get(name)
            if value is None and (len(conventions) > 2 or "tied_to" in rule):
                continue
            if isinstance(value, dict) and value.keys() & numbers.keys():
                _only_keys(value, {*numbers}, f"{name} in {where}")
                cases = {
                    case: _entry_texts(entries, f"{name}.{case} in {where}")
                    for case, entries in value.items()
                }
                texts.cases[name] = cases
                value = [text for entries in cases.values() for text in entries]
            elif isinstance(value, dict):
                _only_keys(value, {"weights", "moments"}, f"{name} in {where}")
                texts.moments[name] = _entry_texts(value.get("moments"), f"moments of {name} in {where}")
                value = value.get("weights")
            texts.weights[name] = _entry_texts(value, f"{name} in {where}")
        for name, (other, without) in conventions.items():
            if name not in texts.weights and other in texts.weights:
                texts.add_like(name, other, without)
        return texts

    def add_like(self, name: str, other: str, without: str) -> None:
        """Give ``name`` the entries of ``other``, minus the prefix ``without``, if all entries have the prefix."""
        for table in (self.weights, self.moments):
            theirs = table.get(other, [])
            if theirs and all(text.startswith(without) for text in theirs):
                table[name] = [text.removeprefix(without) for text in theirs]
        if other in self.cases:
            self.cases[name] = self.cases[other]

    def rule(self, numbers: Mapping[str, Numbering], optional: bool, tied_to: str, part: str) -> Rule:
        tables = (self.weights, self.moments)
        every = [text for table in tables for entries in table.values() for text in entries]
        rotary = {m.group(1) for text in every for m in _ROTARY.finditer(text)}

        def parsed(entries: Iterable[str]) -> tuple[Entry, ...]:
            return tuple(Entry.parse(text, rotary) for text in entries)

        sides, moments = ({name: parsed(entries) for name, entries in table.items()} for table in tables)
        cases = {
            name: {numbers[case]: parsed(entries) for case, entries in table.items()}
            for name, table in self.cases.items()
        }
        return Rule(sides, optional or len(sides) == 1, tied_to, moments, part, cases)


def _entry_texts(value: object, where: str) -> list[str]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries or not all(isinstance(text, str) for text in entries):
        raise MappingError(f"expected a text or a list of texts for {where}, got {value!r}")
    return entries


def _only_keys(table: Mapping[str, object], allowed: set[str], where: str) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise MappingError(f"expected only {', '.join(sorted(allowed))} in {where}, got {', '.join(unknown)}")
