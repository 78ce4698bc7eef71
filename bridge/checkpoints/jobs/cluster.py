"""A conversion whose parts run on a cluster: processes on this machine, or Ray.

    parts 1 2 3 4 ... -> submit -> told: progress   done: next   lost: submit again -> all done: join

If a worker is lost, with or without its machine, only work that its part has not noted in its journal is lost.
"""

from __future__ import annotations

import copyreg
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from bridge.checkpoints.convert.conversion import ConvertReport
from bridge.checkpoints.convert.plan import ConvertOptions
from bridge.checkpoints.jobs.array_jobs import PartReport, commit_parts, convert_part, require_directory
from bridge.core.formats.files.journal import InUse
from bridge.core.formats.stores.store import is_url
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.boxes import Progress
from bridge.core.mapping.language.rules import mapping_table

MAX_LOST = 5
"""How often the worker of one part may be lost: a part that kills each of its workers will kill the next one, too."""

TELL_SECONDS = 0.25
"""Seconds between a worker's progress reports."""

Handle = TypeVar("Handle")


def _read_only(entries: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(entries)


def _sent(entries: Mapping[Any, Any]) -> tuple[Any, tuple[dict[Any, Any]]]:
    return _read_only, (dict(entries),)


# Mapping tables contain such views and are sent to the workers, but Python cannot pickle the views.
copyreg.pickle(MappingProxyType, _sent)


class Told(NamedTuple):
    """A part's progress: its `done` bytes, and the bytes of the `whole` conversion."""

    done: int
    whole: int


Tell: TypeAlias = Callable[[Told], None]


class _Teller:
    """Reports the total immediately, and then the part's progress, not too often."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._whole, self._last = tell, 0, 0.0

    def planned(self, whole: int) -> None:
        self._whole = whole
        self.progress(0, 0, "")

    def progress(self, done: int, total: int, name: str) -> None:
        now = time.monotonic()
        if not done or now - self._last >= TELL_SECONDS:
            self._last = now
            self._tell(Told(done, self._whole))


class WorkerLost(Exception):
    """The process that ran a part has ended without a result."""


@dataclass(frozen=True)
class PartTask:
    """One part, to be run in another process: `convert_part` with these arguments."""

    src: str
    dst: str
    options: ConvertOptions
    part: int
    parts: int
    replace: bool
    workers: int

    def run(self, tell: Tell) -> PartReport:
        """Write the part. tell: called from time to time, by any thread, with the progress."""
        teller = _Teller(tell)
        try:
            return self._run(teller, resume=True)
        except InUse:
            # A worker behind a broken network may count as lost but finish: the first to finish is kept.
            return self._run(teller, resume=False)

    def _run(self, teller: _Teller, resume: bool) -> PartReport:
        return convert_part(
            self.src,
            self.dst,
            self.options,
            self.part,
            self.parts,
            commit=False,
            replace=self.replace,
            resume=resume,
            workers=self.workers,
            progress=teller.progress,
            planned_bytes=teller.planned,
        )


class Cluster(Protocol[Handle]):
    """Runs parts. `slots`: how many at once."""

    @property
    def slots(self) -> int: ...

    def submit(self, task: PartTask) -> Handle:
        """Start a part."""

    def wait(self, handles: Sequence[Handle], hear: Callable[[Handle, Told], None]) -> Handle:
        """Wait for one of these parts to end. hear: called with workers' progress meanwhile."""

    def result(self, handle: Handle) -> PartReport:
        """The report of an ended part. WorkerLost if its process died; otherwise the part's own error, if any."""

    def close(self) -> None:
        """End what is still running."""


def convert_on(
    cluster: Cluster[Handle],
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    options: ConvertOptions,
    *,
    parts: int,
    replace: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert on a cluster, in so many parts, each with ``workers`` threads; see `convert_part` and `commit_parts`.

    progress: called with the bytes done, the total bytes, and how many parts are done. Parts that an earlier attempt
    completed are not run again. Raises the errors of these two functions, and CheckpointError for a part whose worker
    was lost MAX_LOST times; complete parts then stay for the next attempt.
    """
    started = time.perf_counter()
    source = str(src) if is_url(src) else os.path.abspath(src)
    destination = str(dst) if is_url(dst) else os.path.abspath(dst)
    # The same options for a process on a machine that may lack the mapping's file, or in another working directory.
    like = options.like
    like = os.path.abspath(like) if isinstance(like, str | os.PathLike) and not is_url(like) else like
    options = dataclasses.replace(options, mapping=mapping_table(options.mapping), like=like)
    # Otherwise each worker would find out separately, after it has started.
    require_directory(dst, options)
    waiting = [
        PartTask(source, destination, options, part, parts, replace, workers) for part in range(1, parts + 1)
    ]
    with closing(cluster):
        resumed = _run_all(cluster, waiting, progress)
    committed = commit_parts(source, destination, options, parts=parts, replace=replace)
    return dataclasses.replace(committed, resumed_bytes=resumed, seconds=time.perf_counter() - started)


def _run_all(cluster: Cluster[Handle], tasks: Sequence[PartTask], progress: Progress | None) -> int:
    """Run all parts, rerunning those of lost workers; return the bytes that earlier attempts had written."""
    waiting, parts = list(tasks), len(tasks)
    running: dict[Handle, PartTask] = {}
    lost: Counter[int] = Counter()
    resumed = done = whole = 0
    told: dict[int, int] = {}

    def show(task: PartTask, said: int) -> None:
        told[task.part] = said
        if progress is not None and whole:
            progress(sum(told.values()), whole, f"{done} of {parts} parts")

    def hear(handle: Handle, said: Told) -> None:
        nonlocal whole
        whole = said.whole
        show(running[handle], said.done)

    while waiting or running:
        while waiting and len(running) < cluster.slots:
            task = waiting.pop(0)
            running[cluster.submit(task)] = task
        handle = cluster.wait(list(running), hear)
        task = running.pop(handle)
        try:
            report = cluster.result(handle)
        except WorkerLost as error:
            lost[task.part] += 1
            if lost[task.part] >= MAX_LOST:
                raise CheckpointError(
                    f"part {task.part} of {parts}: its worker was lost {MAX_LOST} times, the last time with: {error}; "
                    "look for the reason on its machine (memory?), then convert again: complete parts are kept"
                ) from None
            waiting.append(task)
            continue
        resumed += report.bytes if report.found else report.resumed_bytes
        done += 1
        show(task, report.bytes)
    return resumed
