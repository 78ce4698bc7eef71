"""Shared parts of the pictures of errors: a log axis with places for 0, inf and NaN, and names that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bridge.core.text import printable
from bridge.parity.partners.rows import Row
from bridge.parity.recorded.distance import FACTOR

_LANE = 0.09
_MOST_TICKS = 8
MODULE_STAGES = ("forward", "precision", "backward")


@dataclass(frozen=True)
class Axis:
    """A log axis from ``10**low`` to ``10**high``, in fractions of its length from the foot.

    A log axis has no place for 0, inf and NaN: each one that occurs gets its own lane, below or above the decades.
    """

    low: int
    high: int
    zero: bool
    infinite: bool
    nan: bool

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Axis:
        """The axis for the errors and floors of rows."""
        errors = [row.error for row in rows]
        values = [*errors, *(row.floor for row in rows), *(row.floor * FACTOR for row in rows)]
        logs = [math.log10(value) for value in values if 0 < value < math.inf]
        low = math.floor(min(logs, default=-8.0))
        high = math.ceil(max(logs, default=0.0))
        return cls(
            low,
            max(high, low + 2),
            any(error <= 0 for error in errors),
            math.inf in errors,
            any(math.isnan(error) for error in errors),
        )

    def place(self, value: float) -> float:
        """The position of a value: always a finite number between 0 and 1."""
        if math.isnan(value):
            return 1 - _LANE / 4
        if value == math.inf:
            return 1 - _LANE / 4 - _LANE * self.nan
        if value <= 0:
            return _LANE / 4 if self.zero else 0.0
        bottom, top = _LANE * self.zero, 1 - _LANE * (self.infinite + self.nan)
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return bottom + (top - bottom) * min(max(part, 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels, from the foot."""
        step = math.ceil((self.high - self.low) / _MOST_TICKS)
        # 10.0**-324 and 10.0**309 are not float64 numbers.
        decades = [power for power in range(self.low, self.high + 1, step) if -324 < power < 309]
        found = [(self.place(10.0**power), f"1e{power}") for power in decades]
        lanes = ((self.zero, 0.0, "0"), (self.infinite, math.inf, "inf"), (self.nan, math.nan, "nan"))
        return sorted([*found, *((self.place(value), label) for there, value, label in lanes if there)])


def shown(name: str, most: int = 0) -> str:
    """A model's name for a page or a picture: of several names, the first and the last; of a long name, the end.

    ``most``: characters; 0 for any number.
    """
    names = printable(name).replace("\n", "\\n").split(", ")
    text = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
    return "…" + text[len(text) - most + 1 :] if 0 < most < len(text) else text


def place_of(row: Row, most: int = 0) -> str:
    """Where a row is in the torch model: module or parameter, number of the call, leaf of the output.

    ``most``: characters, as for ``shown``; the end of the leaf and of the name remain.
    """
    rest = f"#{row.call}" if row.call else ""
    if row.leaf:
        rest += f" [{shown(row.leaf, most // 3)}]"
    return shown(row.name or "(model)", max(most - len(rest), 2) if most else 0) + rest


def thinned(count: int, most: int) -> range:
    """Indices of at most ``most`` of ``count`` things, evenly spaced."""
    return range(0, count, max(1, math.ceil(count / most)))


def worst(rows: Iterable[Row]) -> Row | None:
    """The row with the largest ratio; NaN counts as the largest."""
    return max(rows, key=lambda row: math.inf if math.isnan(row.ratio) else row.ratio, default=None)
