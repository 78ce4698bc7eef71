"""Conversion of a checkpoint to another format, and through a mapping to another model family's names and layouts.

    source reader -> plan (names, index relations) -> destination chunk by chunk -> commit

Only the current chunks are in memory. The destination appears complete or not at all, and the source is never written
to. Nothing is cast unless requested by name: every bit is preserved.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from bridge.checkpoints.convert.engine import Copier, runs
from bridge.checkpoints.convert.plan import (
    Conversion,
    ConvertOptions,
    certificate_of,
    conversion_key,
    planned,
    require_unchanged,
)
from bridge.checkpoints.ground.outputs import Output
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.ground.workers import default_workers, large_buffers_returned
from bridge.core.formats import Format, create_checkpoint
from bridge.core.formats.files.journal import Attempt, abandoned
from bridge.core.formats.stores.store import is_url, local_path, place_of, without_end
from bridge.core.formats.stores.upload import UploadPath
from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader, CheckpointWriter
from bridge.core.formats.tensors.boxes import REGION_BYTES
from bridge.core.formats.whole.companions import Companions
from bridge.core.formats.whole.replaceable import require_replaceable
from bridge.core.formats.whole.step_paths import Step, at_step
from bridge.core.long_calls import Follow, collection_paused, followed
from bridge.core.mapping.language.rules import MappingLike
from bridge.core.mapping.language.table import Tied
from bridge.core.text import counted, human_bytes
from bridge.core.views import Viewed


@dataclass(frozen=True, repr=False)
class ConvertReport(Viewed):
    """The result of a conversion.

    bytes: of the tensors' elements. resumed_bytes: bytes that an earlier attempt or other parts had written. dropped:
    names in the source that were not copied. overflowed: by name, how many finite elements a cast made infinite or NaN,
    without those of an earlier attempt. inexact: names of tensors that a mapping or a cast rounds. verified:
    whether the source's checksums, if any, were compared. companions: files that were copied, such as `config.json`.
    kept: companions that a replaced checkpoint had and the source lacks. not_copied: why other companions were not
    copied. conventions, remarks: see `bridge.core.mapping.plan.plan`. left_alone: by name, files next to the source
    that look like weights, each with the reason why it was not read. filled: by name in the destination, the content of
    leaves that the source lacks, see `template.py`. faults: what `salvage` left out, by name. True if `complete`.
    """

    source: Path | str
    destination: Path | str
    source_format: str
    format: str
    tensors: int
    objects: int
    bytes: int
    resumed_bytes: int
    dropped: tuple[str, ...]
    overflowed: Mapping[str, int]
    inexact: tuple[str, ...]
    verified: bool
    seconds: float
    companions: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    not_copied: Mapping[str, str] = field(default_factory=dict)
    conventions: tuple[str, str] | None = None
    remarks: tuple[str, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)
    filled: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all was whole, every file of weights was read, and no cast made a finite element infinite or NaN."""
        return not (self.faults or self.left_alone or self.overflowed)

    def __bool__(self) -> bool:
        return self.complete

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.source} ({self.source_format}) -> {self.destination} ({self.format}): "
            f"{counted(self.tensors, 'tensor')}, {human_bytes(self.bytes)} in {self.seconds:.1f} s"
            f"{'' if self.complete else ', not complete'}"
        )


def report_of(
    conversion: Conversion,
    destination: Path | str,
    *,
    resumed: int,
    overflowed: Mapping[str, int],
    verified: bool,
    started: float,
) -> ConvertReport:
    """The report of a finished conversion. started: by ``time.perf_counter``."""
    return ConvertReport(
        conversion.source,
        destination,
        conversion.source_format,
        conversion.format,
        len(conversion.outputs),
        len(conversion.objects),
        conversion.nbytes,
        resumed,
        conversion.left_out,
        overflowed,
        conversion.inexact,
        verified,
        time.perf_counter() - started,
        *_fates(conversion.companions, destination),
        conventions=conversion.conventions,
        remarks=conversion.remarks,
        left_alone=conversion.left_alone,
        filled=conversion.filled,
        faults=conversion.faults,
    )


def _fates(
    companions: Companions, destination: Path | str
) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, str]]:
    """The companions that were copied, the companions that were kept, and why others were not copied."""
    is_file = (
        format_by_name(destination) is not None if isinstance(destination, str) else not destination.is_dir()
    )
    if not is_file:
        return tuple(companions.files), tuple(companions.kept), companions.refused
    reason = f"{destination} is one file, and its directory may be anybody's"
    return (), (), {**companions.refused, **dict.fromkeys(companions.files, reason)}


def format_by_name(dst: str | os.PathLike[str]) -> Format | None:
    """The format that a destination's name implies: "safetensors" by suffix, None for others."""
    return "safetensors" if os.fspath(dst).endswith(".safetensors") else None


def require_place(conversion: Conversion, destination: Path, replace_it: bool) -> None:
    """Refuse a destination that exists already or overlaps with what is read, before anything is written."""
    there = os.path.lexists(destination)
    if there and not replace_it:
        raise FileExistsError(
            f"{destination} exists already: remove it first, choose another name, or replace it (--replace)"
        )
    _require_apart(conversion.source, destination)
    if not there:
        return
    require_replaceable(destination)
    # It must not be or contain a file that is read: indexes and links lead anywhere.
    real = Path(os.path.realpath(destination))
    also_read = ((owner, files) for owner, (files, _) in conversion.also_read.items())
    for owner, files in (("source", conversion.files), *also_read):
        for path in files:
            file = Path(os.path.realpath(path))
            if real == file or real in file.parents:
                raise CheckpointError(
                    f"{destination} is or contains {path}, a file of the {owner}: expected a destination outside the "
                    f"{owner}"
                )


def _require_apart(source: Path | str, destination: Path) -> None:
    local_source = local_path(source)
    if local_source is None:
        return
    real_source, real_destination = Path(os.path.realpath(local_source)), Path(os.path.realpath(destination))
    if real_source == real_destination or real_source in real_destination.parents:
        raise CheckpointError(f"{destination} is inside the source {source}: expected a destination outside")
    if os.path.lexists(destination) and real_destination in real_source.parents:
        raise CheckpointError(
            f"{destination} contains the source {source}, and would be replaced: expected a destination that does not"
        )


@contextmanager
def naming(destination: Path) -> Iterator[None]:
    """Name the destination in system errors: the temporary file no longer exists when the user reads the message.

    Errors about files of the source keep their name.
    """
    target = os.path.abspath(destination)
    try:
        yield
    except OSError as error:
        name = error.filename
        path = os.path.abspath(os.fsdecode(name)) if isinstance(name, str | bytes) else target
        # The destination, anything in it or in its working directory, or a directory that will contain it.
        ours = f"{path}/".startswith((f"{target}/", f"{target}.tmp-")) or target.startswith(f"{path}/")
        if error.errno is None or not ours:
            raise
        # OSError chooses the subclass for the error number.
        raise OSError(error.errno, error.strerror, str(destination)) from error


def require_space(destination: Path, nbytes: int) -> None:
    free = shutil.disk_usage(destination.parent).free
    if free < nbytes:
        left = [str(directory) for directory in abandoned(destination)]
        hint = f"; killed attempts left {', '.join(left)}: resume (--resume), or remove them" if left else ""
        raise CheckpointError(
            f"too little free space for {destination}: expected {nbytes} bytes, found {free}; free some, choose "
            f"another place, or convert less (--select, --weights-only){hint}"
        )


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Format | None = None,
    mapping: MappingLike | None = None,
    into: str | None = None,
    from_: str | None = None,
    axes: Mapping[str, int] | None = None,
    selection: Selection | None = None,
    casts: Sequence[str] = (),
    tied: Tied | None = None,
    verify: bool = True,
    any_model: bool = False,
    companions: bool = True,
    dequantize: bool = False,
    merge_adapter: str | os.PathLike[str] | None = None,
    replace: bool = False,
    resume: bool = False,
    progress: Follow = None,
    workers: int | None = None,
    items: Sequence[str] = (),
    step: Step | None = None,
    write_items: Sequence[str] = (),
    optimizer_order: str | None = None,
    like: object = None,
    salvage: bool = False,
) -> ConvertReport:
    """Convert the checkpoint ``src`` to the new checkpoint ``dst``, each at a local path or a URL that fsspec knows.

    to, mapping, into, from_, axes, selection, casts, tied, any_model, companions, dequantize, merge_adapter, items,
    write_items, optimizer_order, like, salvage: see `ConvertOptions`. step: a number or "latest", where ``src`` is a
    directory of steps. verify: whether checksums of ``src`` are compared; without it, damage goes into ``dst``, whose
    own checksums then vouch for it. replace: ``dst`` may be a checkpoint, which is kept until the new one is complete.
    resume: go on where an earlier attempt of the same conversion was killed, and, if this one fails, keep what it has
    written to be resumed. progress: called with the bytes done, those in all and a tensor's name; by default tqdm shows
    a bar in a notebook and on a terminal, and False shows none. workers: threads, default by cores; memory grows with
    it, about 64 MiB each. A checkpoint at a URL replaces nothing, and ``resume`` goes on with the parts that are there
    where the store lists them (S3).

    Raises FileNotFoundError (no source), FileExistsError (destination there already), CheckpointError (source
    damaged, or mapping and source do not fit, or not enough space), ValueError (unknown format, workers < 1), OSError
    (what the system or a store refuses). After any error, an interruption too, the destination is as it was before.
    """
    if step is not None:
        src = at_step(src, step)
    options = ConvertOptions(
        to or format_by_name(dst) or ("orbax" if write_items else None),
        mapping,
        into,
        from_,
        axes,
        selection or Selection(),
        casts,
        tied,
        verify,
        any_model,
        companions=companions,
        dequantize=dequantize,
        merge_adapter=merge_adapter,
        items=items,
        write_items=write_items,
        optimizer_order=optimizer_order,
        like=like,
        salvage=salvage,
    )
    return convert_with(src, dst, options, replace=replace, resume=resume, progress=progress, workers=workers)


def convert_with(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    options: ConvertOptions,
    *,
    replace: bool = False,
    resume: bool = False,
    progress: Follow = None,
    workers: int | None = None,
) -> ConvertReport:
    """Like `convert`, with its choices as ``options``; without a format there, the name of ``dst`` does not decide."""
    workers = default_workers() if workers is None else workers
    if workers < 1:
        raise ValueError(f"expected 1 worker or more, got {workers}")
    if not is_url(dst):
        return _convert(src, Path(dst), options, replace, resume, progress, workers)
    local = local_path(str(dst))
    if local is not None:
        report = _convert(src, local, options, replace, resume, progress, workers)
        return dataclasses.replace(report, destination=str(dst))
    if replace:
        raise CheckpointError(
            f"{dst} is in an object store, which cannot replace a checkpoint atomically: expected no replace "
            "(--replace)"
        )
    # Sent files would become a part of the source.
    if is_url(src) and f"{dst}/".startswith(f"{without_end(str(src))}/"):
        raise CheckpointError(f"{dst} is inside the source {src}: expected a destination outside")
    return _convert(src, str(dst), options, replace, resume, progress, workers)


def _convert(
    src: str | os.PathLike[str],
    destination: Path | str,
    options: ConvertOptions,
    replace: bool,
    resume: bool,
    progress: Follow,
    workers: int,
) -> ConvertReport:
    started = time.perf_counter()
    with planned(place_of(src), options) as (conversion, reader):
        if isinstance(destination, Path):
            require_place(conversion, destination, replace)
        attempt = Attempt(
            require_replaceable if replace else None,
            conversion_key(conversion, options.items_to_write),
            resume,
            conversion.companions.place,
            certificate_of(conversion, options),
        )
        with (
            large_buffers_returned(),
            naming(destination) if isinstance(destination, Path) else nullcontext(),
            create_checkpoint(
                destination,
                conversion.format,
                attempt=attempt,
                items=options.items_to_write,
                like=options.step_like,
            ) as writer,
        ):
            resumed = _write(reader, writer, conversion, workers, progress)
            # Inside the block: leaving the block with an error keeps the mixture from appearing.
            require_unchanged(conversion)
        return report_of(
            conversion,
            destination,
            resumed=resumed,
            overflowed={name: o.overflowed for name, o in conversion.outputs.items() if o.overflowed},
            verified=options.verify or options.salvage,
            started=started,
        )


def declare(
    conversion: Conversion, writer: CheckpointWriter, outputs: Iterable[Output], *, values: bool = True
) -> dict[str, str]:
    """Declare objects, tensors and kinds, and return the writer's names of tensors; without ``values``, only tensors.

    All of them before the first chunk is written: a safetensors header precedes the data.
    """
    for path, value in conversion.objects.values() if values else ():
        writer.add_object(path, value)
    names = {o.name: writer.add_tensor(o.path, o.shape, o.dtype).name for o in outputs}
    if values:
        writer.add_kinds(conversion.kinds)
    return names


def _write(
    reader: CheckpointReader, writer: CheckpointWriter, conversion: Conversion, workers: int, progress: Follow
) -> int:
    """Write everything; return the bytes that were already there."""
    outputs: Collection[Output] = conversion.outputs.values()
    with collection_paused():
        names = declare(conversion, writer, outputs)
    done = sum(box.numel * o.dtype.itemsize for o in outputs for box in writer.stored(names[o.name]))
    if isinstance(writer.path, UploadPath):
        # Written in the destination's order: a store accepts parts of a file.
        outputs = sorted(outputs, key=lambda output: writer.position(names[output.name]))
        work = runs(outputs, writer, names, REGION_BYTES)
    else:
        require_space(writer.path, conversion.nbytes - done)
        work = runs(outputs, writer, names)
    with followed("convert", progress) as tell:
        Copier(reader, writer, work, done=done, total=conversion.nbytes, progress=tell).run(workers)
    return done
