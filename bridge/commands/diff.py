"""`twinshard diff`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.commands.grouping import by_param_group, grouped, print_left_alone
from bridge.commands.option_groups import grouped_options
from bridge.commands.options import (
    SHOWN,
    ItemOptions,
    JsonOption,
    MappingOptions,
    SelectionOptions,
    some,
    user_errors,
)
from bridge.commands.output import Console, byte_progress, print_json, print_line, print_table
from bridge.core.text import counted

if TYPE_CHECKING:
    from bridge.checkpoints.compare.diff_report import DiffReport, TensorDiff
    from bridge.checkpoints.compare.ulp import Tolerance

_WORST = 5
_BAR = 50
_LARGEST_ULP = 2**64 - 1  # as in `compare/ulp.py`, which imports NumPy


@dataclass(frozen=True)
class ComparisonOptions(SelectionOptions):
    """The tensors to compare, and the differences that are allowed."""

    select: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only these names of A, such as 'model.*'; repeatable."),
    ] = None
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Leave out these names of A and B; repeatable."),
    ] = None
    max_ulp: Annotated[
        int, typer.Option(min=0, max=_LARGEST_ULP, help="Allowed distance in units in the last place.")
    ] = 0
    rtol: Annotated[
        float, typer.Option(min=0.0, help="Allowed relative difference, to the larger magnitude.")
    ] = 0.0
    atol: Annotated[
        float,
        typer.Option(min=0.0, help="Allowed absolute difference; an element passes within any of the three."),
    ] = 0.0
    max_error: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Allowed error of a whole tensor, ||A-B|| / ||A|| (Euclidean norms); within it, "
            "single elements may differ by any amount.",
        ),
    ] = None
    noise: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="Another run of B or A, such as a float64 twin: a tensor passes when "
            "||A-B|| <= 4 ||B-NOISE||.",
        ),
    ] = None
    rounded: Annotated[
        bool,
        typer.Option(
            "--rounded",
            help="Also compare tensors of different dtypes: the wider one, rounded, must equal the narrower.",
        ),
    ] = False
    workers: Annotated[int, typer.Option(min=1, help="Threads; each takes about 100 MiB of memory.")] = 1

    def tolerance(self) -> Tolerance:
        from bridge.checkpoints.compare.ulp import Tolerance

        try:
            return Tolerance(self.max_ulp, self.rtol, self.atol, self.max_error)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True)
class ListingOptions:
    """Which differences are listed."""

    all_: Annotated[bool, typer.Option("--all", help="List every tensor, also the equal ones.")] = False
    histogram: Annotated[
        bool,
        typer.Option(
            "--histogram", help="Show how the relative differences of the worst tensors are spread."
        ),
    ] = False


@grouped_options
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint, translated by --mapping if given.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Checkpoint that A is compared with.")],
    mapping: MappingOptions,
    comparison: ComparisonOptions,
    listing: ListingOptions,
    which: ItemOptions,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor.

    The exit status is 1 when they differ beyond the tolerance. An element passes within --max-ulp, within --rtol, or
    within --atol. A tensor passes when all its elements do, within --max-error, or within 4 times the --noise. A NaN
    passes only against the same NaN, and integers must be equal. The error of a tensor is the Euclidean norm of the
    difference over the norm of A. Names that --select, --drop or --weights-only leave out of A are ignored in B, too.

    \b
    Example:
      twinshard diff torch/step_40 jax/step_40 --mapping decoder --max-ulp 2
      twinshard diff torch/step_40 small --rounded --weights-only
      twinshard diff gradients_a gradients_b --max-error 1e-5 --histogram
      twinshard diff gradients_a gradients_b --noise gradients_float64
    """
    from bridge.checkpoints.compare.diff import diff as run

    translation, step = mapping.arguments(), which.step_number()
    tolerance = comparison.tolerance()
    with user_errors(json=json), byte_progress(Console(stderr=True), "diff") as progress:
        report = run(
            a,
            b,
            **translation,
            selection=comparison.selection(),
            tolerance=tolerance,
            rounded=comparison.rounded,
            noise=comparison.noise,
            workers=comparison.workers,
            progress=progress,
            items=which.items,
            step=step,
        )
    out = Console()
    if json:
        verdict = {"same": report.same, "within": report.within}
        document = {**verdict, "max_ulp": report.total.max_ulp, "total": report.total, **vars(report)}
        print_json(out, {**document, "offenders": [tensor.name for tensor in report.offenders]})
    else:
        _print_tensors(out, report, listing)
        _print_rest(out, report, listing)
        _print_verdict(out, report)
        if mapping.mapping is None and not report.tensors:
            _print_mappings(out, report)
    raise typer.Exit(0 if report else 1)


def _print_tensors(out: Console, report: DiffReport, listing: ListingOptions) -> None:
    """Print the tensors that differ (with ``--all`` also the equal ones), and where the worst tensors differ most."""
    offenders = report.offenders
    equal = tuple(tensor for tensor in report.tensors if not tensor.difference.differing)
    listed = (*offenders, *equal) if listing.all_ else offenders[:SHOWN]
    if listed:
        columns = ["passes", "tensor", "dtype", "max ULP", "error", "differ", "beyond"]
        columns += ["/noise"] if report.noise is not None else []
        columns += ["max rel", "max abs", "NaN"]
        print_table(out, columns, [_row(report, tensor) for tensor in listed], left=3)
        if not listing.all_ and len(listed) < len(offenders):
            print_line(out, f"... and {len(offenders) - len(listed)} more (--all lists them)")
    for tensor in offenders[:_WORST]:
        by_ulp, by_size = tensor.difference.at_ulp, tensor.difference.at_abs
        if by_ulp is not None:
            print_line(out, f"{tensor.name}{list(by_ulp.index)}: {by_ulp.a} in A, {by_ulp.b} in B (most ULP)")
        if by_size is not None and by_size != by_ulp:
            print_line(
                out, f"{tensor.name}{list(by_size.index)}: {by_size.a} in A, {by_size.b} in B (largest)"
            )
    if listing.histogram:
        for tensor in offenders[:_WORST]:
            _print_histogram(out, tensor)


def _row(report: DiffReport, tensor: TensorDiff) -> list[str]:
    difference = tensor.difference
    return [
        *("yes" if tensor.within else "no", tensor.name, tensor.dtype),
        *(str(difference.max_ulp), f"{tensor.relative:.2e}"),
        *(f"{difference.differing}/{difference.elements}", str(difference.beyond)),
        *(["" if tensor.noise is None else f"{tensor.noise:.2e}"] if report.noise is not None else []),
        *(f"{difference.max_rel:.2e}", f"{difference.max_abs:.2e}", str(difference.nan)),
    ]


def _print_rest(out: Console, report: DiffReport, listing: ListingOptions) -> None:
    """Print the names that one checkpoint lacks, and values that are not tensors."""
    told = {name for name, _ in report.structure}
    only = (
        ("only in A", report.missing),
        ("only in B", report.extra),
        ("values that are not tensors, only in A", [n for n in report.objects_missing if n not in told]),
        ("values that are not tensors, only in B", [n for n in report.objects_extra if n not in told]),
    )
    for title, names in only:
        if names:
            print_line(out, f"{title}: {some(by_param_group(names))}")
    structure = {
        text: [name for name, other in report.structure if other == text] for _, text in report.structure
    }
    folded = [(name, text) for text, names in structure.items() for name in by_param_group(names)]
    for line in grouped((*report.mismatched, *folded)):
        print_line(out, line)
    for name, left, right in report.objects if listing.all_ else report.objects[:SHOWN]:
        print_line(out, f"{name}: {left!r} in a, {right!r} in b")
    if not listing.all_ and len(report.objects) > SHOWN:
        print_line(out, f"... and {len(report.objects) - SHOWN} more values that differ (--all lists them)")
    print_left_alone(out, report.left_alone)
    for line in grouped((name, f"cannot be compared: {reason}") for name, reason in report.unreadable):
        print_line(out, line)


def _print_verdict(out: Console, report: DiffReport) -> None:
    total, tolerance = report.total, report.tolerance
    rounded = sum(tensor.dtype_a != tensor.dtype_b for tensor in report.tensors)
    result = f"largest distance {total.max_ulp} ULP" if total.differing else "all bits agree"
    none_there = not (report.tensors or report.missing or report.extra or report.mismatched)
    if not report.tensors:
        result = "neither has any" if none_there else "they have none in common"
    after = f" (of {rounded} after rounding)" if rounded else ""
    every = none_there or (report.tensors and all(tensor.within for tensor in report.tensors))
    verdict = "within" if every else "beyond"
    allowed = [f"{tolerance.max_ulp} ULP"]
    allowed += [f"rtol {tolerance.rtol:g}"] if tolerance.rtol else []
    allowed += [f"atol {tolerance.atol:g}"] if tolerance.atol else []
    allowed += [f"an error of {tolerance.max_error:g}"] if tolerance.max_error is not None else []
    allowed += [f"{tolerance.noise_factor:g} times the noise"] if report.noise is not None else []
    print_line(
        out,
        f"{counted(len(report.tensors), 'tensor')}, {counted(total.elements, 'element')} compared: "
        f"{result}{after}; {verdict} the tolerance of {' or '.join(allowed)}"
        f"{_elsewhere(report) if verdict == 'within' else ''}",
    )


def _elsewhere(report: DiffReport) -> str:
    """Counts, by kind, of all differences outside the tensors that were compared."""
    counts = {
        "tensors only in A": len(report.missing),
        "tensors only in B": len(report.extra),
        "tensors of another shape or dtype": len(report.mismatched),
        "other values": len(report.objects),
        "values that cannot be compared": len(report.unreadable),
        "places of the tree": len(report.structure),
    }
    counted = [f"{what}: {count}" for what, count in counts.items() if count]
    return f"; but A and B differ, as listed ({', '.join(counted)})" if counted else ""


def _print_mappings(out: Console, report: DiffReport) -> None:
    """Print families that may relate two checkpoints without a common name."""
    from bridge.core.mapping.plan.plan import fitting

    commands = [
        f"--mapping {family} --into {convention}"
        for family, convention in fitting(report.missing, report.extra)
    ]
    if commands:
        print_line(out, f"these options may translate the names of A to names of B: {some(commands, _WORST)}")


def _print_histogram(out: Console, tensor: TensorDiff) -> None:
    """Print the percentiles of the relative differences, and a bar for each power of ten."""
    percentiles = ", ".join(
        f"{percent} % within {value:.1e}" for percent, value in tensor.percentiles.items()
    )
    print_line(out, f"{tensor.name}: relative differences: {percentiles}")
    most = max(tensor.histogram.values(), default=0)
    wide = len(str(most))
    for power, count in tensor.histogram.items():
        bar = "#" * math.ceil(count / most * _BAR)
        print_line(out, f"  {power:>5}  {count:>{wide}}  {bar}".rstrip())
