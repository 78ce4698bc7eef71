"""A proposed mapping as TOML: axes with readable names, doubts as comments.

Rules name weights. A convention's table gives the places of their tensors, unless they are the usual ones, so that a
converted checkpoint has the same layout as the other checkpoint:

    [convention.jax]
    weights = "params/params/{w}"
    exp_avg = "opt_state/0/mu/params/{w}"
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.mapping.language.conventions import SECTIONS
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.states.source_tree import find
from bridge.core.text import printable
from bridge.core.text_files import toml_string
from bridge.propose.axes import Dim, Entry, Fit
from bridge.propose.names import INDEX_NAMES, Family


@dataclass(frozen=True)
class Places:
    """The table of a convention. entries: the unusual places, by key. doubt: what the table cannot express."""

    entries: Mapping[str, str] = field(default_factory=dict)
    doubt: str = ""


def places_in(reader: CheckpointReader, mapping: MappingTable, name: str, weights: str) -> Places:
    """The places of a convention's weights and optimizer states in a checkpoint.

    weights: the place of the weights, which the caller knows from naming them.
    """
    usual = mapping.conventions[name]
    entries = {} if weights == usual.places["weights"] else {"weights": weights}
    mapping = replace(mapping, conventions={**mapping.conventions, name: usual.at(weights, ())})
    try:
        tree = find(reader.tensors.values(), mapping, name, str(reader.path))
    except MappingError as error:
        return Places(entries, str(error))
    if len(tree.states) > 1:
        where = ", ".join(sorted(state.places["step"] for state in tree.convention.states))
        return Places(entries, f"several optimizer states, which a table cannot express (counts at {where})")
    # If no state was found, the convention still has its usual one.
    for state, names in zip(tree.states, tree.convention.states, strict=False):
        held = {*state.sections, *(("step",) if state.count is not None else ())}
        entries |= {s: names.places[s] for s in SECTIONS if s in held and names.places[s] != usual.places[s]}
    return Places(entries)


_LETTERS = "nfpqstuvwxyz"
_TWO_BIASES = (
    "# torch adds bias_ih and bias_hh where flax has one bias, and no rule can add tensors: store the sum in the "
    "bias that a rule names, store zeros in the other bias, and list the other bias under drop. Not the last third of "
    "a GRU's bias_hh: it is multiplied by the reset gate, and a cell with one bias has no place for it"
)


class Namer:
    """Names for elementary axes: the same letter for the same size, unless one rule needs it twice.

    m is the most frequent size; in a merged axis the last is d, d2, ... by size, the others h, g, ...
    """

    def __init__(self, families: Iterable[Family]) -> None:
        sizes = Counter(n for family in families for n in family.shape if n > 1)
        self._model = sizes.most_common(1)[0][0] if sizes else 0
        self._inner: dict[int, str] = {}
        self.given: dict[str, int | str] = {}

    def names(self, fit: Fit) -> dict[str, str]:
        """A name for each axis of a fit."""
        names: dict[str, str] = {}
        fused = fit.a[0].dims if len(fit.b) > 1 else fit.b[0].dims if len(fit.a) > 1 else ()
        parts = fit.b if len(fit.b) > 1 else fit.a
        for dim in (dim for dim in fused if len(dim) > 1):
            for part, entry in zip(dim, parts, strict=True):
                word = self._word(entry.family)
                for x, name in zip(part, self._product(part, fit.sizes, word), strict=True):
                    names[x] = name
        for dim in (dim for entry in (*fit.a, *fit.b) for dim in entry.dims):
            for part in dim:
                if len(part) > 1 and not any(x in names for x in part):
                    names |= dict(zip(part, self._product(part, fit.sizes, "h"), strict=True))
        free = iter([letter for letter in _LETTERS if letter not in names.values()])
        for x in fit.sizes:
            if x in names or x in INDEX_NAMES:
                continue
            is_model = fit.sizes[x] == self._model and "m" not in names.values()
            names[x] = "m" if is_model else next(free)
        return names

    def give(self, fit: Fit, names: Mapping[str, str]) -> None:
        """Collect sizes that the shapes of one side leave open, for the table of axes."""
        for dim in (dim for entry in (*fit.a, *fit.b) for dim in entry.dims):
            first, *others = dim
            for part in others:
                same = len(part) == len(first) == 1 and fit.sizes[part[0]] == fit.sizes[first[0]]
                for x in part:
                    self.given[names[x]] = names[first[0]] if same else fit.sizes[x]
            for x in first[1:]:
                self.given[names[x]] = fit.sizes[x]

    def _product(self, part: Sequence[str], sizes: Mapping[str, int], first: str) -> list[str]:
        if len(part) == 1:
            return [first]
        middle = [f"{first}{number}" for number in range(2, len(part))]
        return [first, *middle, self._inner_name(sizes[part[-1]])]

    def _inner_name(self, size: int) -> str:
        if size not in self._inner:
            self._inner[size] = f"d{len(self._inner) + 1}" if self._inner else "d"
        return self._inner[size]

    @staticmethod
    def _word(family: Family) -> str:
        for word in ("query", "key", "value", "gate", "up"):
            if word in family.words:
                return word
        parts = re.findall(r"[A-Za-z]\w*", family.path)
        named = [part for part in parts if part not in ("weight", "kernel", "bias")]
        return named[-1] if named else "part"


@dataclass(frozen=True)
class ProposedRule:
    """One rule as text: the entries of each side, and its doubts. optional: whether a model may lack some numbers."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    doubts: tuple[str, ...]
    fit: Fit = field(repr=False, compare=False)
    names: Mapping[str, str] = field(repr=False, compare=False)
    optional: bool = False

    @classmethod
    def of(cls, fit: Fit, doubts: Sequence[str], namer: Namer) -> Self:
        """The rule of a fit."""
        names = namer.names(fit)
        a, b = (
            tuple(entry.path if fit.plain else entry_text(entry, names) for entry in side)
            for side in (fit.a, fit.b)
        )
        return cls(a, b, tuple(doubts), fit, names)

    @property
    def short(self) -> str:
        """Only the axes."""
        return " = ".join(" & ".join(text.rpartition(" : ")[2] for text in side) for side in (self.a, self.b))


def render(
    a: CheckpointReader,
    b: CheckpointReader,
    rules: Sequence[ProposedRule],
    left_a: Sequence[str],
    left_b: Sequence[str],
    namer: Namer,
    places: Sequence[Places] = (Places(), Places()),
    drop: Sequence[str] = (),
) -> str:
    """The mapping file. places: of each side. drop: names that may be left out."""
    for rule in rules:
        namer.give(rule.fit, rule.names)
    keys = conventions(a.format, b.format)
    doubtful = sum(bool(rule.doubts) for rule in rules)
    lines = [
        f"# Proposed by `twinshard map`. {keys[0]} = {printable(str(a.path))}, {keys[1]} = {printable(str(b.path))}",
        f"# {len(rules)} rules, {doubtful} of them uncertain; {len(left_a)} and {len(left_b)} weights are in none.",
    ]
    for key, left in zip(keys, (left_a, left_b), strict=True):
        lines += [f"# unmatched in {key}: {printable(path)}" for path in left]
        lines += [_TWO_BIASES] if any(re.search(r"\bbias_[ih]h(_|$)", path) for path in left) else []
    lines += ["", 'name = "proposed"', *([f"drop = [{', '.join(map(toml_string, drop))}]"] if drop else [])]
    if {*keys} != {"torch", "jax"} or any(section.entries for section in places):
        for key, section in zip(keys, places, strict=True):
            lines += ["", f"[convention.{key}]"]
            lines += [f"{entry} = {toml_string(text)}" for entry, text in section.entries.items()]
    for key, section in zip(keys, places, strict=True):
        lines += (
            ["", f"# uncertain: the places of {key}: {printable(section.doubt)}"] if section.doubt else []
        )
    if namer.given:
        lines += ["", "[axes]"]
        lines += [f"{axis} = {json.dumps(size)}" for axis, size in namer.given.items()]
    for rule in rules:
        lines += ["", "[[rule]]", *(f"# uncertain: {printable(doubt)}" for doubt in rule.doubts)]
        for key, side in zip(keys, (rule.a, rule.b), strict=True):
            texts = [toml_string(text) for text in side]
            value = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
            lines.append(f"{key} = {value}")
        lines += ["optional = true"] if rule.optional else []
    return "\n".join(lines) + "\n"


def writable(path: str) -> bool:
    """Whether a rule can name this path: no spaces, colons and the like, and no braces except around indices."""
    plain = re.sub(r"\{[ijkl]\}", "0", path)
    return plain.isprintable() and not re.search(r"[\s{}:]", plain)


def conventions(a: str, b: str) -> tuple[str, str]:
    """The keys of the two sides of the rules, from the formats of the checkpoints."""
    usual = {"dcp": "torch", "orbax": "jax", "safetensors": "hf"}
    return ("a", "b") if a == b else (usual.get(a, "a"), usual.get(b, "b"))


def entry_text(entry: Entry, names: Mapping[str, str]) -> str:
    """An entry of a rule with its axes."""
    return f"{entry.path} : {' '.join(_dim(dim, names) for dim in entry.dims)}".strip()


def _dim(dim: Dim, names: Mapping[str, str]) -> str:
    parts = [" ".join(names.get(x, x) for x in part) or "1" for part in dim]
    text = " + ".join(parts)
    return f"({text})" if len(parts) > 1 or " " in text else text
