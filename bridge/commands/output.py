"""How commands print: tables and a progress bar on a terminal, aligned plain text in a pipe, JSON for machines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

_FOLDED_NAME = 12
"""Characters of a name in a line, at least, where a narrow terminal folds names."""
PLAIN_SECONDS = 10.0
"""In a pipe, progress is a line at most this often."""


JSON_VERSION = 1
"""Of the documents of `--json`: it grows when a key is renamed, removed, or means something else; keys may be added."""
_WIDTH = 80  # For a pipe or a file, which has no width.
BROKEN_PIPE = 141  # 128 + SIGPIPE, as of a program that the signal ends


class Console(RichConsole):
    """A console of which a pipe's reader may take a part only, as in `| head`: then the command ends without a word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.width < 1:
            # COLUMNS=0, as some schedulers have it, would leave no room for anything.
            self.width = _WIDTH

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What Python still flushes at its end goes nowhere.
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
    """Print an error's message on standard error, unless that was ``told``, and as a document with ``json``."""
    if not told:
        # A log's end may be in it. No name makes a line that looks like one of ours.
        print_text(Console(stderr=True), message.replace("\n", "\n  "))
    if json:
        print_json(Console(), {"error": failure(error, message, status)})


def failure(error: BaseException, message: str, status: int) -> Mapping[str, object]:
    """What documents say of an error."""
    return {"kind": type(error).__name__, "message": message.removeprefix("error: "), "status": status}


def print_line(console: RichConsole, text: str = "") -> None:
    """Print a line of text. Characters that would control the terminal, or begin another line, are escaped."""
    console.out(printable(text), highlight=False)


def print_text(console: RichConsole, text: str) -> None:
    """Print text of ours in several lines: names in it are without line breaks."""
    console.out(printable(text, lines=True), highlight=False)


def print_table(
    console: RichConsole,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
) -> None:
    """Print rows under headings, the first ``left`` columns aligned left. No name is ever cut.

    In a terminal that is too narrow for the numbers of a row, each row is a block with a line for each of them.
    """
    shown: list[Sequence[str]] = [[printable(cell) for cell in row] for row in rows]
    if console.is_terminal and len(columns) > left and _too_wide(console.width, columns, shown, left):
        _print_blocks(console, columns, shown, left)
        return
    if console.is_terminal:
        table = Table()
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number < left else "right", overflow="fold")
        for row in shown:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        return
    # One call for all lines: a call costs as much time as a hundred lines.
    print_text(console, "\n".join(table_lines(columns, shown, columns[left:])))


def _too_wide(width: int, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> bool:
    """Whether numbers would fold; names may."""
    lengths = [max(len(row[k]) for row in (columns, *rows)) for k in range(len(columns))]
    names = sum(min(length, _FOLDED_NAME) for length in lengths[:left])
    return names + sum(lengths[left:]) + 3 * len(columns) + 1 > width


def _print_blocks(
    console: RichConsole, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int
) -> None:
    margin = max(len(name) for name in columns[left:])
    blocks = [
        "\n".join(
            [
                "  ".join(cell for cell in row[:left] if cell),
                *(
                    f"  {name.ljust(margin)}  {cell}"
                    for name, cell in zip(columns[left:], row[left:], strict=True)
                    if cell
                ),
            ]
        )
        for row in rows
    ]
    print_text(console, "\n".join(blocks))


@contextmanager
def byte_progress(console: RichConsole, title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback for bytes done, bytes in all and the tensor's name, shown on ``console`` while the block runs."""
    # A dumb terminal is not interactive: it cannot go back in a line.
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
