"""Verification of a checkpoint: is everything there, and as it was written?

    structure      metadata parses; names, shapes, dtypes and files are those of the manifest
    completeness   every chunk is stored, once, inside its file
    checksums      of the manifest, if there is one, and of the format itself
    finiteness     NaNs and infinities are counted

All problems are collected, not only the first. Memory stays at a few regions of 32 MiB.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bridge.checkpoints.ground.borrowed import MEMORY, borrow, count_not_finite
from bridge.checkpoints.ground.checked import (
    Problem,
    SaysWhatIsChecked,
    copy_problems,
    crc_problems,
    entry_problems,
    file_problems,
    manifest_home,
    object_problems,
    rest_problems,
    structure_problems,
)
from bridge.checkpoints.ground.workers import batches, default_workers, each, large_buffers_returned, ordered
from bridge.checkpoints.verify.verify_report import NotFinite, VerifyReport, joined
from bridge.core.formats import open_checkpoint
from bridge.core.formats.files.certificate import WRONG
from bridge.core.formats.files.manifest import Manifest, ManifestTensor, manifest_path, read_manifest
from bridge.core.formats.reading.regular_files import changed, stamps
from bridge.core.formats.stores.listing import Listing
from bridge.core.formats.stores.store import hub_hint, is_url
from bridge.core.formats.tensors.arrays import array_checksum
from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TensorInfo, unreadable
from bridge.core.formats.tensors.boxes import REGION_BYTES, Progress, group_boxes, split_box
from bridge.core.formats.tensors.wrapping import damage_noted
from bridge.core.formats.whole.companions import left_alone, left_alone_by_parts
from bridge.core.formats.whole.composite import parts_of
from bridge.core.formats.whole.step_paths import Step, at_step
from bridge.core.long_calls import Follow, followed


def verify(
    path: str | os.PathLike[str],
    *,
    finite: bool = False,
    workers: int | None = None,
    progress: Follow = None,
    items: Sequence[str] = (),
    step: Step | None = None,
) -> VerifyReport:
    """Verify a checkpoint of any format, or a directory of steps with exactly one. items, step: see `open_checkpoint`.

    finite: NaNs and infinities are problems. workers: threads, some 64 MiB of memory each; default: one per core, at
    most 4. progress: see `convert`. Raises FileNotFoundError if nothing is there, ValueError for workers < 1.
    """
    request = _Request(finite, workers, progress, time.perf_counter())
    path = at_step(path, step)
    if is_url(path):
        with closing(Listing(str(path))) as listing:
            report = _verify(listing.root, items, request)
        return dataclasses.replace(report, path=listing.url)
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: expected a checkpoint there{hub_hint(path)}")
    return _verify(Path(path), items, request)


class _Request(NamedTuple):
    """The options of a verification. started: by `time.perf_counter`."""

    finite: bool
    workers: int | None
    progress: Follow
    started: float

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def _verify(where: Path, items: Sequence[str], request: _Request) -> VerifyReport:
    parts = parts_of(where, items)
    if len(parts) <= 1:
        (item,) = parts.values() or (where,)
        return _verify_item(item, request)
    reports = {name: _verify(part, (), request) for name, part in parts.items()}
    report = joined(where, reports, request.seconds)
    left = left_alone_by_parts(
        [*parts.values()], report.format, {name: part.left_alone for name, part in reports.items()}
    )
    return dataclasses.replace(report, left_alone=left)


def _verify_item(where: Path, request: _Request) -> VerifyReport:
    problems: list[Problem] = []
    home = manifest_home(where)
    try:
        manifest = read_manifest(home)
    except CheckpointError as error:
        manifest = None
        problems.append(Problem(manifest_path(home).name, str(error)))
    if manifest is not None:
        problems += file_problems(home, manifest)
    try:
        with damage_noted() as damage:
            reader = open_checkpoint(where)
        if damage and not (reader.tensors or reader.objects):
            reader.close()
            raise next(iter(damage.values()))
    except (CheckpointError, OSError) as error:
        others = [Problem(part, str(said)) for part, said in damage.items() if said is not error]
        problems += [*others, Problem(str(where), f"cannot be opened: {error}")]
        return VerifyReport(
            path=where,
            format=manifest.format if manifest else "",
            opened=False,
            manifest=manifest is not None,
            problems=tuple(problems),
            seconds=request.seconds,
            error=error,
        )
    problems += [Problem(part, str(said)) for part, said in damage.items()]
    with large_buffers_returned(), reader:
        return _verify_open(where, home, reader, manifest, problems, request)


def _verify_open(
    where: Path,
    home: Path,
    reader: CheckpointReader,
    manifest: Manifest | None,
    problems: list[Problem],
    request: _Request,
) -> VerifyReport:
    """The report of an open checkpoint. home: the path with the manifest. problems: of files, found earlier."""
    certificate = None
    if manifest is not None:
        certificate, problem = manifest.certificate, manifest.certificate_problem
        if certificate is not None and certificate.verdict == WRONG:
            problem = f"the certificate's proof: {WRONG} (convert --prove): {certificate}"
        problems += [Problem(manifest_path(home).name, problem)] if problem else []
    before, noted = stamps(reader.files()), {problem.where for problem in problems}
    if manifest is not None:
        problems += structure_problems(reader, manifest)
        problems += rest_problems(reader, home, manifest)
    problems += _objects_problems(reader, manifest)
    check = _Check(reader, manifest)
    workers = default_workers() if request.workers is None else request.workers
    with followed("verify", request.progress) as tell:
        tensors = check.run(workers, tell)
    problems += [problem for tensor in tensors for problem in tensor.problems if tensor.name not in noted]
    problems += copy_problems(reader)
    problems += [Problem(Path(file).name, text) for file, text in changed(before)]
    unlisted: Mapping[str, str] = {}
    try:
        unlisted = left_alone(reader)
    except OSError as error:
        problems.append(Problem(str(where), f"cannot be listed: {error}"))
    not_finite = tuple(
        NotFinite(tensor.name, tensor.nan, tensor.infinite)
        for tensor in tensors
        if tensor.nan or tensor.infinite
    )
    for tensor in not_finite if request.finite else ():
        text = f"expected finite elements, found {tensor.nan} NaN and {tensor.infinite} infinite"
        problems.append(Problem(tensor.name, text))
    return VerifyReport(
        path=where,
        format=reader.format,
        opened=True,
        manifest=manifest is not None,
        tensors=len(reader.tensors),
        chunks=sum(len(info.chunks) for info in reader.tensors.values()),
        objects=len(reader.objects),
        bytes=sum(info.nbytes for info in reader.tensors.values()),
        protected=check.protected(),
        problems=tuple(problems),
        not_finite=not_finite,
        unread=tuple(unreadable(reader)),
        seconds=request.seconds,
        damaged=tuple(tensor.name for tensor in tensors if tensor.problems),
        left_alone=unlisted,
        certificate=certificate,
    )


def _objects_problems(reader: CheckpointReader, manifest: Manifest | None) -> Iterator[Problem]:
    for name in reader.objects:
        try:
            value = reader.objects[name]
        except (CheckpointError, OSError) as error:
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


class _Region(NamedTuple):
    """Some chunks that fill a box together, with the CRC-32C of each in the manifest, if it lists them."""

    info: TensorInfo
    box: Box
    crcs: Mapping[Box, int | None]
    nbytes: int


_BLOCK_BYTES = 1 << 20
"""Elements inspected at a time: the second pass finds them in the processor's cache."""


class _Check:
    """The tensors of an open checkpoint, compared with its manifest, if any."""

    def __init__(self, reader: CheckpointReader, manifest: Manifest | None) -> None:
        self._reader = reader
        self._listed: dict[str, ManifestTensor] = {}
        # Only for tensors with findings: there may be 100,000 others.
        self._found: dict[str, _Found] = {}
        for name, entry in (manifest.tensors if manifest else {}).items():
            if name in reader.tensors:
                problems = list(entry_problems(reader.tensors[name], entry))
                if problems:
                    self._add(_Found(name, problems))
                else:
                    self._listed[name] = entry

    def protected(self) -> int | None:
        """Bytes of elements that a checksum covers."""
        infos = self._reader.tensors
        if isinstance(self._reader, SaysWhatIsChecked):
            checked = self._reader.checksummed
            total = 0
            for name, info in infos.items():
                # For a damaged tensor, whose checksum may not be found, `run` reports what is wrong.
                with suppress(CheckpointError, OSError):
                    total += info.nbytes if name in self._listed or checked(name) else 0
            return total
        return sum(infos[name].nbytes for name in self._listed) if len(self._listed) == len(infos) else None

    def run(self, workers: int, progress: Progress | None) -> list[_Found]:
        """Read everything. Returns the findings in tensors, in order; nothing for tensors without findings."""
        tensors = self._reader.tensors
        total, done = sum([info.nbytes for info in tensors.values()]), 0
        together = batches((region.nbytes, region) for region in self._regions())
        look_at = partial(each, lambda region: (region, self._region(*region)))
        for results in ordered(look_at, together, workers):
            for region, results_of_region in results:
                if results_of_region is not None:
                    self._add(results_of_region)
                done += region.nbytes
                if progress is not None:
                    progress(done, total, region.info.name)
        return [self._found[name] for name in tensors if name in self._found]

    def _add(self, results: _Found) -> None:
        known = self._found.setdefault(results.name, results)
        if known is not results:
            known.add(results)

    def _regions(self) -> Iterator[_Region]:
        closed = unreadable(self._reader)
        for name, info in self._reader.tensors.items():
            if name in closed:
                continue
            listed = self._listed.get(name)
            crcs: Mapping[Box, int | None] = dict.fromkeys(info.chunks) if listed is None else listed.chunks
            if len(crcs) == 1:
                (box,) = crcs
                yield _Region(info, box, crcs, box.numel * info.dtype.itemsize)
                continue
            # Few large reads rather than many small ones; each chunk has its own checksum.
            for joint, members in group_boxes(crcs, info.dtype.itemsize):
                of_these = {box: crcs[box] for box in members}
                yield _Region(info, joint, of_these, joint.numel * info.dtype.itemsize)

    def _region(
        self, info: TensorInfo, joint: Box, crcs: Mapping[Box, int | None], nbytes: int
    ) -> _Found | None:
        """None if there are no findings, as in nearly all regions."""
        if len(crcs) > 1 and nbytes <= REGION_BYTES:
            try:
                array = self._reader.read(info.name, joint)
            except (CheckpointError, OSError):
                pass  # Again, chunk by chunk: the report names the damaged ones.
            else:
                problems: list[Problem] = []
                for chunk, crc in crcs.items():
                    if crc is not None:
                        part = array[chunk.slices(joint)]
                        problems += crc_problems(info, chunk, crc, array_checksum(part))
                return _found(info, problems, *count_not_finite(array))
        results: _Found | None = None
        for chunk, crc in crcs.items():
            of_chunk = self._chunk(info, chunk, crc)
            if results is None:
                results = of_chunk
            elif of_chunk is not None:
                results.add(of_chunk)
        return results

    def _chunk(self, info: TensorInfo, chunk: Box, expected: int | None) -> _Found | None:
        crc, nan, infinite = 0, 0, 0
        # Cut along the slowest axes: the pieces are consecutive in the chunk.
        for piece in split_box(chunk, info.dtype.itemsize):
            try:
                loan = borrow(self._reader, info.name, piece, MEMORY.first)
            except (CheckpointError, OSError) as error:
                return _Found(info.name, [Problem(info.name, str(error))], nan, infinite)
            known = loan.crc  # only for a whole tensor, and so for the whole chunk
            flat = loan.array.reshape(-1)
            step = _BLOCK_BYTES // flat.itemsize
            for first in range(0, flat.size, step):
                block = flat[first : first + step]
                if expected is not None and known is None:
                    crc = array_checksum(block, crc=crc)
                more_nan, more_infinite = count_not_finite(block)
                nan, infinite = nan + more_nan, infinite + more_infinite
            loan.give_back()
            crc = crc if known is None else known
        problems = [] if expected is None else crc_problems(info, chunk, expected, crc)
        return _found(info, problems, nan, infinite)


def _found(info: TensorInfo, problems: list[Problem], nan: int, infinite: int) -> _Found | None:
    return _Found(info.name, problems, nan, infinite) if problems or nan or infinite else None
