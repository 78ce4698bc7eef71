"""Lines of text that must stay as they were: a file has them by case, and ``write`` makes the file again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path


def kept(file: Path, case: str) -> list[str]:
    lines: list[str] = json.loads(file.read_text(encoding="utf-8"))[case]
    return lines


def write(file: Path, cases: Mapping[str, Callable[[], Iterable[str]]]) -> None:
    """A line of the file for each case."""
    rows = (f"{json.dumps(case)}: {json.dumps([*lines()])}" for case, lines in cases.items())
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
