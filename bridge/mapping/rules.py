"""The mapping table: TOML rules that pair the tensors of a torch model with those of a jax model.

A mapping file::

    name = "decoder"
    drop = ["model.rope.inv_freq"]                # full names that may be left behind; `{i}` and `*` allowed

    [axes]                                        # sizes that the shapes alone do not settle
    d = "train/model/head_dim"                    # the value of a scalar integer tensor of the source
    h = 8                                         # a number
    up = "gate"                                   # the size of another axis

    [[rule]]
    torch = "layers.{i}.attention.wq.weight : (h d) m"
    jax = "layers/{i}/attention/query/kernel : m h d"

    [[rule]]
    torch = "lm_head.weight : v m"
    jax = "lm_head/kernel : m v"
    optional = true                               # a model without it is fine

Each side is one entry ``path : axis expression``, or a list of entries where a fused tensor corresponds to several.
``{i}`` in a path stands for a number; used as an axis on the other side it stacks. Without expressions the tensor
is the same on both sides. Rules name weights; optimizer entries follow them (`trees.py`).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Literal, cast

from bridge.mapping.errors import MappingError
from bridge.mapping.expression import Expression

Side = Literal["torch", "jax"]

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
    def parse(text: str) -> Entry:
        path, colon, expression = text.partition(":")
        return Entry(PathPattern(path.strip()), Expression.parse(expression) if colon else None)

    def axis_sets(self) -> tuple[frozenset[str], ...]:
        """For each alternative, the elementary axes together with the path's indices."""
        sets = ((),) if self.expression is None else self.expression.axis_sets()
        return tuple(frozenset((*axes, *self.path.indices)) for axes in sets)


@dataclass(frozen=True)
class Rule:
    """Tensors of a torch model and the tensors of a jax model that hold the same elements.

    Raises MappingError when the two sides do not name the same axes, part by part.
    """

    torch: tuple[Entry, ...]
    jax: tuple[Entry, ...]
    optional: bool = False

    def __post_init__(self) -> None:
        entries = (*self.torch, *self.jax)
        if any(entry.expression is None for entry in entries):
            if len(entries) != 2 or any(entry.expression is not None for entry in entries):
                raise MappingError(f"expected axis expressions on every entry or on none in rule {self}")
            if set(self.torch[0].path.indices) != set(self.jax[0].path.indices):
                raise MappingError(
                    f"expected the same path indices on both sides of rule {self} without expressions"
                )
        for entry in entries:
            if entry.expression and entry.expression.axes() & set(entry.path.indices):
                raise MappingError(f"expected {{i}} either in the path or as an axis in rule {self}")
        for side in (self.torch, self.jax):
            if len({frozenset(entry.path.indices) for entry in side}) != 1:
                raise MappingError(f"expected the same path indices in all entries of a side in rule {self}")
        sides = [[axes for entry in side for axes in entry.axis_sets()] for side in (self.torch, self.jax)]
        for parts in sides:
            if len(parts) != len(set(parts)):
                raise MappingError(
                    f"expected every part of a concatenation to name its own axis in rule {self}"
                )
        if set(sides[0]) != set(sides[1]):
            left, right = (
                ", ".join(sorted(" ".join(sorted(axes)) for axes in set(one) - set(other)))
                for one, other in (sides, sides[::-1])
            )
            raise MappingError(
                f"expected the same axes on both sides of rule {self}; only torch has {left or 'none'}; "
                f"only jax has {right or 'none'}"
            )

    def __str__(self) -> str:
        return f"{_texts(self.torch)} <-> {_texts(self.jax)}"

    def entries(self, side: Side) -> tuple[Entry, ...]:
        return self.torch if side == "torch" else self.jax


@dataclass(frozen=True)
class MappingTable:
    """A validated mapping table."""

    name: str
    rules: tuple[Rule, ...]
    axes: Mapping[str, int | str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        entries = [entry for rule in self.rules for entry in (*rule.torch, *rule.jax)]
        known = {axis for entry in entries if entry.expression for axis in entry.expression.axes()}
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
        return MappingTable(self.name, self.rules, {**self.axes, **axes}, self.drop)


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
    _only_keys(table, {"name", "description", "drop", "axes", "rule"}, f"mapping {origin}")
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
    parsed = tuple(_parse_rule(rule, number, origin) for number, rule in enumerate(rules, 1))
    return MappingTable(str(table.get("name", Path(origin).stem)), parsed, axes, tuple(drop))


def _parse_rule(rule: object, number: int, origin: str) -> Rule:
    where = f"rule {number} of mapping {origin}"
    if not isinstance(rule, dict):
        raise MappingError(f"expected a table for {where}, got {rule!r}")
    _only_keys(rule, {"torch", "jax", "optional"}, where)
    sides = []
    for side in ("torch", "jax"):
        value = rule.get(side)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise MappingError(f"expected a text or a list of texts for {side} in {where}, got {value!r}")
        sides.append(texts)
    if not isinstance(rule.get("optional", False), bool):
        raise MappingError(f"expected true or false for optional in {where}, got {rule['optional']!r}")
    try:
        torch, jax = (tuple(Entry.parse(text) for text in cast(list[str], texts)) for texts in sides)
        return Rule(torch, jax, rule.get("optional", False))
    except MappingError as error:
        raise MappingError(f"{where}: {error}") from error
    except RecursionError:
        raise MappingError(f"{where}: expected fewer parentheses inside each other") from None


def _only_keys(table: Mapping[str, object], allowed: set[str], where: str) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise MappingError(f"expected only {', '.join(sorted(allowed))} in {where}, got {', '.join(unknown)}")
