"""`twinshard convert`."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.commands import completion
from bridge.commands.convert_report import ASKED_FOR, names_of, print_report
from bridge.commands.grouping import print_left_alone
from bridge.commands.options import (
    AnyModelOption,
    AxisOption,
    DequantizeOption,
    FromOption,
    IntoOption,
    ItemOption,
    JsonOption,
    MappingOption,
    OptimizerOrderOption,
    StepOption,
    TiedOption,
    WeightsOnlyOption,
    axis_sizes,
    item_names,
    progress_console,
    require_mapping,
    some,
    step_number,
    user_errors,
)
from bridge.commands.output import Console, byte_progress, print_json, print_line, print_table
from bridge.commands.parents import ask_for_parents, missing_parent, place_here
from bridge.commands.part_options import (
    BandwidthOption,
    CommitOption,
    Engine,
    EngineOption,
    PartOption,
    PartsOption,
    part_request,
)
from bridge.commands.stopping import leaving
from bridge.core.formats.files.journal import abandoned
from bridge.core.text import human_bytes

if TYPE_CHECKING:
    from bridge.checkpoints.convert.conversion import Conversion


class TargetFormat(StrEnum):
    """What `convert` can write."""

    dcp = "dcp"
    orbax = "orbax"
    safetensors = "safetensors"


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint to read.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Checkpoint to write; must not exist.")],
    to: Annotated[
        TargetFormat | None,
        typer.Option("--to", case_sensitive=False, help="Default: dcp for an Orbax checkpoint, else orbax."),
    ] = None,
    mapping: MappingOption = None,
    into: IntoOption = None,
    from_: FromOption = None,
    axis: AxisOption = None,
    tied: TiedOption = None,
    any_model: AnyModelOption = False,
    optimizer_order: OptimizerOrderOption = None,
    dequantize: DequantizeOption = False,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select", metavar="PATTERN", help="Only these names of SRC, such as 'model.*'; repeatable."
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="PATTERN", help="Leave out these names of SRC; repeatable."),
    ] = None,
    weights_only: WeightsOnlyOption = False,
    cast: Annotated[
        list[str] | None,
        typer.Option(
            "--cast",
            metavar="PATTERN=DTYPE",
            help="Round the tensors of these names, such as '*=bf16', but not step counts; repeatable.",
            autocompletion=completion.casts,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare SRC with its manifest and its format's checksums while reading; without, damage in SRC goes "
            "into DST, and DST's new checksums vouch for it.",
        ),
    ] = True,
    companions: Annotated[
        bool,
        typer.Option(
            "--companions/--no-companions",
            help="Copy config.json, tokenizer files and the like from beside SRC into DST.",
        ),
    ] = True,
    item: ItemOption = None,
    step: StepOption = None,
    write_item: Annotated[
        list[str] | None,
        typer.Option(
            "--write-item",
            metavar="NAME",
            help="Write what is below this key as an item of its own, to Orbax; repeatable, or NAME,NAME.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written, and stop.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace the checkpoint at DST once the new one is complete."),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the same conversion after it was killed; keep the finished work if interrupted.",
        ),
    ] = False,
    parents: Annotated[
        bool,
        typer.Option(
            "--parents", help="Create missing directories above DST without asking, as mkdir -p does."
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; each takes 64 MiB of memory; default: one per core, at most 4."),
    ] = None,
    part: PartOption = None,
    commit: CommitOption = None,
    engine: EngineOption = Engine.threads,
    parts: PartsOption = None,
    bandwidth: BandwidthOption = None,
    json: JsonOption = False,
) -> None:
    """Convert a checkpoint to another format, bit for bit.

    With --mapping, names and layouts are translated to the other framework's model, optimizer state included.
    Without --mapping every tensor keeps its name, as a path. DST appears only when it is complete.

    \b
    Example:
      twinshard convert runs/torch/step_40 runs/jax/step_40 --mapping decoder
      twinshard convert runs/torch/step_40 small.safetensors --to safetensors --weights-only --cast '*=bfloat16'
      twinshard convert runs/torch/step_40 runs/jax/step_40 --part $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT
    """
    from bridge.checkpoints.convert.conversion import ConvertOptions, planned
    from bridge.checkpoints.convert.conversion import convert as run
    from bridge.checkpoints.convert.destination import format_by_name
    from bridge.checkpoints.ground.selection import Selection
    from bridge.core.formats import format_named
    from bridge.core.formats.whole.step_paths import at_step

    selection = Selection(tuple(select or ()), tuple(drop or ()), weights_only)
    axes = axis_sizes(axis, mapping)
    items, write_items, at = item_names(item), item_names(write_item), step_number(step)
    require_mapping(mapping, into, from_, tied, any_model, optimizer_order)
    if write_items and to not in (None, TargetFormat.orbax):
        raise typer.BadParameter(f"--write-item needs --to orbax: only Orbax has items, got --to {to}")
    target = None if to is None else format_named(to)
    out = Console()
    request = part_request(part, commit, engine, parts, bandwidth, dry_run=dry_run, resume=resume)
    options = ConvertOptions(
        target or format_by_name(dst) or ("orbax" if write_items else None),
        mapping,
        into,
        from_,
        axes,
        selection,
        cast or (),
        tied,
        verify,
        any_model,
        companions=companions,
        dequantize=dequantize,
        items=items,
        write_items=write_items,
        optimizer_order=optimizer_order,
    )
    if not dry_run:
        with user_errors(json=json):
            missing = missing_parent(dst)
            if missing is not None and not parents:
                ask_for_parents(missing, dst)
    if request is not None:
        from bridge.commands.convert_parts import convert_in_parts

        report = convert_in_parts(out, request, src, at, dst, options, replace, resume, workers, json)
        if report is not None:
            print_report(out, report)
        return
    if dry_run:
        with user_errors(json=json), planned(at_step(src, at), options) as (conversion, _):
            if json:
                print_json(out, conversion_document(conversion))
            else:
                _print_plan(out, conversion, dst)
        return
    with (
        leaving(lambda: _left(dst, replace, resume)),
        user_errors(json=json),
        byte_progress(progress_console(), "convert") as progress,
    ):
        report = run(
            src,
            dst,
            to=target,
            mapping=mapping,
            into=into,
            from_=from_,
            axes=axes,
            selection=selection,
            casts=cast or (),
            tied=tied,
            verify=verify,
            any_model=any_model,
            companions=companions,
            dequantize=dequantize,
            replace=replace,
            resume=resume,
            progress=progress,
            workers=workers,
            items=items,
            step=at,
            write_items=write_items,
            optimizer_order=optimizer_order,
        )
    if json:
        print_json(out, report)
    else:
        print_report(out, report)


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
    }


def _left(dst: str, replace: bool, resume: bool) -> str:
    """What a conversion that was stopped leaves."""
    if (place := place_here(dst)) is None:
        return "the same command with --resume goes on" if resume else f"nothing of it is at {dst}"
    if not replace and os.path.lexists(place):
        return f"{dst} is complete"
    kept = [str(directory) for directory in abandoned(place)] if resume else []
    state = f"{dst} is one complete checkpoint, the old or the new one" if replace else f"{dst} is not there"
    if kept:
        return f"{state}; what is finished is in {kept[-1]}, and the same command with --resume goes on there"
    return f"{state}, and nothing of the work is left"


def _print_plan(out: Console, conversion: Conversion, destination: str) -> None:
    rows = []
    for output in conversion.outputs.values():
        dtype = output.dtype.name
        if output.is_cast:
            dtype = f"{output.planned.dtype.name} -> {dtype}"
        sources = output.sources
        origin = (
            sources[0]
            if len(sources) == 1
            else f"{sources[0]} + {len(sources) - 1} more"
            if sources
            else "(known)"
        )
        rows.append((output.name, dtype, str(list(output.shape)), human_bytes(output.nbytes), origin))
    print_table(out, ("tensor", "dtype", "shape", "size", "from"), rows, left=2)
    for name, (_, value) in conversion.objects.items():
        print_line(out, f"{name} = {value!r}")
    for remark in conversion.remarks:
        print_line(out, f"note: {remark}")
    if conversion.companions.files:
        print_line(out, f"beside it: {some([*conversion.companions.files])}")
    print_left_alone(out, conversion.left_alone)
    if conversion.left_out:
        print_line(out, f"left out {len(conversion.left_out)}: {some(conversion.left_out, ASKED_FOR)}")
    if conversion.inexact:
        print_line(out, f"calculated, with rounding, {len(conversion.inexact)}: {some(conversion.inexact)}")
    there = (place := place_here(destination)) is not None and os.path.lexists(place)
    print_line(
        out,
        f"{conversion.source} ({conversion.source_format}) -> {destination} ({conversion.format}): "
        f"{len(conversion.outputs)} tensors, {len(conversion.objects)} objects, {human_bytes(conversion.nbytes)} "
        f"would be written{', over what is there' if there else ''}{names_of(conversion.conventions)}",
    )
    if (missing := missing_parent(destination)) is not None:
        print_line(out, f"{missing} does not exist: it would be asked about, or created by --parents")
