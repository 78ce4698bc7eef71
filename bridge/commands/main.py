"""The `twinshard` command.

Exit status: 0 success, 1 the answer is no (checkpoints differ, a relay promise is broken), 2 an error, which is one
message on standard error. Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import gc
import signal
import time
import warnings
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

import bridge
from bridge.commands.convert import convert
from bridge.commands.diff import diff
from bridge.commands.inspect import inspect
from bridge.commands.map import map_
from bridge.commands.options import (
    JsonOption,
    progress_console,
    user_errors,
)
from bridge.commands.output import print_json, print_line, print_table
from bridge.commands.plan import plan
from bridge.commands.verify import verify

app = typer.Typer(
    name="twinshard",
    help="Move checkpoints between PyTorch and JAX, compare them, and run both stacks side by side.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


app.command()(convert)
app.command()(diff)
app.command()(inspect)
app.command()(verify)
app.command(name="map")(map_)


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
    # What metadata says of thousands of tensors stays: looking through it again and again takes a fifth of the time.
    gc.set_threshold(100_000)
    app()


if __name__ == "__main__":
    main()
