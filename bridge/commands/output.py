"""How commands print: fitted to the width of a terminal, as aligned plain text in a pipe, as JSON for machines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from textwrap import fill
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from bridge.core.text import human_bytes, plain_json, printable, table_lines

_FOLDED_NAME = 24
"""Minimum number of characters of a name in a line, where a narrow terminal folds names."""
_GAP = 2
"""Blanks between two columns of a table."""
_LABELS = {"error": "bold red", "failed": "bold red", "warning": "bold yellow"}
"""Styles of the first word of a message. The word alone says the same."""
PLAIN_SECONDS = 10.0
"""Seconds between two lines of progress in a pipe, at least."""


JSON_VERSION = 1
"""Version of the `--json` documents: it grows when a key is renamed, removed or redefined; keys may be added."""
_WIDTH = 80  # For a pipe or a file, which has no width.
BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report a program that the signal ends


class Console(RichConsole):
    """A console that ends the command silently when the reader of a pipe stops early, as in `| head`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.width < 1:
            # COLUMNS=0, which some schedulers set, would leave no room for anything.
            self.width = _WIDTH

    def on_broken_pipe(self) -> None:
        # Discards what Python still flushes at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno() if self.stderr else sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE)


def print_json(console: RichConsole, value: object) -> None:
    """Print one indented JSON document, at any width of the terminal. Its first key is its version."""
    document = {"version": JSON_VERSION, **plain_json(value)}
    console.out(json.dumps(document, indent=1, allow_nan=False), highlight=False)


def print_failure(
    error: BaseException, message: str, status: int, *, json: bool = False, told: bool = False
) -> None:
    """Print an error's message on standard error, unless it was ``told``, and as a document with ``json``."""
    if not told:
        # The message may contain the end of a log. Indentation keeps its lines from looking like ours.
        print_text(Console(stderr=True), message.replace("\n", "\n  "), wrap=True)
    if json:
        print_json(Console(), {"error": failure(error, message, status)})


def failure(error: BaseException, message: str, status: int) -> Mapping[str, object]:
    """The fields that documents have for an error."""
    return {"kind": type(error).__name__, "message": message.removeprefix("error: "), "status": status}


def print_line(console: RichConsole, text: str = "") -> None:
    """Print a line of text. Characters that would control the terminal, or begin another line, are escaped."""
    print_text(console, printable(text), wrap=True)


def print_text(console: RichConsole, text: str, *, wrap: bool = False) -> None:
    """Print our own text of several lines; the names in it contain no line breaks.

    wrap: on a terminal, break lines between words. No word is cut, so that a path can be copied. A pipe gets the
    text unchanged. A label such as "error:" at the start has a colour on a terminal.
    """
    text = printable(text, lines=True)
    if wrap and console.is_terminal:
        text = "\n".join(_wrapped(line, console.width) for line in text.split("\n"))
    label, colon, rest = text.partition(": ")
    if colon and label in _LABELS and console.is_terminal:
        console.print(Text.assemble((label + colon, _LABELS[label]), rest), soft_wrap=True, highlight=False)
    else:
        console.out(text, highlight=False)


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def print_table(
    console: RichConsole, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> None:
    """Print rows under headings, the first ``left`` columns aligned left. No name is cut from 20 columns on.

    Columns are in the order of their importance. A terminal that is too narrow for all of them shows the first ones,
    and a line says which columns are not shown. A pipe gets all columns.
    """
    shown: list[Sequence[str]] = [[printable(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        # One call for all lines: a call costs as much time as a hundred lines.
        print_text(console, "\n".join(table_lines(columns, shown, columns[left:])))
        return
    widths = _widths(console.width, columns, shown, left)
    table, fitting = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False), len(widths)
    for number, width in enumerate(widths):
        table.add_column(
            columns[number], justify="left" if number < left else "right", overflow="fold", width=width
        )
    for row in shown:
        table.add_row(*(Text(cell) for cell in row[:fitting]))
    console.print(table)
    if fitting < len(columns):
        print_line(
            console,
            f"not shown in {console.width} columns: {', '.join(dict.fromkeys(columns[fitting:]))} (widen the terminal, "
            "pipe to less -S, or use --json)",
        )


def _widths(width: int, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[int]:
    """Widths of the columns that fit, at least ``left`` of them. Names may fold, numbers may not."""
    cells = list(zip(columns, *rows, strict=True))
    whole = [max(map(len, column)) for column in cells]
    needed = [min(length, _FOLDED_NAME) for length in whole[:left]] + whole[left:]
    fitting = max(left, sum(end - _GAP <= width for end in accumulate(_GAP + length for length in needed)))
    room = width + _GAP - sum(_GAP + length for length in whole[left:fitting]) - _GAP * left
    words = [max(map(len, " ".join(column).split()), default=1) for column in cells[:left]]
    names = [min(length, _FOLDED_NAME) for length in words]
    if sum(names) > room:
        names = [1] * left
    # What is left goes to the narrowest column.
    while sum(names) < room and (folded := [k for k in range(left) if names[k] < whole[k]]):
        names[min(folded, key=names.__getitem__)] += 1
    return names + whole[left:fitting]


@contextmanager
def byte_progress(console: RichConsole, title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback for bytes done, bytes in all and the tensor's name, shown on ``console`` while the block runs."""
    # A dumb terminal is not interactive: it cannot overwrite a line.
    if console.is_interactive:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[tensor]}", markup=False),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=None, tensor="")
            yield lambda done, total, name: bar.update(
                task, completed=done, total=total, tensor=printable(name)
            )
        return
    last = started = time.monotonic()
    first: int | None = None

    def line(done: int, total: int, name: str) -> None:
        nonlocal last, first
        # The bytes that a resumed conversion starts with say nothing about its speed.
        first = done if first is None else first
        now = time.monotonic()
        if now - last >= PLAIN_SECONDS:
            last = now
            rate = (done - first) / (now - started)
            left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
            print_line(
                console,
                f"{title}: {human_bytes(done)} of {human_bytes(total)}, {human_bytes(int(rate))}/s{left}, {name}",
            )

    yield line
