"""The `twinshard parity` command: see ``bridge.parity`` for what runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bridge.commands.options import (
    AxisOption,
    ExampleOption,
    JsonOption,
    MappingOption,
    axis_sizes,
    user_errors,
)
from bridge.commands.output import Console, print_json, print_line, print_table


def parity(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN.toml | A.trace B.trace", help="A run file, or the traces of both models."
        ),
    ],
    mapping: MappingOption = None,
    axis: AxisOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; default: runs/parity-<time>.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 also if something could not be compared.")
    ] = False,
    json: JsonOption = False,
    example: ExampleOption = None,
) -> None:
    """Compare a PyTorch model and a JAX model, and find where they first diverge.

    Compares weights, each module's outputs, the loss, gradients, the optimizers' update and some steps of training.
    A difference counts if rounding does not explain it. The exit status is 0 for the same, 1 for a difference and 2
    for a mistake in the call. With --strict the status is also 1 if parameters have no partner, outputs do not fit
    each other, or there are no gradients.

    \b
    Examples:
      twinshard parity --example port
      twinshard parity run.toml --out runs/parity
      twinshard parity torch.trace jax.trace --mapping llama --axis d=64
    """
    from bridge.core.extras import why_no_pictures
    from bridge.core.mapping import MappingError
    from bridge.parity.compare.captured import compare_traces
    from bridge.parity.compare.parity import compare_run_file, write_report
    from bridge.parity.compare.run_file import RunFile, RunFileError
    from bridge.parity.recorded.trace import TraceError, is_trace

    folder = out or Path("runs") / time.strftime("parity-%Y%m%d-%H%M%S")
    console, progress = Console(), Console(stderr=True)

    def say(text: str) -> None:
        print_line(progress, f"parity: {text}")

    with user_errors(RunFileError, TraceError, MappingError, ValueError, json=json):
        if len(runs) == 2 and all(map(is_trace, runs)):
            report = compare_traces(*runs, mapping=mapping, axes=axis_sizes(axis, mapping), progress=say)
        elif len(runs) == 1 and runs[0].suffix == ".toml":
            if mapping is not None or axis:
                raise ValueError("a run file: expected mapping and axes in the file, got --mapping or --axis")
            report = compare_run_file(RunFile.load(runs[0]), say)
        else:
            names = ", ".join(map(str, runs))
            raise ValueError(f"expected one run file (*.toml) or two traces (directories), got {names}")
        write_report(report, folder)
        if (reason := why_no_pictures()) is not None:
            say(reason)
    if strict and not report.complete:
        print_line(progress, f"parity: --strict: {report.conclusion()}")
    if json:
        print_json(console, report.as_dict())
    else:
        heading, *rows = report.table()
        print_table(console, heading, rows, left=4)
        print_line(console, report.summary())
        for line in report.remarks():
            print_line(console, line)
        print_line(console, f"report {folder / 'report.html'}, {folder / 'report.json'}")
        if not report.complete:
            print_line(console, report.conclusion())
    raise typer.Exit(0 if report.same and (report.complete or not strict) else 1)
