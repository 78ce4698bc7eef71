"""The content of a metrics file: series of numbers by step, and the error for files that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

STEP_NAMES = ("step", "global_step", "_step")
"""Names of the step, in any case; the first name that a file has counts."""

_LARGEST = 2**63 - 1


class MetricsError(ValueError):
    """A metrics file that cannot be read, or runs or options that cannot be compared."""


@dataclass(frozen=True, eq=False)
class Series:
    """One metric of one run. ``steps``: int64 ``[n]``, strictly increasing. ``values``: float64 ``[n]``."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


class Collected:
    """Points in the order of the file, by metric. If a step has several points, the last counts, as after a resume."""

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}

    def add(self, name: str, step: int, value: float) -> None:
        self._points.setdefault(name, {})[step] = value

    def series(self) -> dict[str, Series]:
        return {name: _sorted(points) for name, points in self._points.items()}


def _sorted(points: Mapping[int, float]) -> Series:
    steps = np.fromiter(points.keys(), np.int64, len(points))
    values = np.fromiter(points.values(), np.float64, len(points))
    order = np.argsort(steps)
    return Series(steps[order], values[order])


def as_step(value: object) -> int | None:
    """``value`` as a step; None for anything except a whole number of 64 bits."""
    number = as_number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -_LARGEST <= value <= _LARGEST else None
    if number is None or not np.isfinite(number) or number != int(number) or abs(number) > 2**53:
        return None
    return int(number)


def as_number(value: object) -> float | None:
    """``value`` as a float; also text such as "1e-3" and "nan". None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
