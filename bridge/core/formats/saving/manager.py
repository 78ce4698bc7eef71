"""The common part of both runtimes' checkpoint managers: a directory of steps, and the removal of old steps.

::

    runs/                                    after save(12) with max_to_keep=2
      9/                      removed        12 is complete and synced first, then 9 is renamed and removed
      10/  11/  12/           10: a step that is kept for another reason
      13.tmp-3f9c0a1e/        removed        left by a process that was killed while saving
      notes.txt  backup_7/    stay           do not belong to this manager
"""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, SupportsFloat

from bridge.core.formats.files.atomic import fsync_directory, is_temporary
from bridge.core.formats.files.journal import JOURNAL_FILE
from bridge.core.formats.saving import pending
from bridge.core.formats.saving.pending import SaveExtras
from bridge.core.formats.saving.steps import (
    METRICS_FILE,
    Retention,
    choose_step,
    complete_steps,
    read_metrics,
    render_metrics,
)
from bridge.core.formats.stores.store import path_here
from bridge.core.formats.tensors.base import CheckpointError


class StepManager:
    """The checkpoints of one run, one directory each, named by their steps. The runtimes add ``save`` and ``load``.

    Args:
        directory: contains the steps; made by the first save. Only one run may save to it at a time.
        max_to_keep: how many of the latest steps are kept; None: all.
        keep_period: steps that are multiples of this number are kept, too.
        best_metric: the step with the best metric of this name is kept, too.
        best_mode: "min" or "max".
        asynchronous: whether ``save`` returns while the checkpoint is written in the background of the next steps.

    A step is removed only after the save that supersedes it is complete and synced to disk. Only directories that a
    manager saved, or that a manager's killed save left, are ever removed.

    Every method waits for a pending save, and raises ``CheckpointError`` if it failed and the failure was not reported
    yet. So all processes of a run see the same steps. Raises ``ValueError`` for options out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        asynchronous: bool = True,
    ) -> None:
        self.directory = path_here(directory)
        self._retention = Retention(max_to_keep, keep_period, best_metric, best_mode)
        self.asynchronous = asynchronous
        self._cleaned = False
        self._closed = False

    def all_steps(self) -> list[int]:
        """The complete steps in the directory, in order."""
        self.wait()
        return list(complete_steps(self.directory))

    def latest_step(self) -> int | None:
        """The last of ``all_steps``, or None."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The complete step with the best ``best_metric``, the latest of equal ones; None if no step has the metric.

        ``CheckpointError`` if a step's metrics are damaged: the step may be the best.
        """
        self.wait()
        metrics, damaged = self._metrics()
        if damaged:
            raise next(iter(damaged.values()))
        return self._retention.best(metrics)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that a complete step was saved with. ``CheckpointError`` if there is no such step."""
        self.require_step()
        return read_metrics(choose_step(self.directory, step))

    def wait(self) -> None:
        """Return when no save is pending; ``CheckpointError`` if the last one failed and this was not reported yet."""
        pending.settle()

    def close(self) -> None:
        """Wait as ``wait`` does. Later saves are refused."""
        self._closed = True
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failure:
            # The block's own error takes precedence.
            error.add_note(str(failure))

    def require_step(self) -> None:
        """Wait, like every method; ``CheckpointError`` if no step is complete."""
        self.wait()
        if not complete_steps(self.directory):
            raise CheckpointError(
                f"{self.directory}: expected a complete step, got none: call latest_step() first, and begin a new run "
                "if the result is None"
            )

    def path_of(self, step: int) -> Path:
        """Where a save of this step goes. ``ValueError`` for a step below 0, and after ``close``."""
        if self._closed:
            raise ValueError(f"expected an open manager of {self.directory}, got one that was closed")
        if isinstance(step, bool) or not hasattr(step, "__index__") or step.__index__() < 0:
            raise ValueError(f"step: expected an int of at least 0, got {step!r}")
        return self.directory / str(step.__index__())

    def extras(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> SaveExtras:
        """Additions to a save of this step. ``ValueError`` for metrics that are not numbers."""
        # Written even without metrics: the file marks the directory as a manager's.
        files = {METRICS_FILE: render_metrics(metrics or {})}
        return SaveExtras(files, self._clean, lambda: self._remove_superseded(step))

    def _metrics(self) -> tuple[dict[int, dict[str, float]], dict[int, CheckpointError]]:
        """The metrics of each complete step, and for unreadable metrics the reason."""
        by_step: dict[int, dict[str, float]] = {}
        damaged: dict[int, CheckpointError] = {}
        for step, places in complete_steps(self.directory).items() if self._retention.best_metric else ():
            try:
                by_step[step] = read_metrics(places[0])
            except CheckpointError as error:
                damaged[step] = error
        return by_step, damaged

    def _clean(self) -> None:
        """Remove the remains of killed saves; called by one process, before the first save."""
        if self._cleaned or not self.directory.is_dir():
            return
        self._cleaned = True
        for child in self.directory.iterdir():
            step = child.name.partition(".tmp-")[0]
            # A journal belongs to a conversion that can be resumed.
            if step.isdecimal() and is_temporary(child) and not (child / JOURNAL_FILE).exists():
                _remove(child)

    def _remove_superseded(self, saved: int) -> None:
        """Called by one process, after step ``saved`` is complete."""
        steps = complete_steps(self.directory)
        metrics, damaged = self._metrics()
        for step in self._retention.superseded(list(steps), self._retention.best(metrics), saved):
            if step in damaged:
                warnings.warn(f"{damaged[step]}; the step is kept, since it may be the best", stacklevel=2)
                continue
            own = self.directory / str(step)
            if own in steps[step] and (own / METRICS_FILE).exists():
                try:
                    _remove(_renamed(own))
                except FileNotFoundError:
                    # Another process removed it.
                    continue
                except OSError as error:
                    warnings.warn(
                        f"{own}: the step is superseded and cannot be removed: {error}", stacklevel=2
                    )


def _renamed(step: Path) -> Path:
    """Remove it under a temporary name, so that no reader finds half of a step."""
    temporary = step.with_name(f"{step.name}.tmp-{secrets.token_hex(4)}")
    os.rename(step, temporary)
    # Before anything is removed: otherwise a power cut could bring the name back with half of its files.
    fsync_directory(step.parent)
    return temporary


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
