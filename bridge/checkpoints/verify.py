"""Verification of a checkpoint: is everything there, and is it what was written?

    structure      metadata parses; names, shapes, dtypes and files are those of the manifest
    completeness   every chunk is stored, once, inside its file
    checksums      of the manifest, if there is one, and those that the format itself has
    finiteness     NaNs and infinities are counted

All problems are collected, not only the first. Memory stays at a few regions of 32 MiB.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from bridge.checkpoints.finite import count_not_finite
from bridge.checkpoints.manifest_problems import (
    Problem,
    SaysWhatIsChecked,
    crc_problems,
    entry_problems,
    file_problems,
    object_problems,
    rest_problems,
    structure_problems,
)
from bridge.checkpoints.summary import manifest_home
from bridge.checkpoints.workers import default_workers, large_buffers_returned, ordered
from bridge.formats import open_checkpoint
from bridge.formats.arrays import array_checksum
from bridge.formats.base import Box, CheckpointError, CheckpointReader, TensorInfo, unreadable
from bridge.formats.composite import parts_of
from bridge.formats.files.manifest import (
    Manifest,
    ManifestTensor,
    manifest_path,
    read_manifest,
)
from bridge.formats.regions import REGION_BYTES, Progress, group_boxes, split_box
from bridge.formats.step_paths import Step, at_step
from bridge.formats.stores.hub import hub_hint
from bridge.formats.stores.listing import Listing
from bridge.formats.stores.store import is_url


@dataclass(frozen=True)
class NotFinite:
    """A tensor with elements that are no numbers or infinite; the parts of complex ones count as two."""

    name: str
    nan: int
    infinite: int


@dataclass(frozen=True)
class VerifyReport:
    """The findings. ``bytes`` are those of the tensors' elements.

    opened: whether the checkpoint could be opened at all; if not, only files were compared with the manifest, and
    error is what opening it has raised.
    manifest: whether there is one. protected: bytes that a checksum of the manifest or of the format covers; None where
    the format does not say. unread: names of tensors whose elements cannot be read, and so were not looked at.
    """

    path: Path | str
    format: str
    opened: bool
    manifest: bool
    tensors: int
    chunks: int
    objects: int
    bytes: int
    protected: int | None
    problems: tuple[Problem, ...]
    not_finite: tuple[NotFinite, ...]
    unread: tuple[str, ...]
    seconds: float
    error: Exception | None = None

    @property
    def good(self) -> bool:
        """Whether no problem was found."""
        return self.opened and not self.problems


def verify(
    path: str | os.PathLike[str],
    *,
    finite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    items: Sequence[str] = (),
    step: Step | None = None,
) -> VerifyReport:
    """Verify a checkpoint of any format, or a directory of steps with exactly one. items, step: see `open_checkpoint`.

    finite: NaNs and infinities are problems. workers: threads, some 64 MiB of memory each; default: one per core, at
    most 4. Raises FileNotFoundError if nothing is there,
    ValueError for workers < 1.
    """
    started = time.perf_counter()
    path = at_step(path, step)
    if is_url(path):
        listing = Listing(str(path))
        try:
            report = _verify(listing.root, finite, workers, progress, items, started)
        finally:
            listing.close()
        return dataclasses.replace(report, path=listing.url)
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: expected a checkpoint there{hub_hint(path)}")
    return _verify(Path(path), finite, workers, progress, items, started)


def _verify(
    place: Path,
    finite: bool,
    workers: int | None,
    progress: Progress | None,
    items: Sequence[str],
    started: float,
) -> VerifyReport:
    problems: list[Problem] = []
    parts = parts_of(place, items)
    if len(parts) > 1:
        reports = {
            name: _verify(part, finite, workers, progress, (), started) for name, part in parts.items()
        }
        return _joined(place, reports, time.perf_counter() - started)
    if parts:
        (place,) = parts.values()
    home = manifest_home(place)
    try:
        manifest = read_manifest(home)
    except CheckpointError as error:
        manifest = None
        problems.append(Problem(manifest_path(home).name, str(error)))
    if manifest is not None:
        problems += file_problems(home, manifest)
    try:
        reader = open_checkpoint(place)
    except (CheckpointError, OSError) as error:
        problems.append(Problem(str(place), f"cannot be opened: {error}"))
        seconds = time.perf_counter() - started
        found = manifest.format if manifest else ""
        return VerifyReport(
            place,
            found,
            False,
            manifest is not None,
            0,
            0,
            0,
            0,
            None,
            tuple(problems),
            (),
            (),
            seconds,
            error,
        )
    with large_buffers_returned(), reader:
        if manifest is not None:
            problems += structure_problems(reader, manifest)
            problems += rest_problems(reader, home, manifest)
        problems += _objects_problems(reader, manifest)
        check = _Check(reader, manifest)
        tensors = check.run(default_workers() if workers is None else workers, progress)
        problems += [problem for found in tensors for problem in found.problems]
        not_finite = tuple(
            NotFinite(found.name, found.nan, found.infinite)
            for found in tensors
            if found.nan or found.infinite
        )
        if finite:
            problems += [
                Problem(
                    found.name,
                    f"expected finite elements, found {found.nan} NaN and {found.infinite} infinite",
                )
                for found in not_finite
            ]
        return VerifyReport(
            place,
            reader.format,
            True,
            manifest is not None,
            len(tensors),
            sum(len(info.chunks) for info in reader.tensors.values()),
            len(reader.objects),
            sum(info.nbytes for info in reader.tensors.values()),
            check.protected(),
            tuple(problems),
            not_finite,
            tuple(unreadable(reader)),
            time.perf_counter() - started,
        )


def _joined(place: Path, reports: Mapping[str, VerifyReport], seconds: float) -> VerifyReport:
    """The report of several items that are one tree."""
    found = list(reports.values())
    protected = [report.protected for report in found]
    return VerifyReport(
        place,
        found[0].format,
        all(report.opened for report in found),
        all(report.manifest for report in found),
        sum(report.tensors for report in found),
        sum(report.chunks for report in found),
        sum(report.objects for report in found),
        sum(report.bytes for report in found),
        None if None in protected else sum(p for p in protected if p is not None),
        tuple(
            Problem(f"{name}/{p.where}", p.text) for name, report in reports.items() for p in report.problems
        ),
        tuple(
            NotFinite(f"{name}/{one.name}", one.nan, one.infinite)
            for name, report in reports.items()
            for one in report.not_finite
        ),
        tuple(f"{name}/{one}" for name, report in reports.items() for one in report.unread),
        seconds,
        next((report.error for report in found if report.error is not None), None),
    )


def _objects_problems(reader: CheckpointReader, manifest: Manifest | None) -> Iterator[Problem]:
    for name in reader.objects:
        try:
            value = reader.objects[name]
        except CheckpointError as error:
            yield Problem(name, str(error))
            continue
        if manifest is not None:
            yield from object_problems(name, value, manifest)


@dataclass
class _Found:
    """The findings in one tensor, or in one region of it."""

    name: str
    problems: list[Problem] = field(default_factory=list)
    nan: int = 0
    infinite: int = 0

    def add(self, other: _Found) -> None:
        self.problems += other.problems
        self.nan += other.nan
        self.infinite += other.infinite


_Work: TypeAlias = Callable[[], tuple[int, _Found]]
_BATCH_BYTES = 8 << 20


class _Check:
    """The tensors of an open checkpoint, compared with its manifest, if any."""

    def __init__(self, reader: CheckpointReader, manifest: Manifest | None) -> None:
        self._reader = reader
        self._listed: dict[str, ManifestTensor] = {}
        self._found = {name: _Found(name) for name in reader.tensors}
        for name, entry in (manifest.tensors if manifest else {}).items():
            if name in reader.tensors:
                problems = list(entry_problems(reader.tensors[name], entry))
                self._found[name].problems += problems
                if not problems:
                    self._listed[name] = entry

    def protected(self) -> int | None:
        """Bytes of elements that a checksum covers."""
        infos = self._reader.tensors
        if isinstance(self._reader, SaysWhatIsChecked):
            checked = self._reader.checksummed
            return sum(i.nbytes for n, i in infos.items() if n in self._listed or checked(n))
        return sum(infos[name].nbytes for name in self._listed) if len(self._listed) == len(infos) else None

    def run(self, workers: int, progress: Progress | None) -> list[_Found]:
        """Read everything."""
        total, done = sum(info.nbytes for info in self._reader.tensors.values()), 0
        for results in ordered(lambda batch: [work() for work in batch], self._batches(), workers):
            for size, found in results:
                self._found[found.name].add(found)
                done += size
                if progress is not None:
                    progress(done, total, found.name)
        return list(self._found.values())

    def _batches(self) -> Iterator[list[_Work]]:
        """The work; handing a small tensor to another thread would take as long as to look at it."""
        batch: list[_Work] = []
        nbytes = 0
        for size, work in self._work():
            batch.append(work)
            nbytes += size
            if nbytes >= _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def _work(self) -> Iterator[tuple[int, _Work]]:
        closed = unreadable(self._reader)
        for name, info in self._reader.tensors.items():
            if name in closed:
                continue
            if name in self._listed:
                chunks = self._listed[name].chunks
                # Few large reads rather than many small ones; each chunk has a checksum of its own.
                for joint, members in group_boxes(chunks, info.dtype.itemsize):
                    size = joint.numel * info.dtype.itemsize
                    yield size, partial(self._region, info, joint, {box: chunks[box] for box in members})
            else:
                for joint, members in group_boxes(info.chunks, info.dtype.itemsize):
                    size = joint.numel * info.dtype.itemsize
                    yield size, partial(self._region, info, joint, dict.fromkeys(members))

    def _region(self, info: TensorInfo, joint: Box, crcs: Mapping[Box, int | None]) -> tuple[int, _Found]:
        """Some chunks that fill a box together."""
        found = _Found(info.name)
        size = joint.numel * info.dtype.itemsize
        if len(crcs) == 1 or size > REGION_BYTES:
            for chunk, crc in crcs.items():
                found.add(self._chunk(info, chunk, crc))
            return size, found
        try:
            array = self._reader.read(info.name, joint)
        except CheckpointError:
            # Again, chunk by chunk: the report names the damaged ones.
            for chunk, crc in crcs.items():
                found.add(self._chunk(info, chunk, crc))
            return size, found
        found.nan, found.infinite = count_not_finite(array)
        for chunk, crc in crcs.items():
            if crc is not None:
                found.problems += crc_problems(info, chunk, crc, array_checksum(array[chunk.slices(joint)]))
        return size, found

    def _chunk(self, info: TensorInfo, chunk: Box, expected: int | None) -> _Found:
        found, crc = _Found(info.name), 0
        # Cut along the slowest axes: the pieces follow each other in the chunk.
        for piece in split_box(chunk, info.dtype.itemsize):
            try:
                array = self._reader.read(info.name, piece)
            except CheckpointError as error:
                found.problems.append(Problem(info.name, str(error)))
                return found
            nan, infinite = count_not_finite(array)
            found.nan += nan
            found.infinite += infinite
            if expected is not None:
                crc = array_checksum(array, crc=crc)
        if expected is not None:
            found.problems += crc_problems(info, chunk, expected, crc)
        return found
