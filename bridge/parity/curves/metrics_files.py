"""Metrics files of a training run: JSON lines, CSV, and TensorBoard event files."""

from __future__ import annotations

import csv
import json
import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c

from bridge.core.text import first_of
from bridge.core.text_files import read_text
from bridge.parity.curves.series import STEP_NAMES, Collected, MetricsError, Series, as_number, as_step

_EVENTS = "tfevents"
_MAX_BYTES = 1 << 30
"""A year of steps, one per second, is below this; a checkpoint given by mistake is above."""


def read_metrics(path: str | os.PathLike[str]) -> dict[str, Series]:
    """Every metric of one run, by name.

    ``path`` is a file, or a directory of TensorBoard event files, which are read in the order of their names (the names
    begin with a time). The name decides the kind of a file (``*tfevents*``, ``.csv``, ``.tsv``, ``.jsonl``, ``.json``),
    otherwise the first bytes.

    - JSON lines: objects; every number, and text such as "nan", is a value. The step is ``step``, ``global_step`` or
      ``_step``, or the number of the line, from 0, if no line has one.
    - CSV: a heading, then rows; empty cells are absent values, columns of text are left out. Steps as above.
    - Event files: scalars, as ``simple_value`` or as a tensor of float or double. They store losses in float32.

    If a step has several values, the last counts. An incomplete last line or record, as in a run that still writes, is
    skipped with a warning. Raises ``MetricsError``, with file and line or byte, for damaged files and files without
    any number; ``OSError`` for files that cannot be opened.
    """
    file_or_folder = Path(path)
    points = Collected()
    if file_or_folder.exists() and not (file_or_folder.is_dir() or file_or_folder.is_file()):
        raise MetricsError(
            f"{file_or_folder}: expected a file or a directory, got a pipe or a device: save its content first"
        )
    if file_or_folder.is_dir():
        files = sorted(file for file in file_or_folder.iterdir() if _EVENTS in file.name)
        if not files:
            raise MetricsError(
                f"{file_or_folder}: expected TensorBoard event files (*{_EVENTS}*) in the directory, found none"
            )
        for file in files:
            read_events(file, points)
    elif _is_events(file_or_folder):
        read_events(file_or_folder, points)
    elif _is_csv(file_or_folder):
        _read_csv(file_or_folder, points)
    else:
        _read_json_lines(file_or_folder, points)
    series = points.series()
    if not series:
        raise MetricsError(f"{file_or_folder}: expected at least one metric with a number, found none")
    return series


def _is_events(path: Path) -> bool:
    if path.suffix in (".jsonl", ".json", ".csv", ".tsv"):
        return False
    return _EVENTS in path.name or is_event_file(path)


def _is_csv(path: Path) -> bool:
    if path.suffix in (".csv", ".tsv"):
        return True
    if path.suffix in (".jsonl", ".json"):
        return False
    with path.open("rb") as file:
        # Files of Windows programs may have a byte order mark and blank lines before the first brace.
        return not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _left_out(path: Path, line: int, what: str) -> None:
    warnings.warn(f"{path}, line {line}: the last {what} is incomplete and was skipped", stacklevel=4)


def _text(path: Path) -> str:
    return read_text(path, MetricsError, most=_MAX_BYTES, expected="lines of metrics")


def _step_name(names: Sequence[str]) -> str | None:
    """The first of ``names`` that is a name of the step."""
    ranked = [(STEP_NAMES.index(name.lower()), name) for name in names if name.lower() in STEP_NAMES]
    return min(ranked)[1] if ranked else None


def _read_json_lines(path: Path, points: Collected) -> None:
    rows = list(_json_rows(path))
    name = _step_name(list(dict.fromkeys(key for _, row in rows for key in row)))
    for count, (line, row) in enumerate(rows):
        if name is not None and name not in row:
            raise MetricsError(
                f'{path}, line {line}: expected a "{name}" as in other lines, found '
                + (first_of([f'"{key}"' for key in row]) or "an empty object")
            )
        step = count if name is None else as_step(row[name])
        if step is None:
            stored = row.get(str(name))
            raise MetricsError(f'{path}, line {line}: expected a whole number as "{name}", found {stored!r}')
        for key, value in row.items():
            number = as_number(value)
            if number is not None and key != name:
                points.add(key, step, number)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = _text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return _left_out(path, number, "line")
            raise MetricsError(
                f"{path}, line {number}: expected one JSON object such as "
                f'{{"step": 1, "loss": 2.3}}, found {line[:60]!r} ({error})'
            ) from None
        if not isinstance(row, dict):
            raise MetricsError(f"{path}, line {number}: expected a JSON object, found {line[:60]!r}")
        yield number, row


def _read_csv(path: Path, points: Collected) -> None:
    text = _text(path)
    first = text.split("\n", 1)[0]
    complete = text.endswith("\n")
    reader = csv.reader(text.splitlines(), delimiter="\t" if "\t" in first and "," not in first else ",")
    try:
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise MetricsError(f"{path}, line {reader.line_num}: expected rows of a table: {error}") from None
    if not rows:
        raise MetricsError(f"{path}: expected a heading and rows, found an empty file")
    (_, names), *rows = rows
    names = [name.strip() for name in names]
    if all(as_number(name) is not None for name in names):
        raise MetricsError(
            f"{path}, line 1: expected a heading such as step,loss, found numbers: {first[:60]!r}"
        )
    if rows and not complete:
        # A truncated number still looks like a number.
        _left_out(path, rows.pop()[0], "row")
    _add_rows(path, names, rows, points)


def _add_rows(path: Path, names: list[str], rows: list[tuple[int, list[str]]], points: Collected) -> None:
    for line, row in rows:
        if len(row) != len(names):
            raise MetricsError(
                f"{path}, line {line}: expected {len(names)} cells as in the heading, found {len(row)}"
            )
    step_name = _step_name(names)
    at = None if step_name is None else names.index(step_name)
    steps = [count if at is None else as_step(row[at]) for count, (_, row) in enumerate(rows)]
    for (line, row), step in zip(rows, steps, strict=True):
        if at is not None and step is None:
            raise MetricsError(
                f"{path}, line {line}: expected a whole number as {names[at]}, found {row[at]!r}"
            )
    for column, name in enumerate(names):
        filled = [(at_row, row[column]) for at_row, (_, row) in enumerate(rows) if row[column].strip()]
        if column == at or not filled or as_number(filled[0][1]) is None:
            continue
        for at_row, cell in filled:
            number, step = as_number(cell), steps[at_row]
            if number is None or step is None:
                line = rows[at_row][0]
                raise MetricsError(
                    f"{path}, line {line}: expected a number in column {name}, found {cell[:60]!r}"
                )
            points.add(name, step, number)


_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK = 0xA282EAD8
_TENSOR_DTYPES = {1: ("<f", 5), 2: ("<d", 6)}
"""By the number of a dtype: the layout of one value, and the field of values outside ``content``."""


def masked_crc(data: bytes) -> int:
    """The CRC-32C of ``data``, rotated and shifted as TFRecord files store it."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def is_event_file(path: Path) -> bool:
    """Whether the file begins with the header of a record."""
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
    return len(start) == _HEADER.size and _HEADER.unpack(start)[1] == masked_crc(start[:8])


def read_events(path: Path, points: Collected) -> None:
    """Add all scalars of one TensorBoard event file to ``points``, read without libraries.

    The file has records with checksums (TFRecord), each a protobuf message ``Event``. A record is its length (uint64),
    the masked CRC-32C of these 8 bytes, the message, and the message's masked CRC-32C, all little-endian. Only these
    fields of the messages matter::

        Event    2 step (int64)   5 summary
        Summary  1 value, repeated:  1 tag   2 simple_value (float)   8 tensor
        Tensor   1 dtype (1 float, 2 double)   2 shape (2 dimensions)   4 content   5 float values   6 double values

    An incomplete last record is skipped with a warning. Raises ``MetricsError`` for a wrong checksum or message.
    """
    with path.open("rb") as file:
        for offset, record in _records(file, path):
            try:
                _add_event(record, points)
            except (_MalformedError, UnicodeDecodeError, struct.error) as error:
                raise MetricsError(
                    f"{path}, record at byte {offset}: expected a TensorBoard Event message, found one that does not "
                    f"parse ({error}), although its checksum is right; is this another kind of TFRecord file?"
                ) from None


def _records(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    size = file.seek(0, 2)
    offset = 0
    while offset < size:
        file.seek(offset)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return _incomplete(path, offset)
        length, crc = _HEADER.unpack(header)
        _check(path, offset, "length", header[:8], crc)
        end = offset + _HEADER.size + length + _CRC.size
        if end > size:
            return _incomplete(path, offset)
        data = file.read(length)
        _check(path, offset, "data", data, _CRC.unpack(file.read(_CRC.size))[0])
        yield offset, data
        offset = end


def _incomplete(path: Path, offset: int) -> None:
    warnings.warn(f"{path}: the last record, at byte {offset}, is incomplete and was skipped", stacklevel=5)


def _check(path: Path, offset: int, part: str, data: bytes, stored: int) -> None:
    computed = masked_crc(data)
    if computed != stored:
        raise MetricsError(
            f"{path}, record at byte {offset}: expected checksum {stored:#010x} for the record's {part}, found "
            f"{computed:#010x}; the file is damaged from there on, or it is not a TensorBoard event file"
        )


class _MalformedError(ValueError):
    pass


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at``, and the place after it."""
    value = 0
    # Ten bytes hold 64 bits; a longer number is damage.
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise _MalformedError(f"no number at byte {at}")


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, value and bytes of every field; for fields of bytes the value is 0, for others the bytes are raw."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value, start = 0, at
        if wire == 0:
            value, end = _varint(data, at)
        elif wire in (1, 5):
            end = at + (8 if wire == 1 else 4)
        elif wire == 2:
            length, start = _varint(data, at)
            end = start + length
        else:
            raise _MalformedError(f"wire type {wire} of field {number}")
        if end > len(data):
            raise _MalformedError(f"field {number} goes beyond the message's end")
        yield number, value, data[start:end]
        at = end


def _add_event(data: bytes, points: Collected) -> None:
    step, summaries = 0, []
    for number, value, content in _fields(data):
        if number == 2:
            step = value - 2**64 if value >= 2**63 else value
        elif number == 5:
            summaries.append(content)
    for summary in summaries:
        for number, _, content in _fields(summary):
            if number == 1:
                _add_value(content, step, points)


def _add_value(data: bytes, step: int, points: Collected) -> None:
    tag, scalar = "", None
    for number, _, content in _fields(data):
        if number == 1:
            tag = content.decode()
        elif number == 2:
            scalar = struct.unpack("<f", content)[0]
        elif number == 8:
            scalar = _scalar(content)
    if scalar is not None:
        points.add(tag, step, scalar)


def _scalar(tensor: bytes) -> float | None:
    """The one number of a tensor without dimensions; None for other tensors, such as texts and histograms."""
    fields = list(_fields(tensor))
    dtype = next((value for number, value, _ in fields if number == 1), 0)
    shapes = [content for number, _, content in fields if number == 2]
    has_dimensions = any(number == 2 for shape in shapes for number, _, _ in _fields(shape))
    if dtype not in _TENSOR_DTYPES or has_dimensions:
        return None
    layout, values = _TENSOR_DTYPES[dtype]
    stored = b"".join(content for number, _, content in fields if number in (4, values))
    # Protobuf leaves out what is zero.
    number: float = struct.unpack(layout, stored)[0] if stored else 0.0
    return number
