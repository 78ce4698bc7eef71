"""`twinshard curves`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bridge.commands.options import JsonOption, user_errors
from bridge.commands.output import Console, print_json, print_line, print_table, print_text

_AGAINST = "--against"


class CurvesCommand(TyperCommand):
    """A command whose option ``--against`` takes all values up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(args: list[str]) -> list[str]:
    """``--against B C`` as ``--against B --against C``, the only form that the parser of options knows."""
    spelled: list[str] = []
    taking = False
    for argument in args:
        if argument.startswith("-"):
            taking = argument == _AGAINST or argument.startswith(_AGAINST + "=")
        elif taking and spelled[-1] != _AGAINST:
            spelled.append(_AGAINST)
        spelled.append(argument)
    return spelled


def curves_command(
    a: Annotated[
        list[str],
        typer.Argument(metavar="A...", help="Metrics files of runs A: one run, or repeats with other seeds."),
    ],
    against: Annotated[list[str], typer.Option(_AGAINST, metavar="B...", help="Metrics files of runs B.")],
    metric: Annotated[str, typer.Option(help="The metric to compare.")] = "loss",
    alpha: Annotated[float, typer.Option(help="Probability of a false alarm, over the whole curve.")] = 0.05,
    window: Annotated[
        int | None,
        typer.Option(help="Odd number of smoothed steps; a departure lasts as long. Default: 5 to 51."),
    ] = None,
    rtol: Annotated[float, typer.Option(min=0.0, help="Relative difference that is always allowed.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
    json: JsonOption = False,
) -> None:
    """Ask whether training runs are the same experiment.

    A metrics file holds JSON lines, CSV or TensorBoard events; a directory holds event files. With three runs or more,
    the repeats show how far seeds move the curve, and the exit status is 1 if B leaves that band. With one run on each
    side, the exit status is 1 if any step differs by more than --rtol.

    \b
    Example:
      twinshard curves a1.jsonl a2.jsonl --against b1.jsonl b2.jsonl --out c.png
      twinshard curves leg1-torch/metrics.jsonl --against logs/ --rtol 1e-5
    """
    from bridge.parity.curves.compare import compare_runs
    from bridge.parity.curves.series import MetricsError

    with user_errors(MetricsError, json=json):
        report = compare_runs(a, against, metric, alpha=alpha, window=window, rtol=rtol)
        if out is not None:
            report.plot(out)
    console = Console()
    if json:
        print_json(console, report.as_dict())
    else:
        heading, *rows = report.table()
        print_table(console, heading, rows)
        print_text(console, report.summary(), wrap=True)
        if out is not None:
            print_line(console, f"picture {out}")
    raise typer.Exit(0 if report.same else 1)
