"""Directories of steps, as a loop with regular saves leaves them, and choosing a step in one.

::

    run/3    run/4    run/5.orbax-checkpoint-tmp      4: the save of 5 did not finish
    run/step_3 ...                                    prefixes, and zeros before the number, are fine

Which steps stay on disk with `Retention(max_to_keep=2, keep_period=10, best_metric="loss")`::

    step        8     9     10    11    12
    loss       0.3   0.2    0.5   0.4   0.6
    stays             best  period  latest two
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, SupportsFloat

from bridge.core.formats.files.atomic import is_unfinished
from bridge.core.formats.orbax.item import COMMIT_FILE, TREE_FILE
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.text import first_of

_STEP = re.compile(r"(?:.+_)?(\d+)")
_OF_A_CHECKPOINT = (TREE_FILE, "_CHECKPOINT_METADATA", ".metadata")
_SHOWN = 10


def choose_step(path: Path, step: int | None) -> Path:
    """The directory of the latest complete step in ``path``, or of ``step``; ``path`` itself if it is a checkpoint.

    Raises ``CheckpointError`` if the step is missing or incomplete, and if two directories are this step;
    ``ValueError`` for a step that is not an int.
    """
    if isinstance(step, bool) or not (step is None or hasattr(step, "__index__")):
        raise ValueError(f"step: expected an int or None, got {step!r}")
    is_checkpoint = any((path / name).exists() for name in _OF_A_CHECKPOINT)
    numbers = {} if is_checkpoint or not path.is_dir() else _numbers(path)
    if not numbers:
        if step is None:
            return path
        raise CheckpointError(
            f"step: expected a directory of steps at {path}, got another kind of directory: leave step out to load a "
            "single checkpoint"
        )
    complete = _complete(list(numbers))
    known = sorted({numbers[child] for child in complete})
    if step is None and not known:
        raise CheckpointError(
            f"{path}: expected a complete step, got only steps whose save did not finish: "
            f"{first_of(sorted(child.name for child in numbers))}"
        )
    wanted = known[-1] if step is None else step
    chosen = [child for child in complete if numbers[child] == wanted]
    if len(chosen) != 1:
        seen = " and ".join(sorted(child.name for child in chosen)) or (
            "one whose save did not finish" if wanted in numbers.values() else "none"
        )
        listed = ", ".join(map(str, known[-_SHOWN:]))
        raise CheckpointError(
            f"step: expected one complete step {wanted} in {path}, got {seen}: complete are {listed or 'none'}"
        )
    return chosen[0]


def complete_steps(path: Path) -> dict[int, list[Path]]:
    """The complete steps in a directory, by number, in order; none if there is no directory.

    Two directories may have one number, such as ``3`` and ``step_3``.
    """
    numbers = _numbers(path) if path.is_dir() else {}
    by_number: dict[int, list[Path]] = {}
    for child in sorted(_complete(list(numbers)), key=lambda child: (numbers[child], child.name)):
        by_number.setdefault(numbers[child], []).append(child)
    return by_number


def _numbers(path: Path) -> dict[Path, int]:
    return {
        child: int(named[1])
        for child in path.iterdir()
        if (named := _STEP.fullmatch(child.name)) and child.is_dir() and not is_unfinished(child)
    }


def _complete(steps: list[Path]) -> list[Path]:
    """The directories that have a tree of arrays, and the file that is written last."""
    # DCP has its own last file.
    dcp = [step for step in steps if (step / ".metadata").exists()]
    trees = [step for step in steps if _has(step, TREE_FILE)]
    # Orbax before 0.12.3 wrote no such file on local disks, where directories appear complete.
    return [*dcp, *([step for step in trees if _has(step, COMMIT_FILE)] or trees)]


def _has(step: Path, name: str) -> bool:
    return any(next(step.glob(pattern + name), None) for pattern in ("", "*/"))


METRICS_FILE = "twinshard_metrics.json"
"""In a step's directory: the metrics that the step was saved with, a JSON object of numbers."""


@dataclass(frozen=True)
class Retention:
    """``max_to_keep``: how many of the latest steps are kept, None for all. ``keep_period``: its multiples are kept.

    ``best_metric``: the metric that determines the best step, which is kept. ``best_mode``: whether the lowest or the
    highest value is the best. Raises ``ValueError`` for numbers below 1 and for another mode.
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
        """The best of steps with these metrics, the latest of equal ones; None if none has the metric.

        A value that is not a number does not count.
        """
        if self.best_metric is None:
            return None
        sign = -1.0 if self.best_mode == "min" else 1.0
        values = {step: of_step.get(self.best_metric, math.nan) for step, of_step in metrics.items()}
        ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
        return max(ranked)[1] if ranked else None

    def superseded(self, steps: Sequence[int], best: int | None, saved: int) -> list[int]:
        """The steps in ``steps`` to remove now that step ``saved`` is complete."""
        if self.max_to_keep is None:
            return []
        stay = {best, saved, *sorted(steps)[-self.max_to_keep :]}
        if self.keep_period is not None:
            stay |= {step for step in steps if step % self.keep_period == 0}
        return [step for step in sorted(steps) if step not in stay]


def render_metrics(metrics: Mapping[str, SupportsFloat]) -> bytes:
    """The content of ``METRICS_FILE``. ``ValueError``, with the name, for a metric that is not a number."""
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
    """The metrics of a step's directory; none if it has no such file. ``CheckpointError`` for a damaged file."""
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
