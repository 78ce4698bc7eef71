"""The `twinshard` command.

Exit status: 0 for success, 1 when the answer is no (checkpoints or curves differ, a relay promise is broken), 2 for an
error, which is one message on standard error, 128 + n after signal n, also when a reader closed the pipe (141). An
unforeseen error ends with 2, too; with TWINSHARD_TRACEBACK=1 Python's traceback comes before its message.
Results go to standard output, progress to standard error. With `--json` standard output is one document in any case:
for an error {"version": 1, "error": {"kind": ..., "message": ..., "status": 2}}.
"""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import shlex
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Annotated, Any, Final, Never

import typer

import bridge
from bridge.commands.convert import convert
from bridge.commands.curves import CurvesCommand, curves_command
from bridge.commands.diff import diff
from bridge.commands.inspect import inspect
from bridge.commands.map import families, map_
from bridge.commands.output import BROKEN_PIPE, Console, print_failure, print_line
from bridge.commands.parity import parity
from bridge.commands.plan import plan
from bridge.commands.relay import relay
from bridge.commands.stopping import Stopped, stop_on_signals
from bridge.commands.verify import verify

TRACEBACK: Final = "TWINSHARD_TRACEBACK"
"""Environment variable that asks for the traceback of an error that no command explains."""

_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report a program that the signal ends.
_OUTPUT_ERRORS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN}

_STORES: Final = frozenset(
    (
        *("aiobotocore", "aiohttp", "asyncio", "boto3", "botocore", "fsspec", "gcsfs", "google", "grpc"),
        *("huggingface_hub", "s3fs", "s3transfer", "urllib3"),
    )
)
"""The libraries behind object stores, whose log lines must not appear next to the command's own error."""

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


# The base class of typer's usage errors; only its subclass has a public name in all versions. Any, because no public
# type has its show() and format_message().
_WrongUsage: Any = typer.BadParameter.__mro__[2]


def _require_no_empty_argument() -> None:
    """An empty argument is a mistake, such as an unset variable in a script. As a path it would mean ".".

    Raises typer.BadParameter.
    """
    for number, argument in enumerate(sys.argv[1:]):
        if not argument.strip():
            before = " ".join(map(shlex.quote, sys.argv[1 : number + 1]))
            raise typer.BadParameter(
                f"expected a value after {before!r}, got an empty one: is a variable in your script not set?"
            )


def hide_logs_of_stores() -> None:
    """Hide what libraries of object stores log, unless somebody has configured logging.

    Python's handler of last resort would print warnings, errors and their tracebacks. Handlers that are configured, by
    the user or by a variable such as GCSFS_DEBUG, stay as they are.
    """
    if logging.lastResort is not None:
        logging.lastResort.addFilter(lambda record: record.name.partition(".")[0] not in _STORES)


def main() -> None:
    """Entry point of the `twinshard` command."""
    warnings.showwarning = lambda message, *_, **__: print_line(Console(stderr=True), f"warning: {message}")
    stop_on_signals()
    hide_logs_of_stores()
    # The metadata of thousands of tensors lives until the end; scanning it again and again takes a fifth of the time.
    gc.set_threshold(100_000)
    json = "--json" in sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        # A name may have characters that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    try:
        _require_no_empty_argument()
        status = app(standalone_mode=False, prog_name="twinshard")
        if status == _INTERRUPTED:
            raise KeyboardInterrupt  # typer has turned it into a status
        if sys.stdout is not None:
            sys.stdout.flush()
    except Stopped as stopped:
        print_failure(stopped, str(stopped), int(str(stopped.code)), json=json)
        raise
    except _WrongUsage as error:
        usage, errors = io.StringIO(), Console(stderr=True)
        error.show(usage)
        for line in usage.getvalue().rstrip().split("\n"):
            print_line(errors, line.replace("Error: ", "error: ", 1))
        for argument in sys.argv[1:]:
            if argument.startswith("-") and os.path.lexists(argument):
                print_line(errors, f"To name the file or directory {argument}, write ./{argument}")
        if json:
            print_failure(error, error.format_message(), 2, json=True, told=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt as error:
        # Raised in a thread, or before signals are handled; otherwise SIGINT raises `Stopped`.
        print_failure(error, "stopped by SIGINT", _INTERRUPTED, json=json)
        raise SystemExit(_INTERRUPTED) from None
    except (BrokenPipeError, SystemExit) as error:
        # typer exits with 1 when a pipe is closed; the commands' own answers are the result of `app`.
        if isinstance(error, SystemExit) and error.code != 1:
            raise
        sys.stdout = None
        raise SystemExit(BROKEN_PIPE) from None
    except typer.Abort as error:
        print_failure(error, "stopped: the question was not answered", 2, json=json)
        raise SystemExit(2) from None
    except Exception as error:
        _end_unforeseen(error, json)
    raise SystemExit(status if isinstance(status, int) else 0)


def _end_unforeseen(error: Exception, json: bool) -> Never:
    """Print, in one sentence, an error that no command explains. Status 2, because 1 means that the answer is no."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS:
        # Commands explain all errors of files themselves; only errors of their own output remain.
        print_failure(error, f"error: standard output cannot be written: {error.strerror or error}", 2)
        # At exit Python would try again, and complain.
        sys.stdout = None
        raise SystemExit(2) from None
    said = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, MemoryError):
        text = (
            f"error: not enough memory ({said}): give the command more memory, or fewer threads (--workers 1)"
        )
    else:
        text = (
            f"error: the command failed unexpectedly: {type(error).__name__}: {said}; {TRACEBACK}=1 prints the "
            "traceback, which a bug report should contain"
        )
    print_failure(error, text, 2, json=json)
    raise SystemExit(2) from None


if __name__ == "__main__":
    main()
