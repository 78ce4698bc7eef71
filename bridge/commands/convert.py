"""`twinshard convert`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bridge.commands.convert_options import ContentOptions, RunOptions
from bridge.commands.convert_report import ASKED_FOR, names_of, print_filled, print_result
from bridge.commands.grouping import print_left_alone
from bridge.commands.option_groups import grouped_options
from bridge.commands.options import JsonOption, MappingOptions, item_names, some, user_errors
from bridge.commands.output import Console, byte_progress, print_json, print_line, print_table
from bridge.commands.parents import ask_for_parents, missing_parent, place_here
from bridge.commands.part_options import PartOptions
from bridge.commands.stopping import leaving
from bridge.core.text import counted, human_bytes

if TYPE_CHECKING:
    from bridge.checkpoints.convert.plan import Conversion, ConvertOptions
    from bridge.core.formats.whole.step_paths import Step


@grouped_options
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint to read.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Checkpoint to write; must not exist.")],
    *,
    to: Annotated[
        Literal["dcp", "orbax", "safetensors"] | None,
        typer.Option(case_sensitive=False, help="Default: dcp for an Orbax checkpoint, else orbax."),
    ] = None,
    mapping: MappingOptions,
    content: ContentOptions,
    run: RunOptions,
    parts: PartOptions,
    json: JsonOption = False,
) -> None:
    """Convert a checkpoint to another format, bit for bit.

    With --mapping, the command translates names and layouts, also of the optimizer state, to the other framework.
    Without --mapping every tensor keeps its name, as a path, unless --into, --from or --like need a mapping: then a
    shipped one is found by config.json or by the names. DST appears only when it is complete.

    \b
    Example:
      twinshard convert --example checkpoints
      twinshard convert runs/torch/step_40 runs/jax/step_40 --mapping decoder
      twinshard convert runs/torch/step_40 small.safetensors \\
        --to safetensors --weights-only --cast '*=bfloat16'
      twinshard convert runs/torch/step_40 runs/jax/step_40 \\
        --part $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT
    """
    from bridge.checkpoints.convert.conversion import format_by_name
    from bridge.checkpoints.convert.plan import ConvertOptions
    from bridge.core.formats import format_named

    found = (mapping.into, mapping.from_, content.like) != (None, None, None)
    translation = mapping.arguments(found=found)
    write_items, step = item_names(run.write_item), run.step_number()
    if write_items and to not in (None, "orbax"):
        raise typer.BadParameter(f"--write-item needs --to orbax: only Orbax has items, got --to {to}")
    target = None if to is None else format_named(to)
    request = parts.request(dry_run=run.dry_run, resume=run.resume)
    options = ConvertOptions(
        target or format_by_name(dst) or ("orbax" if write_items else None),
        selection=content.selection(),
        casts=content.cast or (),
        verify=content.verify,
        companions=content.companions,
        items=run.items,
        write_items=write_items,
        like=content.like,
        salvage=content.salvage,
        **translation,
    )
    with user_errors(json=json):
        missing = None if run.dry_run or run.parents else missing_parent(dst)
        if missing is not None:
            ask_for_parents(missing, dst)
    if (run.prove or content.salvage) and (request is not None or run.dry_run):
        option = "--prove" if run.prove else "--salvage"
        raise typer.BadParameter(
            f"{option} needs the whole result: convert without --part, --parts and --dry-run"
        )
    if request is not None:
        from bridge.commands.convert_parts import convert_in_parts

        convert_in_parts(request, src, step, dst, options, run, json)
    elif run.dry_run:
        _show(src, step, dst, options, json)
    else:
        _convert(src, step, dst, options, run, json)


def _show(src: str, step: Step | None, dst: str, options: ConvertOptions, json: bool) -> None:
    """Print the tensors that would be written."""
    from bridge.checkpoints.convert.plan import planned
    from bridge.core.formats.whole.step_paths import at_step

    out = Console()
    with user_errors(json=json), planned(at_step(src, step), options) as (conversion, _):
        if json:
            print_json(out, conversion_document(conversion))
        else:
            _print_plan(out, conversion, dst)


def _convert(
    src: str, step: Step | None, dst: str, options: ConvertOptions, run: RunOptions, json: bool
) -> None:
    from bridge.checkpoints.convert.conversion import convert_with
    from bridge.core.formats.whole.step_paths import at_step

    with (
        leaving(lambda: _left(dst, run.replace, run.resume)),
        user_errors(json=json),
        byte_progress(Console(stderr=True), "convert") as progress,
    ):
        report = convert_with(
            at_step(src, step),
            dst,
            options,
            replace=run.replace,
            resume=run.resume,
            progress=progress,
            workers=run.workers,
        )
        proof = None
        if run.prove:
            from bridge.checkpoints.prove.noted import note_proof
            from bridge.checkpoints.prove.proof import prove

            proof = prove(at_step(src, step), dst, options)
            if (local := place_here(dst)) is not None:
                note_proof(local, proof)
    print_result(report, json, proof)
    if report.faults or (proof is not None and not proof):
        raise typer.Exit(1)


def conversion_document(conversion: Conversion) -> dict[str, object]:
    """A planned conversion for machines."""
    return {
        "source": conversion.source,
        "source_format": conversion.source_format,
        "format": conversion.format,
        "bytes": conversion.nbytes,
        "tensors": [
            {
                "name": output.name,
                "path": output.path,
                "shape": output.shape,
                "dtype": output.dtype.name,
                "source_dtype": output.planned.dtype.name,
                "sources": output.sources,
                "bytes": output.nbytes,
            }
            for output in conversion.outputs.values()
        ],
        "objects": {name: value for name, (_, value) in conversion.objects.items()},
        "left_out": conversion.left_out,
        "inexact": conversion.inexact,
        "companions": list(conversion.companions.files),
        "conventions": conversion.conventions,
        "remarks": conversion.remarks,
        "left_alone": conversion.left_alone,
        "filled": conversion.filled,
    }


def _left(dst: str, replace: bool, resume: bool) -> str:
    """What a conversion that was stopped leaves."""
    from bridge.core.formats.files.journal import abandoned

    if (local := place_here(dst)) is None:
        return "the same command with --resume continues" if resume else f"nothing remains at {dst}"
    if not replace and os.path.lexists(local):
        return f"{dst} is complete"
    kept = [str(directory) for directory in abandoned(local)] if resume else []
    state = f"{dst} is one complete checkpoint, the old or the new" if replace else f"{dst} does not exist"
    if kept:
        return f"{state}; the finished work is in {kept[-1]}, and the same command with --resume continues from there"
    return f"{state}, and none of the work is kept"


def _print_plan(out: Console, conversion: Conversion, destination: str) -> None:
    rows = []
    for output in conversion.outputs.values():
        dtype = output.dtype.name
        if output.is_cast:
            dtype = f"{output.planned.dtype.name} -> {dtype}"
        first, *more = output.sources or ("(known)",)
        origin = f"{first} + {len(more)} more" if more else first
        rows.append((output.name, dtype, str(list(output.shape)), human_bytes(output.nbytes), origin))
    print_table(out, ("tensor", "dtype", "shape", "size", "from"), rows, left=2)
    for name, (_, value) in conversion.objects.items():
        print_line(out, f"{name} = {value!r}")
    for remark in conversion.remarks:
        print_line(out, f"note: {remark}")
    print_filled(out, conversion.filled)
    if conversion.companions.files:
        print_line(out, f"files next to it: {some([*conversion.companions.files])}")
    print_left_alone(out, conversion.left_alone)
    if conversion.left_out:
        print_line(out, f"left out {len(conversion.left_out)}: {some(conversion.left_out, ASKED_FOR)}")
    if conversion.inexact:
        print_line(out, f"rounded, {len(conversion.inexact)}: {some(conversion.inexact)}")
    there = (local := place_here(destination)) is not None and os.path.lexists(local)
    print_line(
        out,
        f"{conversion.source} ({conversion.source_format}) -> {destination} ({conversion.format}): "
        f"{counted(len(conversion.outputs), 'tensor')}, {counted(len(conversion.objects), 'object')}, "
        f"{human_bytes(conversion.nbytes)} would be written"
        f"{', replacing what is there' if there else ''}{names_of(conversion.conventions)}",
    )
    if (missing := missing_parent(destination)) is not None:
        print_line(out, f"{missing} does not exist: the command would ask first, and --parents creates it")
