"""One rule of a mapping: paths with numbers, entries, and the sides that contain the same elements."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.expression import Axis, Concatenation, Expression
from bridge.core.mapping.language.numbers import Numbering
from bridge.core.mapping.language.operations import ZEROS, Operation

HALF, PAIR = ".half", ".pair"
"""The two factors of a rotary axis: the elements in a pair, and the pairs."""


_CHOICE = re.compile(r"interleaved\(\s*(\w+)\s*,\s*([A-Za-z_]\w*)\s*\)")
_INDEX = re.compile(r"\{([A-Za-z_]\w*)\}")
_PADDING = re.compile(r"(?<![\w.])zeros\(\s*(\w+)\s*\)")


@dataclass(frozen=True)
class PathPattern:
    """A tensor path with ``{i}`` for a number without leading zeros.

    numbering: the sum that makes the number, if the path has the summands' indices instead (`numbers.py`).
    """

    text: str
    numbering: Numbering | None = None
    indices: tuple[str, ...] = field(init=False)
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = _INDEX.split(self.text)
        indices = tuple("{" + name + "}" for name in parts[1::2])
        if len(indices) != len(set(indices)):
            raise MappingError(f"expected each index once in path {self.text!r}")
        if any(not between or between.isdecimal() for between in parts[2:-2:2]):
            raise MappingError(
                f"expected indices separated by more than digits, got path {self.text!r}, where one number can be "
                "split in several ways"
            )
        if not self.text or re.search(r"[\s{}]", "".join(parts[::2])):
            raise MappingError(f"expected a path such as layers.{{i}}.weight, got {self.text!r}")
        regex = "".join(
            re.escape(p) if k % 2 == 0 else f"(?P<{p}>0|[1-9][0-9]*)" for k, p in enumerate(parts)
        )
        if self.numbering is not None:
            indices = tuple(
                digit
                for index in indices
                for digit in (self.numbering.indices if index == self.numbering.index else (index,))
            )
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "_regex", re.compile(regex))

    @property
    def regex(self) -> str:
        """A regular expression that matches the names, without groups."""
        return re.sub(r"\(\?P<\w+>", "(?:", self._regex.pattern)

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers at the indices, or None when ``name`` has another form."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        values = {"{" + k + "}": int(v) for k, v in match.groupdict().items()}
        if self.numbering is None:
            return values
        digits = self.numbering.split(values.pop(self.numbering.index))
        return None if digits is None else values | digits

    def format(self, values: Mapping[str, int]) -> str:
        """The concrete path."""
        if self.numbering is not None:
            values = {**values, self.numbering.index: self.numbering.join(values)}
        return _INDEX.sub(lambda match: str(values[match.group()]), self.text)


@dataclass(frozen=True)
class Entry:
    """One tensor, or with indices one family of tensors, on one side of a rule.

    choice: the axis that decides ``interleaved(d, choice)``: if it is 1, rows are as in ``expression``; if it is 0, as
    in ``otherwise``, with plain d. "" without a choice.
    """

    path: PathPattern
    expression: Expression | None
    operation: Operation | None = None
    choice: str = ""
    otherwise: Expression | None = None

    @staticmethod
    def parse(text: str, rotary: Iterable[str] = ()) -> Entry:
        """Parse ``path : expression | operation``; the last two are optional. ``rotary``: axes of rotary positions."""
        text, bar, operation = text.partition("|")
        path, colon, expression = text.partition(":")
        rotary = tuple(rotary)
        choices = {match[2] for match in _CHOICE.finditer(expression)}
        if len(choices) > 1:
            raise MappingError(f"expected one axis that decides about interleaved rows, got {text!r}")
        shown, plain = _CHOICE.sub(r"interleaved(\1)", expression), _CHOICE.sub(r"\1", expression)
        parsed = Expression.parse(_spelled_out(shown, rotary)) if colon else None
        if parsed is not None and {a for a in parsed.axes if a.endswith(ZEROS)} != {*_zeros(parsed).values()}:
            raise MappingError(
                f"expected zeros(...) as the last part of an axis, as in (v + zeros(p)) m, got {text!r}"
            )
        return Entry(
            PathPattern(path.strip()),
            replace(parsed, text=expression.strip()) if parsed else None,
            Operation.parse(operation) if bar else None,
            min(choices, default=""),
            replace(Expression.parse(_spelled_out(plain, rotary)), text=plain.strip()) if choices else None,
        )

    def decided(self, choices: Mapping[str, int]) -> Entry:
        """The entry without its choice, if ``choices`` has the value."""
        if self.choice not in choices:
            return self
        return Entry(self.path, self.expression if choices[self.choice] else self.otherwise, self.operation)

    def __str__(self) -> str:
        axes = f" : {self.expression.text}" if self.expression else ""
        return self.path.text + axes + (f" | {self.operation.text}" if self.operation else "")

    @cached_property
    def zeros(self) -> Mapping[int, str]:
        """The padding after the elements of an axis, by that axis's number."""
        return _zeros(self.expression) if self.expression else {}

    @cached_property
    def axis_sets(self) -> tuple[frozenset[str], ...]:
        """For each alternative, the elementary axes together with the path's indices."""
        sets = ((),) if self.expression is None else self.expression.axis_sets
        return tuple(frozenset((*axes, *self.path.indices)) for axes in sets)


@dataclass(frozen=True)
class Rule:
    """Tensors of several conventions that contain the same elements, by the name of the convention.

    part: a part of the model that the rule belongs to; a model has all tensors of a part's rules, or none. With an
    index of the paths in it, ``"experts of layer {i}"``, it is a part of each layer (`fit/problems.py`). tied_to: a
    path of another rule, whose tensors may be the same as these (`tied.py`). A rule of only one convention gives second
    names to tensors of that rule. moments: by convention, the entries of the optimizer state, if they differ from the
    weights' entries. cases: by convention and numbering, the entries of a convention that counts differently; its side
    has the entries of all cases. Raises MappingError if the sides do not name the same axes, part by part.
    """

    sides: Mapping[str, tuple[Entry, ...]]
    optional: bool = False
    tied_to: str = ""
    moments: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)
    part: str = ""
    cases: Mapping[str, Mapping[Numbering, tuple[Entry, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cases:
            self._require_cases()
            return
        entries = [entry for side in self._all_sides().values() for entry in side]
        if len(self.sides) < (1 if self.tied_to else 2):
            raise MappingError(f"expected entries of two conventions or more in rule {self}")
        if any(entry.expression is None for entry in entries):
            if len(entries) != len(self._all_sides()) or any(
                entry.expression is not None for entry in entries
            ):
                raise MappingError(f"expected axis expressions on every entry or on none in rule {self}")
            if len({frozenset(entry.path.indices) for entry in entries}) != 1:
                raise MappingError(
                    f"expected the same path indices on both sides of rule {self} without expressions"
                )
        for entry in entries:
            if entry.expression and entry.expression.axes & set(entry.path.indices):
                raise MappingError(f"expected {{i}} either in the path or as an axis in rule {self}")
        for name, side in self.sides.items():
            if len({frozenset(entry.path.indices) for entry in (*side, *self.moments.get(name, ()))}) != 1:
                raise MappingError(f"expected the same path indices in all entries of a side in rule {self}")
        indices = {match.group() for match in _INDEX.finditer(self.part)}
        if indices - {index for entry in entries for index in entry.path.indices}:
            raise MappingError(f"expected the index of part {self.part!r} in the paths of rule {self}")
        # Other sides may lack padding.
        parts = {
            name: [a for e in side for a in e.axis_sets if not a & {*e.zeros.values()}]
            for name, side in self._all_sides().items()
        }
        for sets in parts.values():
            if len(sets) != len(set(sets)):
                raise MappingError(
                    f"expected every part of a concatenation to name its own axis in rule {self}"
                )
        (first, expected), *others = parts.items()
        for name, sets in others:
            if set(sets) != set(expected):
                only, lacking = (
                    ", ".join(sorted(" ".join(sorted(axes)) for axes in difference))
                    for difference in (set(expected) - set(sets), set(sets) - set(expected))
                )
                raise MappingError(
                    f"expected the same axes on both sides of rule {self}; only {first} has {only or 'none'}; "
                    f"only {name} has {lacking or 'none'}"
                )

    def __str__(self) -> str:
        return " <-> ".join(map(_texts, self.sides.values()))

    @property
    def of_each(self) -> bool:
        """Whether the part is a part of each layer."""
        return "{" in self.part

    def part_at(self, values: Mapping[str, int]) -> str:
        """The name of the part for these numbers."""
        return _INDEX.sub(lambda match: str(values.get(match.group(), match.group())), self.part)

    @property
    def is_second_name(self) -> bool:
        """Whether this rule's tensors are those of the rule that it is tied to, which other conventions store once."""
        return len(self.sides) == 1

    def between(self, source: str, target: str, *, moments: bool = False) -> str:
        """The rule as text, for two of its conventions."""
        return " <-> ".join(_texts(self.entries(name, moments=moments)) for name in (source, target))

    def entries(self, convention: str, *, moments: bool = False) -> tuple[Entry, ...]:
        """The entries of a convention; none if it has no such tensor. moments: those for optimizer state."""
        usual = self.sides.get(convention, ())
        return self.moments.get(convention, usual) if moments else usual

    def kept(self, conventions: Collection[str], tied_to: str) -> Rule:
        """The rule with only the sides of these conventions."""
        sides, moments = (
            {name: side for name, side in table.items() if name in conventions}
            for table in (self.sides, self.moments)
        )
        cases = {name: case for name, case in self.cases.items() if name in conventions}
        return Rule(sides, self.optional, tied_to, moments, self.part, cases)

    def decided(self, choices: Mapping[str, int]) -> Rule:
        """The rule with the entries that remain for these values of choices."""

        def entries(side: tuple[Entry, ...]) -> tuple[Entry, ...]:
            return tuple(entry.decided(choices) for entry in side)

        return replace(
            self,
            sides={name: entries(side) for name, side in self.sides.items()},
            moments={name: entries(side) for name, side in self.moments.items()},
            cases={
                name: {case: entries(side) for case, side in cases.items()}
                for name, cases in self.cases.items()
            },
        )

    @property
    def numberings(self) -> dict[str, Numbering]:
        """The cases of the rule by name, of all conventions."""
        return {numbering.name: numbering for cases in self.cases.values() for numbering in cases}

    def at(self, numbering: Numbering) -> Rule:
        """The rule of one case. Its summands replace ``{i}`` where conventions have ``{i}``; some may lack the case."""
        by_name = {
            name: {case.name: entries for case, entries in cases.items()}
            for name, cases in self.cases.items()
        }
        sides, moments = (
            {
                name: by_name[name].get(numbering.name, ())
                if name in by_name
                else tuple(replace(entry, path=PathPattern(entry.path.text, numbering)) for entry in entries)
                for name, entries in table.items()
            }
            for table in (self.sides, self.moments)
        )
        return Rule({name: side for name, side in sides.items() if side}, self.optional, "", moments)

    def _require_cases(self) -> None:
        for numbering in self.numberings.values():
            for name, side in self._all_sides().items():
                if name not in self.cases and not all(numbering.index in e.path.indices for e in side):
                    raise MappingError(
                        f"expected {numbering.index} in the paths of {name} in rule {self}, of which "
                        f"{numbering.text!r} counts the cases"
                    )
            self.at(numbering)

    def _all_sides(self) -> dict[str, tuple[Entry, ...]]:
        return {**self.sides, **{f"{name}'s moments": side for name, side in self.moments.items()}}


def _texts(entries: Sequence[Entry]) -> str:
    return " & ".join(map(str, entries))


def _zeros(expression: Expression) -> dict[int, str]:
    ends = (dim.parts[-1] if isinstance(dim, Concatenation) else dim for dim in expression.dims)
    return {k: e.name for k, e in enumerate(ends) if isinstance(e, Axis) and e.name.endswith(ZEROS)}


def _spelled_out(expression: str, rotary: Iterable[str]) -> str:
    """The expression with each rotary axis written as a product of its pairs and the two elements of a pair.

    Axes of padding get their suffix.
    """
    expression = _PADDING.sub(rf"\1{ZEROS}", expression)
    for axis in rotary:
        expression = re.sub(rf"interleaved\(\s*{axis}\s*\)", f"({axis}{PAIR} {axis}{HALF})", expression)
        expression = re.sub(rf"(?<![\w.{{]){axis}(?![\w.}}])", f"({axis}{HALF} {axis}{PAIR})", expression)
    return expression
