"""Conversion of a checkpoint to another format, and through a mapping to another model family's names and layouts.

    source reader -> plan (names, index relations) -> destination chunk by chunk -> commit

Only the chunks in work are in memory. The destination appears complete or not at all, and the source is never written
to. Nothing is cast unless it is asked for by name: every bit arrives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bridge.checkpoints.convert.convert_report import ConvertReport, went_along
from bridge.checkpoints.convert.destination import (
    format_by_name,
    naming,
    require_place,
    require_space,
    require_untouched,
)
from bridge.checkpoints.convert.engine import Copier, runs
from bridge.checkpoints.convert.options import ConvertOptions
from bridge.checkpoints.ground.casts import Output, apply_casts, parse_casts
from bridge.checkpoints.ground.checked import checked
from bridge.checkpoints.ground.dtypes import require_dtypes
from bridge.checkpoints.ground.kinds import carried_kinds
from bridge.checkpoints.ground.selection import SelectedReader, Selection, readable_values
from bridge.checkpoints.ground.workers import default_workers, large_buffers_returned
from bridge.core.formats import Format, create_checkpoint, open_checkpoint
from bridge.core.formats.files.working import Attempt
from bridge.core.formats.stores.reader import StoredReader, home_of
from bridge.core.formats.stores.store import is_url, local_path, place_of, without_end
from bridge.core.formats.stores.upload_path import UploadPath
from bridge.core.formats.tensors.base import (
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    TreePath,
    name_of,
)
from bridge.core.formats.tensors.garbage import collection_paused
from bridge.core.formats.tensors.leaf_kinds import LEAVES
from bridge.core.formats.tensors.regions import REGION_BYTES, Progress
from bridge.core.formats.whole.companions import ADAPTER, ADAPTER_CONFIG, Companions, companions_home
from bridge.core.formats.whole.left_alone import left_alone
from bridge.core.formats.whole.quantized import DequantizedReader
from bridge.core.formats.whole.replaceable import require_replaceable
from bridge.core.formats.whole.step_paths import Step, at_step
from bridge.core.mapping.language.relation import whole_source
from bridge.core.mapping.language.rules import MappingLike, mapping_table
from bridge.core.mapping.language.table import Tied
from bridge.core.mapping.one_rule.sizes import with_config, with_stored_sizes
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.numbered_states import with_named_states
from bridge.core.mapping.states.step_values import with_step_tensors
from bridge.core.version import __version__


@dataclass(frozen=True)
class Conversion:
    """A conversion that was planned: what the destination will hold.

    outputs: tensors by their name in the destination. objects: (tree path, value) by name in the destination. kinds:
    of tensors and objects by name in the destination, see `leaf_kinds.py`, but for implied ones.
    files: the source's files, empty if they are in a store. digest: of these, by name, size and time. left_out: names
    in the source that do not go along, dropped or not selected. inexact: names in the destination of tensors that the
    mapping calculates, with rounding. companions: files that go along, see `bridge.core.formats.whole.companions`.
    conventions, remarks: see `bridge.core.mapping.plan.plan`. left_alone: see `bridge.core.formats.whole.left_alone`.
    """

    source: Path | str
    source_format: str
    files: tuple[Path, ...]
    digest: str
    format: Format
    outputs: Mapping[str, Output]
    objects: Mapping[str, tuple[TreePath, object]]
    kinds: Mapping[str, str]
    left_out: tuple[str, ...]
    inexact: tuple[str, ...]
    companions: Companions = field(default_factory=Companions)
    conventions: tuple[str, str] | None = None
    remarks: tuple[str, ...] = ()
    left_alone: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all elements, as written."""
        return sum(output.nbytes for output in self.outputs.values())

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the plan: two that are equal write the same, given the same source."""
        lines = []
        for output in self.outputs.values():
            planned, content = output.planned, output.planned.content
            # Of a tensor that goes along as it is, the whole text would take longer than small elements.
            source = whole_source(content)
            text = (
                f"all of {source} {content.shape} {name_of(content.dtype)}"
                if source is not None
                else repr(content)
            )
            lines.append(f"{planned.name} {planned.path} {name_of(output.dtype)} {text}\n")
        lines += [f"{name} {path} {value!r}\n" for name, (path, value) in self.objects.items()]
        lines.append(f"{sorted(self.kinds.items())}")
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


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
    replace: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    workers: int | None = None,
    items: Sequence[str] = (),
    step: Step | None = None,
    write_items: Sequence[str] = (),
    optimizer_order: str | None = None,
) -> ConvertReport:
    """Convert the checkpoint ``src`` to the new checkpoint ``dst``, each at a local path or a URL that fsspec knows.

    to, mapping, into, from_, axes, selection, casts, tied, any_model, companions, dequantize, items, write_items,
    optimizer_order: see `ConvertOptions`. step: a number or "latest", where ``src`` is a directory of steps.
    verify: whether checksums of ``src`` are compared; without it, damage goes into ``dst``, whose own checksums
    then vouch for it. replace: ``dst`` may be a checkpoint, which is kept until the new one is complete. resume: go
    on where an earlier attempt of the same conversion was killed, and, if this one fails, keep what it has written
    to be resumed. workers: threads, default by cores; memory grows with it, about 64 MiB each. A checkpoint at a
    URL replaces nothing, and ``resume`` goes on with the parts that are there where the store lists them (S3).

    Raises FileNotFoundError (no source), FileExistsError (destination there already), CheckpointError (source
    damaged, or mapping and source do not fit, or not enough space), ValueError (unknown format, workers < 1), OSError
    (what the system or a store refuses). After any error, an interruption too, the destination is as it was before.
    """
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
        items=items,
        write_items=write_items,
        optimizer_order=optimizer_order,
    )
    return convert_with(src, dst, options, replace=replace, resume=resume, progress=progress, workers=workers)


def convert_with(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    options: ConvertOptions,
    *,
    replace: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    workers: int | None = None,
) -> ConvertReport:
    """As `convert`, whose choices are ``options``; where these have no format, ``dst`` does not tell it by its name."""
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
            f"{dst} is in an object store, where nothing can be replaced at once: expected no replace (--replace)"
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
    progress: Progress | None,
    workers: int,
) -> ConvertReport:
    started = time.perf_counter()
    source = place_of(src)
    with planned(source, options) as (conversion, reader):
        if isinstance(destination, Path):
            require_place(source, destination, replace)
            require_untouched(conversion.files, destination)
        beside = conversion.companions
        attempt = Attempt(
            require_replaceable if replace else None,
            conversion_key(source, conversion, options.write_items),
            resume,
            beside.place,
        )
        with (
            large_buffers_returned(),
            naming(destination) if isinstance(destination, Path) else nullcontext(),
            create_checkpoint(
                destination, conversion.format, attempt=attempt, items=options.write_items
            ) as writer,
        ):
            resumed = _write(reader, writer, conversion, workers, progress)
            # Inside of the block: leaving it by an error is what keeps the mixture from appearing.
            require_unchanged(conversion)
        return ConvertReport(
            source,
            destination,
            conversion.source_format,
            conversion.format,
            len(conversion.outputs),
            len(conversion.objects),
            conversion.nbytes,
            resumed,
            conversion.left_out,
            {name: o.overflowed for name, o in conversion.outputs.items() if o.overflowed},
            conversion.inexact,
            options.verify,
            time.perf_counter() - started,
            *went_along(beside, destination),
            conventions=conversion.conventions,
            remarks=conversion.remarks,
            left_alone=conversion.left_alone,
        )


@contextmanager
def planned(
    source: str | os.PathLike[str], options: ConvertOptions
) -> Iterator[tuple[Conversion, CheckpointReader]]:
    """Plan a conversion, with the source open meanwhile. Nothing is written.

    Raises what `convert` raises about source, mapping, selection and casts.
    """
    table = mapping_table(options.mapping, options.axes, options.tied, any_model=options.any_model)
    casts = parse_casts(options.casts)
    with (
        ExitStack() as planning,
        open_checkpoint(source, verify=options.verify, items=options.items) as whole,
    ):
        planning.enter_context(collection_paused())
        reader = held = checked(whole) if options.verify else whole
        if options.dequantize:
            reader = held = DequantizedReader(held)
        left_out: Sequence[str] = ()
        if table is not None:
            table = with_config(table, whole)
            reader = held = with_named_states(with_step_tensors(held), table, options.optimizer_order)
        if not options.selection.everything:
            reader = selected = SelectedReader(held, options.selection)
            left_out = selected.left_out
            if table is not None:
                # A part of a model does not have what the rules of the whole require, or all that tells sizes.
                table = with_stored_sizes(table, held).part()
        files = () if isinstance(whole, StoredReader) else tuple(whole.files())
        target = options.to or ("dcp" if reader.format == "orbax" else "orbax")
        plan = make_plan(reader, target, table, into=options.into, from_=options.from_)
        outputs = apply_casts(plan.tensors.values(), casts)
        require_dtypes(whole, outputs.values(), target)
        kept = {name: entry for name, entry in plan.objects.items() if entry[0] != LEAVES}
        values = readable_values(reader, [old for _, old in kept.values()])
        objects = {name: (path, values[old]) for name, (path, old) in kept.items()} | dict(plan.notes)
        origins = {name: old for name, (_, old) in kept.items()}
        kinds = carried_kinds(held, outputs.values(), objects, origins)
        beside = Companions.beside(companions_home(home_of(whole))) if options.companions else Companions()
        unread = left_alone(whole)
        adapter = {ADAPTER_CONFIG: "the adapter that it describes is not read"}
        without = adapter if any(name.startswith(ADAPTER) for name in unread) else {}
        beside = dataclasses.replace(beside, dequantized=options.dequantize).without(without)
        conversion = Conversion(
            place_of(source),
            reader.format,
            files,
            whole.fingerprint if isinstance(whole, StoredReader) else digest_of(files),
            target,
            outputs,
            objects,
            kinds,
            (*left_out, *plan.dropped),
            plan.inexact,
            beside,
            conventions=plan.conventions,
            remarks=plan.remarks,
            left_alone=unread,
        )
        planning.close()
        yield conversion, reader


def _write(
    reader: CheckpointReader,
    writer: CheckpointWriter,
    conversion: Conversion,
    workers: int,
    progress: Progress | None,
) -> int:
    """Write everything; the bytes that were there already."""
    # Objects and tensors are declared before the first chunk is written: a safetensors header precedes the data.
    outputs: Collection[Output] = conversion.outputs.values()
    with collection_paused():
        for path, value in conversion.objects.values():
            writer.add_object(path, value)
        names = {o.name: writer.add_tensor(o.path, o.shape, o.dtype).name for o in outputs}
    writer.add_kinds(conversion.kinds)
    done = sum(box.numel * o.dtype.itemsize for o in outputs for box in writer.stored(names[o.name]))
    if isinstance(writer.path, UploadPath):
        # What follows each other in the destination is written so: a store takes parts of a file.
        outputs = sorted(outputs, key=lambda output: writer.position(names[output.name]))
        work = runs(outputs, writer, names, REGION_BYTES)
    else:
        require_space(writer.path, conversion.nbytes - done)
        work = runs(outputs, writer, names)
    Copier(reader, writer, work, done=done, total=conversion.nbytes, progress=progress).run(workers)
    return done


def conversion_key(
    source: Path | str, conversion: Conversion, write_items: Sequence[str] = ()
) -> dict[str, str]:
    """What identifies a conversion: two that agree in it write the same bytes."""
    return {
        "source": source if isinstance(source, str) else os.path.abspath(source),
        "files": conversion.digest,
        "format": conversion.format,
        "plan": conversion.fingerprint,
        "items": ",".join(write_items),
        "twinshard": __version__,
    }


def require_unchanged(conversion: Conversion) -> None:
    """CheckpointError when the source is not what it was when the conversion was planned."""
    if conversion.files and digest_of(conversion.files) != conversion.digest:
        raise CheckpointError(
            f"{conversion.source} was changed while it was being converted: expected one checkpoint, found parts of "
            "two; convert it again when its writer has finished"
        )


def digest_of(files: Sequence[Path]) -> str:
    """A digest of files by name, size and time, so that a changed checkpoint is not mixed with its past."""
    digest = hashlib.sha256()
    for path in sorted(files):
        status = path.stat()
        digest.update(os.fsencode(path) + f" {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
