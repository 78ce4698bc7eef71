"""The mapping table: the rules of a mapping, its conventions, sizes of its axes. `rules.py` reads it from TOML.

A mapping recognizes its models by their `config.json`:

    [models.llama]                             # a model_type
    attention_bias = [false, "absent"]         # a field that could make it another model: its allowed values
    [models.mistral]
    sliding_window = ["null"]                  # TOML has no null
    "text_config.hidden_act" = ["silu"]        # a field of a table inside

Models with the same names and shapes may compute something else: Granite multiplies, Helium rotates other pairs of
elements, SmolLM3 omits positions in some layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, cast

from bridge.core.mapping.language.conventions import Convention
from bridge.core.mapping.language.entries import Entry, Rule
from bridge.core.mapping.language.errors import MappingError

Value = str | int | float | bool
Models = Mapping[str, Mapping[str, tuple[Value, ...]]]
"""By model_type: for each field its allowed values. "null" and "absent" mean what they say."""

MODEL_TYPE = "model_type"
_NULL, _ABSENT = "null", "absent"


def parse_models(data: object, where: str) -> Models:
    """The table [models] of a mapping file. MappingError unless it has the form above."""
    if not isinstance(data, dict) or not all(_is_model(fields) for fields in data.values()):
        raise MappingError(
            f"expected a table [models] in {where}, which gives for each model_type a table of fields with lists of "
            f"values, got {data!r:.200}"
        )
    return MappingProxyType(
        {
            model_type: {field: tuple(values) for field, values in fields.items()}
            for model_type, fields in data.items()
        }
    )


def mismatch(models: Models, config: Mapping[str, object]) -> str | None:
    """Why a model's configuration is not one of these models; None if it may be.

    A configuration without a model_type may be any model.
    """
    model_type = config.get(MODEL_TYPE)
    if not models or model_type is None:
        return None
    if not isinstance(model_type, str) or model_type not in models:
        return f"expected {MODEL_TYPE} {' or '.join(map(repr, models))}, found {model_type!r:.100}"
    for key, allowed in models[model_type].items():
        value = field_of(config, key, _ABSENT)
        if (_NULL if value is None else value) not in allowed:
            expected = " or ".join(_shown(value) for value in allowed if value != _ABSENT)
            shown = "none" if value is _ABSENT else _shown(value)
            return f"expected {key} {expected}, found {shown:.100} ({MODEL_TYPE} {model_type!r})"
    return None


def field_of(config: Mapping[str, object], field: str, absent: object = None) -> object:
    """The value of a field, such as "head_dim" or "text_config.head_dim"; ``absent`` if there is none."""
    value: object = config
    for key in field.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return absent
        value = value[key]
    return value


def _is_model(fields: object) -> bool:
    return isinstance(fields, dict) and all(
        isinstance(values, list) and values and all(isinstance(v, Value) for v in values)
        for values in fields.values()
    )


def _shown(value: object) -> str:
    if value == _NULL:
        return _NULL
    return repr(value) if isinstance(value, str) else json.dumps(value, default=str)


Tied = Literal["once", "both"]
"""Whether a target stores a weight with two names once or under both."""

# A mapping that has both names of a pair means two different things.
_SYNONYMS = {"jax": "flax", "flax": "jax", "hf": "torch", "torch": "hf"}


@dataclass(frozen=True)
class Told:
    """Content of a `config.json`. where: the file. layers: the number of layers, if it is compared with the weights."""

    where: str
    sizes: Mapping[str, int]
    layers: int | None


@dataclass(frozen=True)
class MappingTable:
    """A validated mapping table. ``conventions``: the rules' conventions, by name. tied: see `tied.py`.

    config: the fields of a `config.json` next to the source that give sizes of axes, see `sizes.py`. models: the models
    that the mapping supports, by model_type; empty: any. asked: the axes whose sizes the caller gave. any_model: the
    caller overrides any `config.json`. ties: whether the output layer is the embedding according to the `config.json`;
    None: unknown. told: other content of that file, for messages.
    """

    name: str
    rules: tuple[Rule, ...]
    axes: Mapping[str, int | str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    conventions: Mapping[str, Convention] = field(default_factory=dict)
    tied: Tied | None = None
    config: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: Models = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    any_model: bool = False
    ties: bool | None = field(default=None, compare=False)
    told: Told | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.conventions:
            names = dict.fromkeys(name for rule in self.rules for name in rule.sides)
            conventions = {name: convention_of_rules(name, {}, self.rules) for name in names}
            object.__setattr__(self, "conventions", conventions)
        known = _axes_of(self.rules)
        alias = {value for value in self.axes.values() if isinstance(value, str)}
        unknown = sorted({*self.axes, *self.config} - known - alias)
        if unknown:
            raise MappingError(
                f"expected sizes for axes of mapping {self.name} ({', '.join(sorted(known)) or 'it has none'}), "
                f"got {', '.join(unknown)}"
            )
        for rule in self.rules:
            other = self.rule_of(rule.tied_to) if rule.tied_to else rule
            for name in rule.sides.keys() & other.sides.keys() if other is not rule else ():
                Rule({name: rule.entries(name), "the tied one": other.entries(name)})
        if self.tied not in (None, "once", "both"):
            raise MappingError(f"expected once or both for tied in mapping {self.name}, got {self.tied!r}")

    def rule_of(self, path: str) -> Rule:
        """The rule with an entry of exactly this path. Raises MappingError if there is none."""
        for rule in self.rules:
            if any(entry.path.text == path for side in rule.sides.values() for entry in side):
                return rule
        raise MappingError(f"expected the path of a rule of mapping {self.name} for tied_to, got {path!r}")

    def convention_of(self, name: str) -> str | None:
        """The mapping's name for a convention, given this name or a synonym; None if it has none.

        "flax" and "jax" both name the tree of our own models, "hf" and "torch" the classes of transformers.
        """
        if name in self.conventions:
            return name
        other = _SYNONYMS.get(name)
        return other if other in self.conventions else None

    def drops(self, name: str) -> bool:
        """Whether the tensor or object with this full name may be left out."""
        return any(_drop_regex(pattern).fullmatch(name) for pattern in self.drop)

    def with_axes(self, axes: Mapping[str, int]) -> MappingTable:
        """The same table with some axis sizes given."""
        return replace(self, axes={**self.axes, **axes})

    def with_tied(self, tied: Tied | None) -> MappingTable:
        """The table for a target that stores tied weights once or under both names; None: unchanged."""
        return replace(self, tied=tied or self.tied)

    def for_any_model(self) -> MappingTable:
        """The table for any model that a `config.json` names: the caller knows that the rules fit that model."""
        return replace(self, models={}, any_model=True)

    def decided(self, conventions: Collection[str], where: str) -> MappingTable:
        """The table with every choice of these conventions between two ways of storing made.

        Raises MappingError, which begins with the mapping's name, for a choice that neither the caller nor a
        `config.json` has made; ``where`` names the checkpoint.
        """
        open_choices = {
            entry.choice: name
            for rule in self.rules
            for name in conventions
            for entry in (*rule.entries(name), *rule.entries(name, moments=True))
            if entry.choice
        }
        for choice, name in open_choices.items():
            value = self.axes.get(choice)
            if value not in (0, 1):
                raise MappingError(
                    f"mapping {self.name}: convention {name} stores rotary rows as adjacent pairs if {choice} is 1, "
                    f"and as halves if {choice} is 0: expected --axis {choice}=1 or --axis {choice}=0 (in a program "
                    f"with_axes({{{choice!r}: 1}})), since no config.json next to {where} decides, got "
                    f"{'neither' if value is None else value}"
                )
        choices = {choice: cast(int, self.axes[choice]) for choice in open_choices}
        if not choices:
            return self
        axes = {axis: value for axis, value in self.axes.items() if axis not in choices}
        config = {axis: texts for axis, texts in self.config.items() if axis not in choices}
        rules = tuple(rule.decided(choices) for rule in self.rules)
        return replace(self, rules=rules, axes=axes, config=config)

    def between(self, *conventions: str) -> MappingTable:
        """The table with only these conventions. Raises MappingError for a convention that the mapping lacks."""
        names = [self.convention_of(name) for name in conventions]
        kept = {name: self.conventions[name] for name in names if name is not None}
        if None in names or len(kept) < 2:
            raise MappingError(
                f"expected two conventions or more of mapping {self.name} ({', '.join(self.conventions)}), got "
                f"{', '.join(conventions) or 'none'}"
            )
        rules = []
        for rule in self.rules:
            tied = self.rule_of(rule.tied_to) if rule.tied_to else None
            both = {**rule.sides, **(tied.sides if tied and rule.is_second_name else {})}
            if len(kept.keys() & both.keys()) < 2 or not kept.keys() & rule.sides.keys():
                continue
            paths = [e.path.text for name in kept for e in (tied.entries(name) if tied else ())]
            rules.append(rule.kept(kept, paths[0] if paths else ""))
        left = _axes_of(rules)
        left |= {value for axis, value in self.axes.items() if isinstance(value, str) and axis in left}
        axes = {axis: value for axis, value in self.axes.items() if axis in left}
        config = {axis: fields for axis, fields in self.config.items() if axis in left}
        return replace(self, rules=tuple(rules), conventions=kept, axes=axes, config=config)

    def part(self) -> MappingTable:
        """The table for a part of a model: no rule requires its tensors."""
        rules = tuple(replace(rule, optional=True, part="") for rule in self.rules)
        return replace(self, rules=rules, ties=None, told=None)

    def axes_with(self, end: str) -> tuple[str, ...]:
        """The axes that a rule interleaves, with the end HALF, or that are padding, with ZEROS."""
        axes = {axis for entry in _entries(self.rules) if entry.expression for axis in entry.expression.axes}
        return tuple(sorted(axis.removesuffix(end) for axis in axes if axis.endswith(end)))


def _entries(rules: Sequence[Rule]) -> list[Entry]:
    sides = [side for rule in rules for table in (rule.sides, rule.moments) for side in table.values()]
    return [entry for side in sides for entry in side]


def _axes_of(rules: Sequence[Rule]) -> set[str]:
    """The axes whose sizes the rules use, also by operations."""
    entries = _entries(rules)
    axes = {axis for entry in entries if entry.expression for axis in entry.expression.axes}
    axes |= {axis.partition(".")[0] for axis in axes}
    axes |= {axis for rule in rules for numbering in rule.numberings.values() for axis in numbering.axes}
    axes |= {entry.choice for entry in entries if entry.choice}
    return axes | {axis for entry in entries if entry.operation for axis in entry.operation.axes}


def convention_of_rules(name: str, data: Mapping[str, str], rules: Sequence[Rule]) -> Convention:
    """A convention from its table. The convention is a tree if any of its paths contains "/"."""
    paths = [entry.path.text for rule in rules for entry in rule.entries(name)]
    tree = any("/" in path for path in paths) or (name == "jax" and not any("." in path for path in paths))
    places = {
        section: prefix for section, prefix in data.items() if section not in ("format", "like", "without")
    }
    usual = "orbax" if tree else "dcp"
    format_ = data.get("format", usual)
    return Convention(
        name, "/" if tree else ".", format_, cast(Any, places), without=bool(data.get("without"))
    )


def _drop_regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+\}|\*)", pattern)
    return re.compile(
        "".join({"*": ".*"}.get(p, r"\d+" if p.startswith("{") else re.escape(p)) for p in parts)
    )
