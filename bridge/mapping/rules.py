"""The mapping table: TOML rules that pair the tensors of two or more naming conventions.

A mapping file::

    name = "llama"
    drop = ["model.rope.inv_freq"]                # full names that may be left behind; `{i}` and `*` allowed

    [models.llama]                                # the models that it is for, see `model_types.py`
    attention_bias = [false, "absent"]

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

``optional = "decoder"`` names a part of the model: a model has the tensors of all rules of a part, or of none. A layer
has all tensors of ``optional = "experts of layer {i}"``, or none (`parts.py`).

A convention may be like another one (``like = "torchtitan"`` in its table): it has the entries of the other one in
rules that name none of its own. With ``without = "bert."`` beside it, it has those that begin so, without the
beginning: a model without its heads, whose weights are at the root.

Each convention has one entry ``path : axis expression``, or a list of entries where a fused tensor corresponds to
several. ``{i}`` in a path stands for a number; used as an axis on another side it stacks. Without expressions the
tensor is the same on all sides. Rules name weights; optimizer entries follow them (`conventions.py`). The operation
after ``|`` is applied to the plain values before that convention stores them (`operations.py`)::

    maxtext = "decoder/layers/self_attention/query/kernel : m {i} h interleaved(d) | times(d ** -0.5)"

What an optimizer keeps for a weight may be under another name and in another layout than the weight: torchtitan's fused
attention stores its weight as three, and the moments as one::

    torchtitan.weights = ["wq.weight : (g r d) m", "wk.weight : (g k) m"]
    torchtitan.moments = "wqk.weight : (g (r d + k)) m"

A rule may have ``tied_to = "path of another rule"``: its tensor may be the same one (`tied.py`). With an entry of one
convention alone it is a second name, under which that convention has the tensor again.

``[numbers]`` is for conventions that count layers otherwise, in blocks or from another start (`numbers.py`).

``interleaved(d)``: rotary positions turn pairs of elements of ``d``. Hugging Face and flax keep the first elements of
all pairs before the second ones (two halves), Meta and torchtitan keep each pair together::

    d = 6     d                0 1 2 | 3 4 5        pair p, element e of it, at  3 e + p
              interleaved(d)   0 3 | 1 4 | 2 5                                   2 p + e
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

from bridge.mapping.conventions import Convention
from bridge.mapping.entries import HALF, Entry, Rule
from bridge.mapping.errors import MappingError
from bridge.mapping.model_types import Models, parse_models
from bridge.mapping.numbers import Numbering, parse_numbers
from bridge.text import did_you_mean

Tied = Literal["once", "both"]
"""How often a target stores a weight that has two names."""

# A mapping that has both names of a pair means two things.
_SYNONYMS = {"jax": "flax", "flax": "jax", "hf": "torch", "torch": "hf"}
_ROTARY = re.compile(r"interleaved\(\s*(\w+)\s*\)")


@dataclass(frozen=True)
class MappingTable:
    """A validated mapping table. ``conventions``: those of the rules, by name. tied: see `tied.py`.

    config: the fields of a `config.json` beside the source that give sizes of axes, see `sizes.py`. models: the models
    that the mapping is for, by their model_type; empty: any. See `model_types.py`.
    """

    name: str
    rules: tuple[Rule, ...]
    axes: Mapping[str, int | str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    conventions: Mapping[str, Convention] = field(default_factory=dict)
    tied: Tied | None = None
    config: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: Models = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.conventions:
            names = dict.fromkeys(name for rule in self.rules for name in rule.sides)
            found = {name: _convention(name, {}, self.rules) for name in names}
            object.__setattr__(self, "conventions", found)
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
        """The mapping's name of a convention, for this name or another one of the same thing; None if it has none.

        "flax" and "jax" are two names of the tree of our own models, "hf" and "torch" of the class of transformers.
        """
        if name in self.conventions:
            return name
        other = _SYNONYMS.get(name)
        return other if other in self.conventions else None

    def drops(self, name: str) -> bool:
        """Whether the tensor or object of this full name may be left behind."""
        return any(_drop_regex(pattern).fullmatch(name) for pattern in self.drop)

    def with_axes(self, axes: Mapping[str, int]) -> MappingTable:
        """The same table with some axis sizes given."""
        return replace(self, axes={**self.axes, **axes})

    def with_tied(self, tied: Tied | None) -> MappingTable:
        """The table for a target that stores tied weights once or under both names; None: as the table says."""
        return replace(self, tied=tied or self.tied)

    def for_any_model(self) -> MappingTable:
        """The table for whatever model a `config.json` names: its caller knows that the rules hold for that model."""
        return replace(self, models={})

    def between(self, *conventions: str) -> MappingTable:
        """The table with these conventions alone. Raises MappingError for one that the mapping has not."""
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
        return replace(self, rules=tuple(replace(rule, optional=True, part="") for rule in self.rules))

    def rotary_axes(self) -> tuple[str, ...]:
        """The axes that a rule interleaves."""
        axes = {
            axis for entry in _entries(self.rules) if entry.expression for axis in entry.expression.axes()
        }
        return tuple(sorted(axis.removesuffix(HALF) for axis in axes if axis.endswith(HALF)))


def _entries(rules: Sequence[Rule]) -> list[Entry]:
    sides = [side for rule in rules for table in (rule.sides, rule.moments) for side in table.values()]
    return [entry for side in sides for entry in side]


def _axes_of(rules: Sequence[Rule]) -> set[str]:
    """The axes whose sizes the rules use, also by operations."""
    entries = _entries(rules)
    axes = {axis for entry in entries if entry.expression for axis in entry.expression.axes()}
    axes |= {axis.partition(".")[0] for axis in axes}
    axes |= {axis for rule in rules for numbering in rule.numberings.values() for axis in numbering.axes}
    return axes | {axis for entry in entries if entry.operation for axis in entry.operation.axes}


def _convention(name: str, data: Mapping[str, str], rules: Sequence[Rule]) -> Convention:
    """A convention from its table. The convention is a tree if any of its paths contains "/"."""
    paths = [entry.path.text for rule in rules for entry in rule.entries(name)]
    tree = any("/" in path for path in paths) or (name == "jax" and not any("." in path for path in paths))
    places = {
        section: place for section, place in data.items() if section not in ("format", "like", "without")
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


def family_names() -> list[str]:
    """The mappings that ship with the package."""
    folder = files("bridge.mapping") / "families"
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
            (files("bridge.mapping") / "families" / f"{text}.toml").read_text(encoding="utf-8"), text
        )
    path = Path(text)
    if path.suffix != ".toml" and path.name == text:
        known = ", ".join(family_names())
        raise MappingError(
            f"expected a mapping file (*.toml) or one of the families {known}, got {text!r}"
            f"{did_you_mean(text, family_names())}"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MappingError(f"cannot read the mapping file {path}: {error}") from error
    return parse_mapping(content, str(path))


def mapping_table(
    mapping: str | os.PathLike[str] | MappingTable | None,
    axes: Mapping[str, int] | None = None,
    tied: Tied | None = None,
    *,
    any_model: bool = False,
) -> MappingTable | None:
    """The table of a ``mapping`` argument. The caller's axis sizes and ties override the table's own.

    any_model: the table is to be used whatever model a `config.json` names. Raises MappingError, or ValueError when
    there are ``axes``, ``tied`` or ``any_model`` but no mapping.
    """
    if mapping is None:
        if axes:
            raise ValueError(f"expected a mapping for the axis sizes {dict(axes)}, got none")
        if tied is not None:
            raise ValueError(
                f"expected a mapping, which knows the tied weights that are to be {tied}, got none"
            )
        if any_model:
            raise ValueError("expected a mapping that is to be used for any model, got none")
        return None
    table = mapping if isinstance(mapping, MappingTable) else load_mapping(os.fspath(mapping))
    table = table.for_any_model() if any_model else table
    return (table.with_axes(axes) if axes else table).with_tied(tied)


def parse_mapping(content: str, origin: str) -> MappingTable:
    """A mapping from TOML text; ``origin`` names it in errors. Raises MappingError."""
    try:
        table = tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise MappingError(f"mapping {origin} is not valid TOML: {error}") from error
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
    given = table.get("convention", {"torch": {}, "jax": {}})
    if not isinstance(given, dict) or not all(_is_text_table(data) for data in given.values()):
        raise MappingError(
            f"expected tables [convention.NAME] of texts in mapping {origin}, got {given!r:.200}"
        )
    like = {name: data["like"] for name, data in given.items() if "like" in data}
    for name, other in like.items():
        if other not in given or other in like:
            known = ", ".join(known for known in given if known not in like)
            raise MappingError(
                f"expected another convention of mapping {origin} ({known}) that convention {name} is like, "
                f"got {other!r}"
            )
    conventions = {name: (like.get(name, ""), data.get("without", "")) for name, data in given.items()}
    alone = [name for name, (other, without) in conventions.items() if without and not other]
    if alone:
        raise MappingError(
            f"expected a convention that convention {alone[0]} of mapping {origin} is like, but for the beginning "
            f"{given[alone[0]]['without']!r} of its names, got none"
        )
    models = parse_models(table.get("models", {}), f"mapping {origin}")
    numbers = parse_numbers(table.get("numbers", {}), f"mapping {origin}")
    parsed = tuple(
        _parse_rule(rule, conventions, numbers, number, origin) for number, rule in enumerate(rules, 1)
    )
    try:
        found = {name: _convention(name, data, parsed) for name, data in given.items()}
        name = str(table.get("name", Path(origin).stem))
        fields = {axis: tuple(texts) for axis, texts in config.items()}
        return MappingTable(name, parsed, axes, tuple(drop), found, table.get("tied"), fields, models)
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

    conventions: by name, the one whose entries it has where it has none of its own, or "", and the beginning of these
    entries that it lacks.
    """
    where = f"rule {number} of mapping {origin}"
    if not isinstance(rule, dict):
        raise MappingError(f"expected a table for {where}, got {rule!r}")
    _only_keys(rule, {*conventions, "optional", "tied_to"}, where)
    texts: dict[str, list[str]] = {}
    moments: dict[str, list[str]] = {}
    cases: dict[str, dict[str, list[str]]] = {}
    for name in conventions:
        value = rule.get(name)
        if value is None and (len(conventions) > 2 or "tied_to" in rule):
            continue
        if isinstance(value, dict) and value.keys() & numbers.keys():
            _only_keys(value, {*numbers}, f"{name} in {where}")
            cases[name] = {
                case: _entry_texts(given, f"{name}.{case} in {where}") for case, given in value.items()
            }
            value = [text for given in cases[name].values() for text in given]
        elif isinstance(value, dict):
            _only_keys(value, {"weights", "moments"}, f"{name} in {where}")
            moments[name] = _entry_texts(value.get("moments"), f"moments of {name} in {where}")
            value = value.get("weights")
        texts[name] = _entry_texts(value, f"{name} in {where}")
    for name, (other, without) in conventions.items():
        if name not in texts and other in texts:
            for table in (texts, moments):
                theirs = table.get(other, [])
                if theirs and all(text.startswith(without) for text in theirs):
                    table[name] = [text.removeprefix(without) for text in theirs]
            if other in cases:
                cases[name] = cases[other]
    optional = rule.get("optional", False)
    if not isinstance(optional, bool | str) or optional == "":
        raise MappingError(
            f"expected true or false for optional, or the name of a part of the model, in {where}, got {optional!r}"
        )
    if not isinstance(rule.get("tied_to", ""), str):
        raise MappingError(f"expected a path of another rule for tied_to in {where}, got {rule['tied_to']!r}")
    try:
        every = [text for table in (texts, moments) for entries in table.values() for text in entries]
        rotary = {m.group(1) for text in every for m in _ROTARY.finditer(text)}
        sides, own = (
            {name: tuple(Entry.parse(text, rotary) for text in entries) for name, entries in table.items()}
            for table in (texts, moments)
        )
        part = optional if isinstance(optional, str) else ""
        if len(sides) == 1:
            optional = True
        by_case = {
            name: {
                numbers[case]: tuple(Entry.parse(text, rotary) for text in entries)
                for case, entries in table.items()
            }
            for name, table in cases.items()
        }
        return Rule(sides, bool(optional), rule.get("tied_to", ""), own, part, by_case)
    except MappingError as error:
        raise MappingError(f"{where}: {error}") from error
    except RecursionError:
        raise MappingError(f"{where}: expected fewer parentheses inside each other") from None


def _entry_texts(value: object, where: str) -> list[str]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries or not all(isinstance(text, str) for text in entries):
        raise MappingError(f"expected a text or a list of texts for {where}, got {value!r}")
    return entries


def _only_keys(table: Mapping[str, object], allowed: set[str], where: str) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise MappingError(f"expected only {', '.join(sorted(allowed))} in {where}, got {', '.join(unknown)}")
