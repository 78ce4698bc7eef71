"""The `twinshard` command.

Exit status: 0 for success, 1 when the answer is no (checkpoints or curves differ, a relay promise is broken), 2 for an
error, which is one message on standard error. Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import gc
import signal
import warnings
from typing import Annotated, TextIO

import typer
from rich.console import Console

import bridge
from bridge.commands.convert import convert
from bridge.commands.curves import CurvesCommand, curves_command
from bridge.commands.diff import diff
from bridge.commands.families import families
from bridge.commands.inspect import inspect
from bridge.commands.map import map_
from bridge.commands.output import print_line
from bridge.commands.parity import parity
from bridge.commands.plan import plan
from bridge.commands.relay import relay
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
app.command()(families)


app.command()(relay)
app.command(name="curves", cls=CurvesCommand)(curves_command)
app.command()(parity)
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
    # A closing terminal may send its signal twice, and a second signal must not interrupt the cleaning up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # An exception unwinds the stack, which removes a half-written destination.
    raise SystemExit(128 + signal_number)


def main() -> None:
    """Entry point of the `twinshard` command."""
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, _terminate)
    # The metadata of thousands of tensors lives until the end; scanning it again and again takes a fifth of the time.
    gc.set_threshold(100_000)
    app()


if __name__ == "__main__":
    main()
