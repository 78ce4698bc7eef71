"""Numbers that conventions count differently: one number of a path as a sum of others.

    [numbers]
    local = "{i} = 4 * {block} + {turn}, {turn} < 3"      layers 0 1 2, 4 5 6, ...: blocks of 4, of which 3 are local
    full = "{i} = 4 * {block} + 3"                        layers 3, 7, ...
    dense = "{i} = {n}, {n} < first"                      layers before the size `first` of [axes] or [config]
    moe = "{i} = first + {n}"                             the layers after them, counted from 0

A convention that counts like this has entries for each case, with the numbers of the right side in paths or as axes.
The other conventions have ``{i}`` in their paths::

    torch = "layers.{i}.norm.weight : m"
    maxtext.local = "decoder/local_layers/norm/scale : m {block} {turn}"
    maxtext.full = "decoder/global_layer/norm/scale : m {block}"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bridge.core.mapping.language.arithmetic import PRODUCT, evaluate, names_in
from bridge.core.mapping.language.errors import MappingError

_INDEX = r"\{[A-Za-z_]\w*\}"
_EQUATION = re.compile(rf"\s*(?P<index>{_INDEX})\s*=(?P<sum>[^=<,]+)(?P<bounds>(?:,[^,]+)*)")
_BOUND = re.compile(rf"\s*(?P<index>{_INDEX})\s*<\s*(?P<size>\d+|[A-Za-z_]\w*)\s*")

Size = int | str
"""A number, or the axis whose size it is."""


@dataclass(frozen=True)
class Numbering:
    """The numbers of one case: ``index`` is the sum of ``digits``, each times its stride, and of ``starts``.

    digits: index and stride, the largest stride first. starts: factor and size. bounds: of digits, exclusive.
    """

    name: str
    text: str
    index: str
    digits: tuple[tuple[str, int], ...]
    starts: tuple[tuple[int, Size], ...] = ()
    bounds: tuple[tuple[str, Size], ...] = ()

    @staticmethod
    def parse(name: str, text: str) -> Numbering:
        """Parse ``{i} = 6 * {block} + {turn}, {turn} < 6``. Raises MappingError, quoting the text."""
        match = _EQUATION.fullmatch(text)
        try:
            terms = [_term(term) for term in (match["sum"].split("+") if match else ())]
        except ValueError:
            terms = []
        digits = [(str(name), stride) for stride, name in terms if str(name).startswith("{")]
        bounds = [_BOUND.fullmatch(part) for part in (match["bounds"].split(",")[1:] if match else ())]
        if match is None or not all(stride for _, stride in digits) or not digits or not all(bounds):
            raise MappingError(
                f"expected numbers {name} such as '{{i}} = 6 * {{block}} + {{turn}}, {{turn}} < 6', got {text!r}"
            )
        numbering = Numbering(
            name,
            text,
            match["index"],
            tuple(sorted(digits, key=lambda digit: -digit[1])),
            tuple(term for term in terms if not str(term[1]).startswith("{")),
            tuple((m["index"], _size(m["size"])) for m in bounds if m is not None),
        )
        numbering._require_one_way()
        return numbering

    @property
    def indices(self) -> tuple[str, ...]:
        """The digits' names."""
        return tuple(index for index, _ in self.digits)

    @property
    def axes(self) -> frozenset[str]:
        """The axes whose sizes it uses."""
        return frozenset(size for _, size in (*self.starts, *self.bounds) if isinstance(size, str))

    def at(self, sizes: Mapping[str, int]) -> Numbering:
        """The same with the sizes of its axes. Raises KeyError for an unknown size."""
        starts = tuple((n, size if isinstance(size, int) else sizes[size]) for n, size in self.starts)
        bounds = tuple((n, size if isinstance(size, int) else sizes[size]) for n, size in self.bounds)
        return replace(self, starts=starts, bounds=bounds)

    def limits(self) -> dict[str, int]:
        """How many values each bounded digit has, if the sizes are known."""
        return {index: size for index, size in self.bounds if isinstance(size, int)}

    def split(self, number: int) -> dict[str, int] | None:
        """The digits of a number; None if the number belongs to another case. Sizes must be known."""
        left, values = number - self._start(), {}
        if left < 0:
            return None
        for index, stride in self.digits:
            values[index], left = divmod(left, stride)
        limits = self.limits()
        if left or any(values[index] >= limit for index, limit in limits.items()):
            return None
        return values

    def join(self, values: Mapping[str, int]) -> int:
        """The number with these digits. Sizes must be known."""
        return self._start() + sum(stride * values[index] for index, stride in self.digits)

    def _start(self) -> int:
        return sum(factor * int(size) for factor, size in self.starts)

    def _require_one_way(self) -> None:
        """Raise MappingError unless the digits of each number are unique."""
        limits, known = self.limits(), set(self.indices)
        if len(known) != len(self.digits) or {index for index, _ in self.bounds} - known:
            raise MappingError(f"expected each number in {self.text!r} once, and bounds for these only")
        for (above, larger), (index, stride) in zip(self.digits, self.digits[1:], strict=False):
            if index not in limits or limits[index] * stride > larger or larger % stride:
                raise MappingError(
                    f"expected a bound of at most {larger // stride} for {index} in {self.text!r}, because {above} "
                    f"counts in steps of {larger}; got {limits.get(index, 'none')}"
                )


def parse_numbers(data: object, where: str) -> dict[str, Numbering]:
    """The table [numbers] of a mapping, by name. Raises MappingError."""
    if not isinstance(data, dict) or not all(isinstance(text, str) for text in data.values()):
        raise MappingError(f"expected a table [numbers] of texts in {where}, got {data!r:.200}")
    if taken := data.keys() & {"weights", "moments"}:
        raise MappingError(
            f"expected other names for numbers in {where} than weights and moments, got {min(taken)}"
        )
    try:
        return {name: Numbering.parse(name, text) for name, text in data.items()}
    except MappingError as error:
        raise MappingError(f"{where}: {error}") from error


def _term(text: str) -> tuple[int, Size]:
    """A factor and the one name that it multiplies, or 1 and a number. ValueError for any other text."""
    names = names_in(text, PRODUCT)
    number = evaluate(text, dict.fromkeys(names, 1))
    if len(names) > 1 or any("." in name for name in names):
        raise ValueError(text)
    return (number, names[0]) if names else (1, number)


def _size(text: str) -> Size:
    return int(text) if text.isdigit() else text
