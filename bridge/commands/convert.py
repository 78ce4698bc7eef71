"""`twinshard convert`."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bridge.commands.options import (
    AnyModelOption,
    AxisOption,
    FromOption,
    IntoOption,
    JsonOption,
    MappingOption,
    TiedOption,
    WeightsOnlyOption,
    axis_sizes,
    progress_console,
    require_mapping,
    some,
    user_errors,
)
from bridge.commands.output import byte_progress, print_json, print_line, print_table
from bridge.text import human_bytes

if TYPE_CHECKING:
    from bridge.checkpoints.convert import Conversion, ConvertReport


_ASKED_FOR = 5
"""How many of the names left out on request are shown; a selection may leave out most of a checkpoint."""


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
        typer.Option("--to", help="Default: dcp for an Orbax checkpoint, else orbax."),
    ] = None,
    mapping: MappingOption = None,
    into: IntoOption = None,
    from_: FromOption = None,
    axis: AxisOption = None,
    tied: TiedOption = None,
    any_model: AnyModelOption = False,
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize",
            help="Take MXFP4 weights (GPT-OSS) and float8 weights with scales of blocks (DeepSeek-V3) as the bfloat16 "
            "numbers that they stand for.",
        ),
    ] = False,
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
            help="Round the tensors of these names, such as '*=bfloat16', but not step counts; repeatable.",
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
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; each takes 64 MiB of memory; default: one per core, at most 4."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Convert a checkpoint to another format, bit for bit.

    With --mapping, names and layouts are translated to the other framework's model, optimizer state included.
    Without --mapping every tensor keeps its name, as a path. DST appears only when it is complete.

    \b
    Example:
      twinshard convert runs/torch/step_40 runs/jax/step_40 --mapping decoder
      twinshard convert runs/torch/step_40 small.safetensors --to safetensors --weights-only --cast '*=bfloat16'
    """
    from bridge.checkpoints.convert import ConvertOptions, format_by_name, planned
    from bridge.checkpoints.convert import convert as run
    from bridge.checkpoints.selection import Selection

    selection = Selection(tuple(select or ()), tuple(drop or ()), weights_only)
    axes = axis_sizes(axis, mapping)
    require_mapping(mapping, into, from_, tied, any_model)
    out = Console()
    if dry_run:
        options = ConvertOptions(
            to or format_by_name(dst),
            mapping,
            into,
            from_,
            axes,
            selection,
            cast or (),
            tied,
            verify,
            any_model,
            dequantize,
        )
        with user_errors(), planned(src, options) as (conversion, _):
            if json:
                print_json(out, conversion_document(conversion))
            else:
                _print_plan(out, conversion, dst)
        return
    with user_errors(), byte_progress(progress_console(), "convert") as progress:
        report = run(
            src,
            dst,
            to=to,
            mapping=mapping,
            into=into,
            from_=from_,
            axes=axes,
            selection=selection,
            casts=cast or (),
            tied=tied,
            verify=verify,
            any_model=any_model,
            dequantize=dequantize,
            replace=replace,
            resume=resume,
            progress=progress,
            workers=workers,
        )
    if json:
        print_json(out, report)
    else:
        _print_report(out, report)


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
    }


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
    if conversion.left_out:
        print_line(out, f"left out {len(conversion.left_out)}: {some(conversion.left_out, _ASKED_FOR)}")
    if conversion.inexact:
        print_line(out, f"calculated, with rounding, {len(conversion.inexact)}: {some(conversion.inexact)}")
    print_line(
        out,
        f"{conversion.source} ({conversion.source_format}) -> {destination} ({conversion.format}): "
        f"{len(conversion.outputs)} tensors, {len(conversion.objects)} objects, {human_bytes(conversion.nbytes)} "
        f"would be written{', over what is there' if os.path.lexists(destination) else ''}",
    )


def _print_report(out: Console, report: ConvertReport) -> None:
    written = report.bytes - report.resumed_bytes
    rate = f"{human_bytes(int(written / max(report.seconds, 1e-9)))}/s"
    resumed = f", {human_bytes(report.resumed_bytes)} of it before" if report.resumed_bytes else ""
    print_line(
        out,
        f"{report.source} ({report.source_format}) -> {report.destination} ({report.format}): "
        f"{report.tensors} tensors, {report.objects} objects, "
        f"{human_bytes(report.bytes)}{resumed} in {report.seconds:.1f} s ({rate})",
    )
    if not report.verified:
        print_line(
            out,
            "warning: not verified: damage in the source is in the new checkpoint, whose checksums vouch for what was "
            "read",
        )
    if report.inexact:
        print_line(out, f"calculated, with rounding, {len(report.inexact)}: {some(report.inexact)}")
    for name, count in report.overflowed.items():
        print_line(out, f"warning: {name}: {count} finite elements became infinite or NaN by the cast")
    if report.dropped:
        print_line(out, f"dropped {len(report.dropped)}: {some(report.dropped, _ASKED_FOR)}")
