"""The `twinshard` command.

Exit status: 0 success, 1 the answer is no (checkpoints differ, a relay promise is broken), 2 an error, which is one
message on standard error. Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import signal
import time
import warnings
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

import bridge
from bridge.cli_convert import convert
from bridge.cli_options import (
    SHOWN,
    AxisOption,
    JsonOption,
    MappingOption,
    axis_sizes,
    progress_console,
    some,
    user_errors,
)
from bridge.cli_output import byte_progress, human_bytes, print_json, print_line, print_table
from bridge.cli_plan import plan
from bridge.formats.base import dtype_name
from bridge.ulp import LARGEST_ULP

app = typer.Typer(
    name="twinshard",
    help="Move checkpoints between PyTorch and JAX, compare them, and run both stacks side by side.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


app.command()(convert)


@app.command()
def diff(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="Checkpoint directory, translated by --mapping if given.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Checkpoint directory that A is compared with.")],
    mapping: MappingOption = None,
    axis: AxisOption = None,
    max_ulp: Annotated[
        int, typer.Option(min=0, max=LARGEST_ULP, help="Allowed distance in units in the last place.")
    ] = 0,
    rtol: Annotated[float, typer.Option(min=0.0, help="Or allowed relative difference.")] = 0.0,
    all_: Annotated[bool, typer.Option("--all", help="List every tensor, equal ones too.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor.

    The exit status is 1 when they differ beyond the tolerance. An element passes within --max-ulp or within --rtol;
    NaNs pass against the same NaN only, integers must be equal.

    \b
    Example:
      twinshard diff runs/torch/step_40 runs/jax/step_40 --mapping decoder --max-ulp 2
    """
    from bridge.diff import diff as run
    from bridge.ulp import Tolerance

    with user_errors(), byte_progress(progress_console(), "diff") as progress:
        tolerance = Tolerance(max_ulp, rtol)
        report = run(
            a, b, mapping=mapping, axes=axis_sizes(axis, mapping), tolerance=tolerance, progress=progress
        )
    out = Console()
    total = report.total
    if json:
        print_json(out, {"within": report.within, "max_ulp": report.max_ulp, "total": total, **vars(report)})
        raise typer.Exit(0 if report.within else 1)
    listed = [t for t in report.tensors if all_ or t.difference.differing]
    listed.sort(key=lambda t: (t.difference.beyond, t.difference.max_ulp), reverse=True)
    if listed:
        rows = []
        for tensor in listed if all_ else listed[:SHOWN]:
            d = tensor.difference
            counts = (f"{d.differing}/{d.elements}", str(d.nan), str(d.beyond))
            rows.append(
                (tensor.name, tensor.dtype, str(d.max_ulp), f"{d.max_rel:.2e}", f"{d.max_abs:.2e}", *counts)
            )
        columns = ("tensor", "dtype", "max ULP", "max rel", "max abs", "differ", "NaN", "beyond")
        print_table(out, columns, rows, left=2)
        if len(rows) < len(listed):
            print_line(out, f"... and {len(listed) - len(rows)} more (--all lists them)")
    for title, names in (("only in A", report.missing), ("only in B", report.extra)):
        if names:
            print_line(out, f"{title}: {some(names)}")
    for name, text in report.mismatched:
        print_line(out, f"{name}: {text}")
    for name, left, right in report.objects:
        print_line(out, f"{name}: {left!r} in a, {right!r} in b")
    for name, reason in report.unreadable:
        print_line(out, f"{name} cannot be compared: {reason}")
    verdict = "within" if report.within else "beyond"
    found = f"largest distance {total.max_ulp} ULP" if total.differing else "all bits agree"
    rtol_text = f" or rtol {rtol:g}" if rtol else ""
    print_line(
        out,
        f"{len(report.tensors)} tensors, {total.elements} elements compared: {found}; {verdict} "
        f"the tolerance of {max_ulp} ULP{rtol_text}",
    )
    raise typer.Exit(0 if report.within else 1)


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Checkpoint directory; with --layout also a layout file.")
    ],
    layout: Annotated[bool, typer.Option("--layout", help="Draw who holds which rows, to scale.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="With --layout: also draw a .png, .svg or .pdf."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List what a checkpoint holds.

    Tensors with shape, dtype, size and number of stored chunks; totals by group; values that are not tensors.

    With --layout, a drawing to scale instead: of a checkpoint, which chunk stores which rows; of a layout file, the
    JSON that a planned layout writes, what every rank holds, with dots for padding.

    \b
    Example:
      twinshard inspect runs/torch/step_40
      twinshard inspect layout.json --layout --picture layout.png
    """
    from bridge.inspect import chunk_lines
    from bridge.inspect import inspect as run
    from bridge.layout_file import LayoutError

    if picture is not None and not layout:
        raise typer.BadParameter("expected --layout beside --picture")
    out = Console()
    with user_errors(LayoutError):
        if layout and not path.is_dir():
            _inspect_layout_file(out, path, picture, json)
            return
        summary = run(path)
        if picture is not None:
            from bridge.layout_picture import chunks_figure, save_picture

            save_picture(chunks_figure(summary.tensors), picture)
    if json:
        tensors = [
            {
                "name": t.name,
                "path": t.path,
                "shape": t.shape,
                "dtype": dtype_name(t.dtype),
                "bytes": t.nbytes,
                "chunks": [{"offsets": chunk.offsets, "sizes": chunk.sizes} for chunk in t.chunks],
            }
            for t in summary.tensors
        ]
        print_json(out, {**vars(summary), "bytes": summary.bytes, "tensors": tensors})
        return
    print_line(
        out, f"{summary.path}: {summary.format}, {len(summary.tensors)} tensors, {human_bytes(summary.bytes)}"
    )
    if layout:
        for line in chunk_lines(summary.tensors):
            print_line(out, line)
        return
    rows = [
        (t.name, dtype_name(t.dtype), str(list(t.shape)), human_bytes(t.nbytes), str(len(t.chunks)))
        for t in summary.tensors
    ]
    print_table(out, ("tensor", "dtype", "shape", "size", "chunks"), rows, left=2)
    totals = [(g.name, str(g.tensors), str(g.elements), human_bytes(g.bytes)) for g in summary.groups]
    print_table(out, ("group", "tensors", "elements", "size"), totals)
    for name, value in summary.objects.items():
        print_line(out, f"{name} = {value!r}")
    for name, reason in summary.unreadable.items():
        print_line(out, f"{name} cannot be read: {reason}")


@app.command()
def relay(
    config: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="A built-in relay (default, bfloat16, quick) or a TOML file."
        ),
    ] = "default",
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder to create; default: runs/relay-<time>.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train one model by PyTorch and JAX in turns.

    The checkpoint is converted between the legs, and every step compared with a run that never hops.

    \b
    Example:
      twinshard relay --out runs/first
    """
    from bridge.parity.config import ConfigError, RelayConfig
    from bridge.parity.relay import RelayError, run

    folder = out or Path("runs") / time.strftime("relay-%Y%m%d-%H%M%S")
    with user_errors(ConfigError, RelayError):
        report = run(RelayConfig.load(config), folder, progress_console())
    console = Console()
    if json:
        print_json(console, report.as_dict())
    else:
        heading, *rows = report.table()
        print_table(console, heading, rows)
        print_line(console, report.summary())
        print_line(console, f"report {folder / 'report.json'}, picture {folder / 'relay.png'}")
    for failure in report.failures():
        print_line(Console(stderr=True), f"failed: {failure}")
    if not report.failures() and not json:
        print_line(console, "Every promise of the relay held.")
    raise typer.Exit(1 if report.failures() else 0)


app.command()(plan)


def _inspect_layout_file(out: Console, path: Path, picture: Path | None, json: bool) -> None:
    from bridge.layout_file import layout_lines, layout_numbers, read_layout

    if not path.exists():
        raise FileNotFoundError(
            f"expected a layout file or checkpoint directory at {path}, found nothing there"
        )
    found = read_layout(path)
    if picture is not None:
        from bridge.layout_picture import layout_figure, save_picture

        save_picture(layout_figure(found), picture)
    if json:
        print_json(out, {"path": path, **layout_numbers(found)})
        return
    for line in layout_lines(found):
        print_line(out, line)


def _version(wanted: bool) -> None:
    if wanted:
        print_line(Console(), f"twinshard {bridge.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print_line(Console(stderr=True), f"warning: {message}")


def _terminate(signal_number: int, _: object) -> None:
    # A terminal that closes may say so twice, and nothing may interrupt the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # As an exception, so that a half-written destination is removed on the way out.
    raise SystemExit(128 + signal_number)


def main() -> None:
    """Entry point of the `twinshard` command."""
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, _terminate)
    app()


if __name__ == "__main__":
    main()
