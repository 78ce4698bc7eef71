"""A conversion in parts: each part is a separate process, on any machine that sees source and destination.

    part 1   plan -> its pieces -> part_1/ appears --\
    part 2   plan -> its pieces -> part_2/ appears ---+-- the last to finish: all there? -> join -> destination appears
    part 3   plan -> its pieces -> part_3/ appears --/

Parts need not know about each other: each plans the whole conversion from the source's metadata, and takes its own
pieces. A killed part is run again; a complete part is not written again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.checkpoints.convert.conversion import (
    ConvertReport,
    declare,
    naming,
    report_of,
    require_place,
    require_space,
)
from bridge.checkpoints.convert.engine import Copier, runs
from bridge.checkpoints.convert.plan import (
    Conversion,
    ConvertOptions,
    certificate_of,
    conversion_key,
    planned,
    require_unchanged,
)
from bridge.checkpoints.ground.workers import default_workers, large_buffers_returned
from bridge.checkpoints.jobs.pieces import PartPlan, make_part_plan
from bridge.checkpoints.jobs.stage import Stage, stages_at
from bridge.core.formats.files.journal import Attempt, InUse
from bridge.core.formats.safetensors.files import SUFFIX
from bridge.core.formats.stores.store import is_url, local_path, place_of
from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader, CheckpointWriter
from bridge.core.formats.tensors.boxes import Progress
from bridge.core.formats.whole.in_parts import create_part, join_parts, require_names
from bridge.core.formats.whole.replaceable import require_replaceable
from bridge.core.text import first_of

_WAIT_SECONDS = 0.2


@dataclass(frozen=True)
class PartReport:
    """The result of one part of a conversion.

    bytes: of the elements of its pieces. resumed_bytes: bytes that an earlier attempt had written. found: whether the
    part was already complete. overflowed: see `ConvertReport`. missing: parts that were incomplete when this part
    finished. committed: whether the destination is there. whole: if this part committed, the report of the whole
    conversion, with this part's seconds.
    """

    destination: Path
    part: int
    parts: int
    pieces: int
    bytes: int
    resumed_bytes: int
    found: bool
    overflowed: Mapping[str, int]
    missing: tuple[int, ...]
    committed: bool
    seconds: float
    whole: ConvertReport | None = None


def convert_part(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    options: ConvertOptions,
    part: int,
    parts: int,
    *,
    commit: bool = True,
    replace: bool = False,
    resume: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    planned_bytes: Callable[[int], None] | None = None,
) -> PartReport:
    """Write part ``part`` of ``parts``, from 1, of a conversion to the directory ``dst``.

    All parts need the same source, options and number of parts, and a file system that all of them see. commit: make
    the destination appear when all parts are complete; the last part to finish does it. replace, resume, workers,
    progress: see `convert`. planned_bytes: called with the bytes of all parts, before any is written. Two concurrent
    runs of one part do no harm: the first to finish is kept.

    Raises the errors of `convert`, and CheckpointError for a destination that is a URL or a single file, and for a part
    outside 1 to `parts`.
    """
    started = time.perf_counter()
    if not 1 <= part <= parts:
        raise CheckpointError(f"expected a part from 1 to {parts}, got {part}")
    destination = require_directory(dst, options)
    with planned(place_of(src), options) as (conversion, reader):
        if planned_bytes is not None:
            planned_bytes(conversion.nbytes)
        plan = make_part_plan(conversion.format, conversion.outputs, parts)
        stage = _stage(destination, conversion, parts)
        resumed, overflowed, was_there = 0, {}, True
        if not stage.committed():
            require_place(conversion, destination, replace)
            require_names(destination, conversion.format, _leaves(conversion))
            stage.create(plan)
            if not stage.part(part).is_dir():
                copy = _PartCopy(reader, conversion, stage, plan, part, options.verify)
                was_there, resumed = copy.run(
                    resume, default_workers() if workers is None else workers, progress
                )
                overflowed = copy.overflowed
        missing = () if stage.committed() else stage.missing
        whole = None
        if commit and not missing and not stage.committed():
            notes = _commit(conversion, options, stage, replace)
            written = 0 if was_there else plan.sizes[part - 1] - resumed
            whole = _whole(destination, conversion, options, notes, started, written)
        committed = stage.committed()
        if committed:
            # A late run may have started a part that another run has just finished.
            stage.tidy()
        return PartReport(
            destination,
            part,
            parts,
            len(plan.parts[part - 1]),
            plan.sizes[part - 1],
            resumed,
            was_there,
            overflowed,
            missing,
            committed,
            time.perf_counter() - started,
            whole,
        )


def commit_parts(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    options: ConvertOptions,
    *,
    parts: int | None = None,
    replace: bool = False,
) -> ConvertReport:
    """Make the destination of a conversion in parts appear. parts: their number, by default as found.

    Raises CheckpointError if parts are missing, or belong to another source or other options, and the errors of
    `convert` about source, options and destination. Then the parts stay unchanged.
    """
    started = time.perf_counter()
    destination = require_directory(dst, options)
    with planned(place_of(src), options) as (conversion, _):
        stage = _found_stage(destination, conversion, parts)
        if not stage.committed():
            require_place(conversion, destination, replace)
            if stage.missing:
                raise CheckpointError(_missing(stage))
        notes = _commit(conversion, options, stage, replace)
        stage.tidy()
    return _whole(destination, conversion, options, notes, started)


def _whole(
    destination: Path,
    conversion: Conversion,
    options: ConvertOptions,
    notes: Sequence[Mapping[str, object]],
    started: float,
    written: int = 0,
) -> ConvertReport:
    """The report of the whole conversion. written: bytes since it started; other runs wrote the rest."""
    overflowed: dict[str, int] = {}
    verified = options.verify
    for note in notes:
        verified = verified and bool(note["verified"])
        for name, count in _counts(note["overflowed"]).items():
            overflowed[name] = overflowed.get(name, 0) + count
    return report_of(
        conversion,
        destination,
        resumed=conversion.nbytes - written,
        overflowed=overflowed,
        verified=verified,
        started=started,
    )


class _PartCopy:
    def __init__(
        self,
        reader: CheckpointReader,
        conversion: Conversion,
        stage: Stage,
        plan: PartPlan,
        part: int,
        verified: bool,
    ) -> None:
        self._reader, self._conversion, self._stage, self._part = reader, conversion, stage, part
        self._share = plan.share(part)
        self._total = plan.sizes[part - 1]
        self._outputs = [conversion.outputs[name] for name in self._share.chunks]
        self._verified = verified
        self.overflowed: dict[str, int] = {}

    def run(self, resume: bool, workers: int, progress: Progress | None) -> tuple[bool, int]:
        """Whether another run of the part was faster, and the bytes that an earlier run had written."""
        stage, path = self._stage, self._stage.part(self._part)
        attempt = Attempt(None, {**stage.key, "part": str(self._part)}, resume)
        try:
            with (
                large_buffers_returned(),
                naming(stage.destination),
                create_part(path, self._conversion.format, self._share, attempt) as writer,
            ):
                resumed = self._write(writer, workers, progress)
                require_unchanged(self._conversion)
                self.overflowed = {o.name: o.overflowed for o in self._outputs if o.overflowed}
                stage.note(self._part, {"overflowed": self.overflowed, "verified": self._verified})
        except OSError:
            # Its directory has appeared meanwhile, or was removed with all others: another run has finished.
            if path.is_dir() or stage.committed():
                return True, 0
            raise
        return False, resumed

    def _write(self, writer: CheckpointWriter, workers: int, progress: Progress | None) -> int:
        outputs = self._outputs
        names = declare(self._conversion, writer, outputs, values=self._part == 1)
        done = sum(box.numel * o.dtype.itemsize for o in outputs for box in writer.stored(names[o.name]))
        require_space(writer.path, self._total - done)
        work = runs(outputs, writer, names)
        Copier(self._reader, writer, work, done=done, total=self._total, progress=progress).run(workers)
        return done


def _commit(
    conversion: Conversion, options: ConvertOptions, stage: Stage, replace: bool
) -> Sequence[Mapping[str, object]]:
    """Join all parts. If another process is joining them, wait for it."""
    replaceable, outputs = require_replaceable if replace else None, conversion.outputs.values()
    certificate = certificate_of(conversion, options)
    attempt = Attempt(replaceable, stage.key, True, conversion.companions.place, certificate)
    parts = [stage.part(number) for number in range(1, stage.count + 1)]
    notes: Sequence[Mapping[str, object]] = ()
    while not stage.committed():
        try:
            notes = stage.notes()
            require_unchanged(conversion)
            with naming(stage.destination):
                join_parts(
                    stage.destination,
                    conversion.format,
                    parts,
                    attempt,
                    stage.conversion,
                    lambda writer: declare(conversion, writer, outputs),
                )
        except InUse as error:
            if error.directory != stage.path:
                raise
            # Another job is joining the parts: poll until the destination is there, or that job has ended without it.
            time.sleep(_WAIT_SECONDS)
        except (CheckpointError, OSError):
            if not stage.committed():
                raise
    return notes


def _stage(destination: Path, conversion: Conversion, parts: int) -> Stage:
    return Stage(destination, {**conversion_key(conversion), "parts": str(parts)})


def _found_stage(destination: Path, conversion: Conversion, parts: int | None) -> Stage:
    """The stage of this conversion with so many parts; for any number, the stage with the fewest missing parts."""
    candidates = stages_at(destination)
    counts = [int(key["parts"]) for key in candidates.values() if str(key.get("parts", "")).isdecimal()]
    # A destination that already exists is recognized with any number of parts.
    counts = (counts if parts is None else [parts]) or [1]
    stages = [_stage(destination, conversion, count) for count in counts]
    own = [stage for stage in stages if stage.path in candidates or stage.committed()]
    if own:
        return min(own, key=lambda stage: len(stage.missing))
    wanted = conversion_key(conversion)
    others = [
        f"{directory} ({'; '.join(_differences(wanted, key)) or 'other parts'})"
        for directory, key in candidates.items()
    ]
    raise CheckpointError(
        f"no parts of this conversion to {destination}: expected parts that --part K/N wrote with the same source and "
        f"options, found {', '.join(others) or 'none'}: run the parts with the options of this command"
    )


def _differences(wanted: Mapping[str, str], noted: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: expected {value}, found {noted.get(name, 'nothing')}"
        for name, value in wanted.items()
        if noted.get(name) != value
    ]


def _missing(stage: Stage) -> str:
    missing = stage.missing
    return (
        f"{stage.destination}: expected {stage.count} complete parts, found {stage.count - len(missing)}: missing "
        f"{'is part' if len(missing) == 1 else 'are parts'} {first_of(missing)} of {stage.count}; run those (--part "
        f"{missing[0]}/{stage.count}), then commit again"
    )


def _leaves(conversion: Conversion) -> list[tuple[str | int, ...]]:
    return [
        *(path for path, _ in conversion.objects.values()),
        *(output.path for output in conversion.outputs.values()),
    ]


def _counts(value: object) -> Mapping[str, int]:
    return {str(name): int(count) for name, count in value.items()} if isinstance(value, dict) else {}


def require_directory(dst: str | os.PathLike[str], options: ConvertOptions) -> Path:
    """The absolute path of a destination in parts. CheckpointError for one in a store, a single file, several items."""
    if options.items_to_write:
        raise CheckpointError(
            f"{dst}: expected no named items for a conversion in parts, got {', '.join(options.items_to_write)} "
            "(--write-item, or a step as the template); convert without parts, or give the step's item as the template"
        )
    local = local_path(str(dst))
    if is_url(dst) and local is None:
        raise CheckpointError(
            f"{dst} is in an object store: expected a directory that all parts see, for a conversion in parts; convert "
            "to a local path, or without parts"
        )
    if os.fspath(dst).endswith(SUFFIX):
        raise CheckpointError(
            f"{dst} is one file, which has one writer: expected a directory for a conversion in parts, which will hold "
            "shards and their index"
        )
    return Path(os.path.abspath(dst if local is None else local))
