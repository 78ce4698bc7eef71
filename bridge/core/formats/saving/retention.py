"""Which steps of a run stay on disk.

::

    max_to_keep=2, keep_period=10, best_metric="loss"

    step        8     9     10    11    12
    loss       0.3   0.2    0.5   0.4   0.6
    stays             best  period  latest two
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, SupportsFloat

from bridge.core.formats.tensors.base import CheckpointError

METRICS_FILE = "twinshard_metrics.json"
"""In a step's directory: the metrics that the step was saved with, a JSON object of numbers."""


@dataclass(frozen=True)
class Retention:
    """``max_to_keep``: how many of the latest steps stay, None for all. ``keep_period``: its multiples all stay.

    ``best_metric``: the metric by which a step is the best one; that step stays. ``best_mode``: whether the lowest or
    the highest value is the best. Raises ``ValueError`` for numbers below 1 and for another mode.
    """

    max_to_keep: int | None = None
    keep_period: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("max_to_keep", "keep_period"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}: expected None or an int of at least 1, got {value!r}")
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode: expected 'min' or 'max', got {self.best_mode!r}")

    def best(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best of steps with these metrics, the latest of equal ones; None where none has the metric.

        A value that is no number is none.
        """
        if self.best_metric is None:
            return None
        sign = -1.0 if self.best_mode == "min" else 1.0
        values = {step: of_step.get(self.best_metric, math.nan) for step, of_step in metrics.items()}
        ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
        return max(ranked)[1] if ranked else None

    def superseded(self, steps: Sequence[int], best: int | None, saved: int) -> list[int]:
        """Those of ``steps`` that go now that step ``saved`` is complete."""
        if self.max_to_keep is None:
            return []
        stay = {best, saved, *sorted(steps)[-self.max_to_keep :]}
        if self.keep_period is not None:
            stay |= {step for step in steps if step % self.keep_period == 0}
        return [step for step in sorted(steps) if step not in stay]


def render_metrics(metrics: Mapping[str, SupportsFloat]) -> bytes:
    """The content of ``METRICS_FILE``. ``ValueError`` for a metric that is no number, by name."""
    values = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"metrics: expected names that are str, got {name!r}")
        try:
            values[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metrics: {name}: expected a number, got {value!r:.80}") from error
    return json.dumps(values).encode()


def read_metrics(step: Path) -> dict[str, float]:
    """The metrics of a step's directory; none where it has no such file. ``CheckpointError`` for a damaged one."""
    try:
        metrics = json.loads((step / METRICS_FILE).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{step / METRICS_FILE}: expected the metrics of a step: {error!s:.200}"
        ) from error
    if not isinstance(metrics, dict):
        raise CheckpointError(f"{step / METRICS_FILE}: expected the metrics of a step, found {metrics!r:.80}")
    return {str(name): float(value) for name, value in metrics.items() if isinstance(value, int | float)}
