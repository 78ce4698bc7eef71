"""The mapping table: TOML rules that pair the tensors of two or more naming conventions.

A mapping file::

    name = "llama"
    drop = ["model.rope.inv_freq"]                # full names that may be left behind; `{i}` and `*` allowed

    [convention.hf]                               # conventions, if they are not just torch and jax
    format = "safetensors"                        # the format it usually lives in
    weights = "{w}"                               # where its tensors are, if not in the usual places

    [axes]                                        # sizes that the shapes alone do not settle
    d = "train/model/head_dim"                    # the value of a scalar integer tensor of the source
    h = 8                                         # a number
    up = "gate"                                   # the size of another axis

    [[rule]]
    hf = "model.layers.{i}.self_attn.q_proj.weight : (h d) m"
    torchtitan = "layers.{i}.attention.wq.weight : (h interleaved(d)) m"
    flax = "layers/{i}/attention/query/kernel : m h d"

    [[rule]]
    hf = "lm_head.weight : v m"
    flax = "lm_head/kernel : m v"
    optional = true                               # a model without it is fine

Each convention has one entry ``path : axis expression``, or a list of entries where a fused tensor corresponds to
several. ``{i}`` in a path stands for a number; used as an axis on another side it stacks. Without expressions the
tensor is the same on all sides. Rules name weights; optimizer entries follow them (`conventions.py`).

``interleaved(d)``: rotary positions turn pairs of elements of ``d``. Hugging Face and flax keep the first elements of
all pairs before the second ones (two halves), Meta and torchtitan keep each pair together::

    d = 6     d                0 1 2 | 3 4 5        pair p, element e of it, at  3 e + p
              interleaved(d)   0 3 | 1 4 | 2 5                                   2 p + e
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from bridge.mapping.conventions import Convention
from bridge.mapping.errors import MappingError
from bridge.mapping.expression import Expression

HALF, PAIR = ".half", ".pair"
"""What a rotary axis consists of: the two elements of a pair, and its pairs."""

_ROTARY = re.compile(r"interleaved\(\s*(\w+)\s*\)")
_INDEX = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class PathPattern:
    """A tensor path with ``{i}`` for a number without leading zeros."""

    text: str
    indices: tuple[str, ...] = field(init=False)
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = _INDEX.split(self.text)
        indices = tuple("{" + name + "}" for name in parts[1::2])
        if len(indices) != len(set(indices)):
            raise MappingError(f"expected each index once in path {self.text!r}")
        if not self.text or re.search(r"[\s{}]", "".join(parts[::2])):
            raise MappingError(f"expected a path such as layers.{{i}}.weight, got {self.text!r}")
        regex = "".join(
            re.escape(p) if k % 2 == 0 else f"(?P<{p}>0|[1-9][0-9]*)" for k, p in enumerate(parts)
        )
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "_regex", re.compile(regex))

    @property
    def regex(self) -> str:
        """A regular expression for the names, without groups."""
        return re.sub(r"\(\?P<\w+>", "(?:", self._regex.pattern)

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers at the indices, or None when ``name`` has another form."""
        match = self._regex.fullmatch(name)
        return None if match is None else {"{" + k + "}": int(v) for k, v in match.groupdict().items()}

    def format(self, values: Mapping[str, int]) -> str:
        """The concrete path."""
        return _INDEX.sub(lambda match: str(values[match.group()]), self.text)


@dataclass(frozen=True)
class Entry:
    """One tensor, or with indices one family of tensors, on one side of a rule."""

    path: PathPattern
    expression: Expression | None

    @staticmethod
    def parse(text: str, rotary: Iterable[str] = ()) -> Entry:
        """``path : expression``, of whose axes some are ``rotary``."""
        path, colon, expression = text.partition(":")
        if not colon:
            return Entry(PathPattern(path.strip()), None)
        parsed = Expression.parse(_spelled_out(expression, rotary))
        return Entry(PathPattern(path.strip()), replace(parsed, text=expression.strip()))

    def axis_sets(self) -> tuple[frozenset[str], ...]:
        """For each alternative, the elementary axes together with the path's indices."""
        sets = ((),) if self.expression is None else self.expression.axis_sets()
        return tuple(frozenset((*axes, *self.path.indices)) for axes in sets)


@dataclass(frozen=True)
class Rule:
    """Tensors of several conventions that hold the same elements, by the name of the convention.

    Raises MappingError when the sides do not name the same axes, part by part.
    """

    sides: Mapping[str, tuple[Entry, ...]]
    optional: bool = False

    def __post_init__(self) -> None:
        entries = [entry for side in self.sides.values() for entry in side]
        if len(self.sides) < 2:
            raise MappingError(f"expected entries of two conventions or more in rule {self}")
        if any(entry.expression is None for entry in entries):
            if len(entries) != len(self.sides) or any(entry.expression is not None for entry in entries):
                raise MappingError(f"expected axis expressions on every entry or on none in rule {self}")
            if len({frozenset(entry.path.indices) for entry in entries}) != 1:
                raise MappingError(
                    f"expected the same path indices on both sides of rule {self} without expressions"
                )
        for entry in entries:
            if entry.expression and entry.expression.axes() & set(entry.path.indices):
                raise MappingError(f"expected {{i}} either in the path or as an axis in rule {self}")
        for side in self.sides.values():
            if len({frozenset(entry.path.indices) for entry in side}) != 1:
                raise MappingError(f"expected the same path indices in all entries of a side in rule {self}")
        parts = {name: [a for e in side for a in e.axis_sets()] for name, side in self.sides.items()}
        for sets in parts.values():
            if len(sets) != len(set(sets)):
                raise MappingError(
                    f"expected every part of a concatenation to name its own axis in rule {self}"
                )
        (first, expected), *others = parts.items()
        for name, sets in others:
            if set(sets) != set(expected):
                only, lacking = (
                    ", ".join(sorted(" ".join(sorted(axes)) for axes in one))
                    for one in (set(expected) - set(sets), set(sets) - set(expected))
                )
                raise MappingError(
                    f"expected the same axes on both sides of rule {self}; only {first} has {only or 'none'}; "
                    f"only {name} has {lacking or 'none'}"
                )

    def __str__(self) -> str:
        return " <-> ".join(map(_texts, self.sides.values()))

    def between(self, source: str, target: str) -> str:
        """The rule as it concerns two conventions."""
        return f"{_texts(self.entries(source))} <-> {_texts(self.entries(target))}"

    def entries(self, convention: str) -> tuple[Entry, ...]:
        """Those of a convention; none if it has no such tensor."""
        return self.sides.get(convention, ())


@dataclass(frozen=True)
class MappingTable:
    """A validated mapping table. ``conventions``: by name, those that the rules speak of."""

    name: str
    rules: tuple[Rule, ...]
    axes: Mapping[str, int | str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    conventions: Mapping[str, Convention] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.conventions:
            names = dict.fromkeys(name for rule in self.rules for name in rule.sides)
            found = {name: _convention(name, {}, self.rules) for name in names}
            object.__setattr__(self, "conventions", found)
        entries = [entry for rule in self.rules for side in rule.sides.values() for entry in side]
        known = {axis for entry in entries if entry.expression for axis in entry.expression.axes()}
        known |= {axis.partition(".")[0] for axis in known}
        unknown = sorted(
            set(self.axes) - known - {value for value in self.axes.values() if isinstance(value, str)}
        )
        if unknown:
            raise MappingError(
                f"expected sizes for axes of mapping {self.name} ({', '.join(sorted(known)) or 'it has none'}), "
                f"got {', '.join(unknown)}"
            )

    def drops(self, name: str) -> bool:
        """Whether the tensor or object of this full name may be left behind."""
        return any(_drop_regex(pattern).fullmatch(name) for pattern in self.drop)

    def with_axes(self, axes: Mapping[str, int]) -> MappingTable:
        """The same table with some axis sizes given."""
        return replace(self, axes={**self.axes, **axes})

    def part(self) -> MappingTable:
        """The same for a part of a model: no rule requires its tensors."""
        return replace(self, rules=tuple(replace(rule, optional=True) for rule in self.rules))

    def rotary_axes(self) -> tuple[str, ...]:
        """The axes that some rule interleaves."""
        entries = [entry for rule in self.rules for side in rule.sides.values() for entry in side]
        axes = {axis for entry in entries if entry.expression for axis in entry.expression.axes()}
        return tuple(sorted(axis.removesuffix(HALF) for axis in axes if axis.endswith(HALF)))


def _convention(name: str, data: Mapping[str, str], rules: Sequence[Rule]) -> Convention:
    """A convention from its table; a tree if any of its paths has a "/" in it."""
    paths = [entry.path.text for rule in rules for entry in rule.entries(name)]
    tree = any("/" in path for path in paths) or (name == "jax" and not any("." in path for path in paths))
    places = {section: place for section, place in data.items() if section != "format"}
    usual = "orbax" if tree else "dcp"
    return Convention(name, "/" if tree else ".", data.get("format", usual), cast(Any, places))


def _texts(entries: Sequence[Entry]) -> str:
    return " & ".join(
        f"{e.path.text} : {e.expression.text}" if e.expression else e.path.text for e in entries
    )


def _drop_regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+\}|\*)", pattern)
    return re.compile(
        "".join({"*": ".*"}.get(p, r"\d+" if p.startswith("{") else re.escape(p)) for p in parts)
    )


def family_names() -> list[str]:
    """The mappings that ship with the package."""
    folder = files("bridge") / "families"
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
            (files("bridge") / "families" / f"{text}.toml").read_text(encoding="utf-8"), text
        )
    path = Path(text)
    if path.suffix != ".toml" and path.name == text:
        known = ", ".join(family_names())
        raise MappingError(f"expected a mapping file (*.toml) or one of the families {known}, got {text!r}")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MappingError(f"cannot read the mapping file {path}: {error}") from error
    return parse_mapping(content, str(path))


def mapping_table(
    mapping: str | os.PathLike[str] | MappingTable | None, axes: Mapping[str, int] | None = None
) -> MappingTable | None:
    """The table meant by a ``mapping`` argument, with axis sizes given by the caller over its own.

    Raises MappingError, or ValueError when there are ``axes`` but no mapping.
    """
    if mapping is None:
        if axes:
            raise ValueError(f"expected a mapping for the axis sizes {dict(axes)}, got none")
        return None
    table = mapping if isinstance(mapping, MappingTable) else load_mapping(os.fspath(mapping))
    return table.with_axes(axes) if axes else table


def parse_mapping(content: str, origin: str) -> MappingTable:
    """A mapping from TOML text; ``origin`` names it in errors. Raises MappingError."""
    try:
        table = tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise MappingError(f"mapping {origin} is not valid TOML: {error}") from error
    _only_keys(table, {"name", "description", "drop", "axes", "rule", "convention"}, f"mapping {origin}")
    rules = table.get("rule", [])
    if not isinstance(rules, list) or not rules:
        raise MappingError(f"expected [[rule]] tables in mapping {origin}, got none")
    drop = table.get("drop", [])
    if not isinstance(drop, list) or not all(isinstance(pattern, str) for pattern in drop):
        raise MappingError(f"expected a list of tensor names for drop in mapping {origin}, got {drop!r}")
    axes = table.get("axes", {})
    for axis, value in axes.items() if isinstance(axes, dict) else ():
        if isinstance(value, bool) or not (isinstance(value, str) or (isinstance(value, int) and value >= 0)):
            raise MappingError(
                f"expected a number, a tensor name or another axis for axis {axis} of mapping {origin}, got {value!r}"
            )
    if not isinstance(axes, dict):
        raise MappingError(f"expected a table [axes] in mapping {origin}, got {axes!r}")
    given = table.get("convention", {"torch": {}, "jax": {}})
    if not isinstance(given, dict) or not all(_is_text_table(data) for data in given.values()):
        raise MappingError(
            f"expected tables [convention.NAME] of texts in mapping {origin}, got {given!r:.200}"
        )
    parsed = tuple(_parse_rule(rule, tuple(given), number, origin) for number, rule in enumerate(rules, 1))
    try:
        conventions = {name: _convention(name, data, parsed) for name, data in given.items()}
        return MappingTable(str(table.get("name", Path(origin).stem)), parsed, axes, tuple(drop), conventions)
    except MappingError as error:
        raise MappingError(f"mapping {origin}: {error}") from error


def _is_text_table(data: object) -> bool:
    return isinstance(data, dict) and all(isinstance(value, str) for value in data.values())


def _parse_rule(rule: object, conventions: Sequence[str], number: int, origin: str) -> Rule:
    where = f"rule {number} of mapping {origin}"
    if not isinstance(rule, dict):
        raise MappingError(f"expected a table for {where}, got {rule!r}")
    _only_keys(rule, {*conventions, "optional"}, where)
    texts: dict[str, list[str]] = {}
    for name in conventions:
        value = rule.get(name)
        if value is None and len(conventions) > 2:
            continue
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list) or not entries or not all(isinstance(text, str) for text in entries):
            raise MappingError(f"expected a text or a list of texts for {name} in {where}, got {value!r}")
        texts[name] = entries
    if not isinstance(rule.get("optional", False), bool):
        raise MappingError(f"expected true or false for optional in {where}, got {rule['optional']!r}")
    try:
        rotary = {
            m.group(1) for entries in texts.values() for text in entries for m in _ROTARY.finditer(text)
        }
        sides = {
            name: tuple(Entry.parse(text, rotary) for text in entries) for name, entries in texts.items()
        }
        return Rule(sides, rule.get("optional", False))
    except MappingError as error:
        raise MappingError(f"{where}: {error}") from error
    except RecursionError:
        raise MappingError(f"{where}: expected fewer parentheses inside each other") from None


def _spelled_out(expression: str, rotary: Iterable[str]) -> str:
    """An expression with each rotary axis as the product that it is: of its pairs, and the two elements of a pair."""
    for axis in rotary:
        expression = re.sub(rf"interleaved\(\s*{axis}\s*\)", f"({axis}{PAIR} {axis}{HALF})", expression)
        expression = re.sub(rf"(?<![\w.{{]){axis}(?![\w.}}])", f"({axis}{HALF} {axis}{PAIR})", expression)
    return expression


def _only_keys(table: Mapping[str, object], allowed: set[str], where: str) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise MappingError(f"expected only {', '.join(sorted(allowed))} in {where}, got {', '.join(unknown)}")
