"""The cost of one step, and the ratio of two contestants' costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """One call: wall seconds, and CPU seconds of the process with all its threads (gloo's, simulated devices')."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Ratio:
    """One contestant's cost over another's in the same round: median and range over the rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours over theirs, round by round; ``ValueError`` for different numbers of rounds."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(each), min(each), max(each))
