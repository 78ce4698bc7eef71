"""Values as text: sizes for people, JSON for machines, and names that cannot control a terminal."""

from __future__ import annotations

import base64
import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any


def human_bytes(count: int) -> str:
    """``count`` in decimal units, three digits."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"


def counted(count: int, noun: str) -> str:
    """The count and its noun, such as "1 tensor" or "2 tensors"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def plain_json(value: object) -> Any:
    """``value`` as JSON: dataclasses as objects, numbers that are not finite as "inf", "-inf" or "nan".

    Bytes become an object with the one key "$bytes", in base 64.
    """
    import numpy as np

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path | np.dtype):
        return str(value)
    return value


def first_of(names: Collection[object], most: int = 5, total: int | None = None) -> str:
    """The first ``most`` names and how many more there are: "a, b and 7 more"; empty for no names.

    total: the total number, if ``names`` has only the first names.
    """
    shown = [str(name) for name in islice(names, most)]
    more = (len(names) if total is None else total) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def first_lines(lines: Sequence[str], most: int, what: str = "") -> list[str]:
    """The first ``most`` lines, and a line "... and 7 more" for the rest; ``what`` ends that line."""
    more = len(lines) - most
    return [*lines[:most], *([f"... and {more} more{what}"] if more > 0 else [])]


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str]) -> list[str]:
    """A line for the columns' names and one for each row, cells two spaces apart; right: the columns of numbers."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in (columns, *rows)
    ]


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """The end of an error about ``text``: similar names in ``known``; empty if there are none."""
    names = {name.lower(): name for name in known}
    near = [names[close] for close in difflib.get_close_matches(text.lower(), names, n=2, cutoff=0.7)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def printable(text: str, *, lines: bool = False) -> str:
    """Text in one line, for a terminal. lines: keep line breaks, which then do not come from a name.

    Names in a checkpoint are untrusted: escape sequences, marks that change the writing direction, lone surrogates and
    line breaks, which would add lines, must not reach the terminal.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else ascii(c)[1:-1] for c in text)
