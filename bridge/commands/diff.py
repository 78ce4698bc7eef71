"""`twinshard diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bridge.checkpoints.ulp import LARGEST_ULP
from bridge.commands.options import (
    SHOWN,
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

if TYPE_CHECKING:
    from bridge.checkpoints.diff import DiffReport

_WORST = 5


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint, translated by --mapping if given.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Checkpoint that A is compared with.")],
    mapping: MappingOption = None,
    into: IntoOption = None,
    from_: FromOption = None,
    axis: AxisOption = None,
    tied: TiedOption = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select", metavar="PATTERN", help="Only these names of A, such as 'model.*'; repeatable."
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="PATTERN", help="Leave out these names of A and B; repeatable."),
    ] = None,
    weights_only: WeightsOnlyOption = False,
    max_ulp: Annotated[
        int, typer.Option(min=0, max=LARGEST_ULP, help="Allowed distance in units in the last place.")
    ] = 0,
    rtol: Annotated[
        float, typer.Option(min=0.0, help="Allowed relative difference; an element passes within either.")
    ] = 0.0,
    rounded: Annotated[
        bool,
        typer.Option(
            "--rounded",
            help="Also compare tensors of different dtypes: the narrower must equal the other, rounded.",
        ),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Threads; each takes about 100 MiB of memory.")] = 1,
    all_: Annotated[bool, typer.Option("--all", help="List every tensor, also the equal ones.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor.

    The exit status is 1 when they differ beyond the tolerance. An element passes within --max-ulp or within --rtol.
    A NaN passes only against the same NaN, and integers must be equal. The error of a tensor is the norm of the
    difference over the norm of A. Names that --select, --drop or --weights-only leave out of A are ignored in B, too.

    \b
    Example:
      twinshard diff runs/torch/step_40 runs/jax/step_40 --mapping decoder --max-ulp 2
      twinshard diff runs/torch/step_40 small --rounded --weights-only
    """
    from bridge.checkpoints.diff import diff as run
    from bridge.checkpoints.selection import Selection
    from bridge.checkpoints.ulp import Tolerance

    axes = axis_sizes(axis, mapping)
    require_mapping(mapping, into, from_, tied)
    with user_errors(), byte_progress(progress_console(), "diff") as progress:
        report = run(
            a,
            b,
            mapping=mapping,
            into=into,
            from_=from_,
            axes=axes,
            tied=tied,
            selection=Selection(tuple(select or ()), tuple(drop or ()), weights_only),
            tolerance=Tolerance(max_ulp, rtol),
            rounded=rounded,
            workers=workers,
            progress=progress,
        )
    out = Console()
    if json:
        document = {"within": report.within, "max_ulp": report.max_ulp, "total": report.total, **vars(report)}
        print_json(out, {**document, "offenders": [tensor.name for tensor in report.offenders]})
    else:
        _print(out, report, all_)
    raise typer.Exit(0 if report.within else 1)


def _print(out: Console, report: DiffReport, all_: bool) -> None:
    offenders = report.offenders
    equal = tuple(tensor for tensor in report.tensors if not tensor.difference.differing)
    listed = (*offenders, *equal) if all_ else offenders[:SHOWN]
    if listed:
        rows = []
        for tensor in listed:
            d = tensor.difference
            numbers = (str(d.max_ulp), f"{tensor.relative:.2e}", f"{d.max_rel:.2e}", f"{d.max_abs:.2e}")
            counts = (f"{d.differing}/{d.elements}", str(d.nan), str(d.beyond))
            rows.append((tensor.name, tensor.dtype, *numbers, *counts))
        columns = ("tensor", "dtype", "max ULP", "error", "max rel", "max abs", "differ", "NaN", "beyond")
        print_table(out, columns, rows, left=2)
        if not all_ and len(rows) < len(offenders):
            print_line(out, f"... and {len(offenders) - len(rows)} more (--all lists them)")
    for tensor in offenders[:_WORST]:
        place, larger = tensor.difference.at_ulp, tensor.difference.at_abs
        if place is not None:
            print_line(out, f"{tensor.name}{list(place.index)}: {place.a} in A, {place.b} in B (most ULP)")
        if larger is not None and larger != place:
            print_line(out, f"{tensor.name}{list(larger.index)}: {larger.a} in A, {larger.b} in B (largest)")
    only = (
        ("only in A", report.missing),
        ("only in B", report.extra),
        ("values that are not tensors, only in A", report.objects_missing),
        ("values that are not tensors, only in B", report.objects_extra),
    )
    for title, names in only:
        if names:
            print_line(out, f"{title}: {some(names)}")
    for name, text in report.mismatched:
        print_line(out, f"{name}: {text}")
    for name, left, right in report.objects:
        print_line(out, f"{name}: {left!r} in a, {right!r} in b")
    for name, reason in report.unreadable:
        print_line(out, f"{name} cannot be compared: {reason}")
    total, tolerance = report.total, report.tolerance
    rounded = sum(tensor.dtype_a != tensor.dtype_b for tensor in report.tensors)
    found = f"largest distance {total.max_ulp} ULP" if total.differing else "all bits agree"
    if not report.tensors:
        found = "they have none in common"
    after = f" (of {rounded} after rounding)" if rounded else ""
    verdict = "within" if report.within else "beyond"
    rtol_text = f" or rtol {tolerance.rtol:g}" if tolerance.rtol else ""
    print_line(
        out,
        f"{len(report.tensors)} tensors, {total.elements} elements compared: {found}{after}; {verdict} "
        f"the tolerance of {tolerance.max_ulp} ULP{rtol_text}",
    )
