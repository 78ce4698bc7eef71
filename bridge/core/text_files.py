"""Text files that people and other programs write: TOML, JSON and plain text, read with limits.

Otherwise a named pipe without a writer would block, reading a device would never end, deep nesting would raise a
RecursionError, and a number of 5000 digits a ValueError. Here each case is an error of the caller's class: one sentence
with file and line.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from typing import Any, Final

MAX_TOML: Final = 4 << 20
"""The most bytes of files that people write; the largest shipped file has 60 kB."""

MAX_JSON: Final = 64 << 20
_MAX_SHOWN: Final = 200
_MAX_DIGITS: Final = 4300  # of a number, as in Python's `int`
_MAX_PARTS: Final = 1000
"""The most parts of a dotted key: Python's parser takes quadratic time."""

MakeError = Callable[[str], Exception]
"""Makes the caller's error from a message."""


def read_text(
    path: str | os.PathLike[str], error: MakeError, *, most: int, expected: str = "a text file"
) -> str:
    """The text of a regular file of at most `most` bytes of UTF-8, perhaps with a byte order mark.

    expected: the expected kind of file, for errors. Raises the error that ``error`` makes; OSError for a missing file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    # Not by descriptor: errors about a folder would contain the number in place of the path.
    with open(path, "rb", opener=lambda *_: descriptor) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise error(
                f"{path}: expected {expected}, got a pipe or a device: write its content to a file first"
            )
        data = file.read(most + 1)
    if len(data) > most:
        raise error(
            f"{path}: expected {expected} of at most {most} bytes, got a larger one: is it another file?"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        raise error(
            f"{path}, line {line}: expected {expected} in UTF-8, got byte {data[failure.start]:#04x}: save it as UTF-8"
        ) from None


def load_toml(path: str | os.PathLike[str], error: MakeError) -> dict[str, Any]:
    """The tables of a TOML file. Raises as `read_text` does, and for invalid TOML."""
    return parse_toml(read_text(path, error, most=MAX_TOML, expected="a TOML file"), str(path), error)


def parse_toml(text: str, what: str, error: MakeError, expected: str = "a TOML file") -> dict[str, Any]:
    """The tables in a text. what: the file, for errors."""
    for number, line in enumerate(text.split("\n"), 1):
        keys = (part.replace("{", ",").rpartition(",")[2] for part in line.split("="))
        if line.count(".") > _MAX_PARTS and max(key.count(".") for key in keys) > _MAX_PARTS:
            raise error(
                f"{what}: expected {expected}, got a key of more than {_MAX_PARTS} parts in line {number}"
            )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{what}: expected {expected}, got brackets nested too deeply{_deepest(text)}") from None
    except ValueError as failure:
        # Python refuses longer numbers without naming the line.
        runs = re.finditer(r"[0-9_]++", text) if type(failure) is ValueError else iter(())
        long = next((run for run in runs if run.end() - run.start() > _MAX_DIGITS), None)
        where = f" in line {text.count(chr(10), 0, long.start()) + 1}" if long else ""
        raise error(f"{what}: expected {expected}, got {_said(failure)}{where}") from None


def load_json(path: str | os.PathLike[str], error: MakeError, expected: str = "a JSON file") -> Any:
    """The value in a JSON file. Raises as `read_text` does, and for invalid JSON."""
    return parse_json(read_text(path, error, most=MAX_JSON, expected=expected), str(path), error, expected)


def parse_json(
    text: str | bytes,
    what: str,
    error: MakeError,
    expected: str = "a JSON file",
    make_object: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value in a text. what: the file, for errors. make_object: from an object's entries; default: a dict."""
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError:
        raise error(f"{what}: expected {expected}, got brackets nested too deeply") from None
    except ValueError as failure:
        raise error(f"{what}: expected {expected}, got {_said(failure)}") from None


def toml_string(text: str) -> str:
    """A string of TOML, in quotes."""
    # JSON does not escape one character that TOML requires escaped, and TOML has no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _said(failure: ValueError) -> str:
    """The parser's message without its advice for programmers."""
    if "integer string conversion" in str(failure):
        return "a number of too many digits"
    text = str(failure)
    return f"an error at: {text[:_MAX_SHOWN]}" + ("..." if len(text) > _MAX_SHOWN else "")


def _deepest(text: str) -> str:
    """The line with the most opening brackets."""
    lines = text.split("\n")
    number = max(range(len(lines)), key=lambda index: lines[index].count("[") + lines[index].count("{"))
    return f" in line {number + 1}"
