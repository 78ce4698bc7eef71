"""Sizes of axes from the `config.json` that Hugging Face keeps beside the weights.

    [config]
    d = ["head_dim", "hidden_size / num_attention_heads"]      # the first whose fields are there

They are used where neither the caller nor the mapping's [axes] gives a size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from bridge.formats.base import CheckpointError, CheckpointReader
from bridge.formats.files.mapped import small_file
from bridge.formats.stores.reader import StoredReader
from bridge.mapping.errors import MappingError
from bridge.mapping.rules import MappingTable

CONFIG_FILE = "config.json"
_MAX_BYTES = 1 << 20
_QUOTIENT = re.compile(r"\s*(\w+)\s*(?:/\s*(\w+)\s*)?")


def with_config(table: MappingTable, reader: CheckpointReader) -> MappingTable:
    """The table with the sizes that a `config.json` beside the checkpoint gives, if there is one.

    CheckpointError when it cannot be read, MappingError when its numbers are no sizes.
    """
    if not table.config.keys() - table.axes.keys():
        return table
    home = reader.home if isinstance(reader, StoredReader) else Path(reader.path)
    directory = home if home.is_dir() else home.parent
    if not (directory / CONFIG_FILE).exists():
        return table
    file = directory / CONFIG_FILE
    data = small_file(directory, CONFIG_FILE, "the configuration of the model", most=_MAX_BYTES)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected JSON: {error!s:.200}") from error
    fields = config if isinstance(config, dict) else {}
    sizes = {}
    for axis in table.config.keys() - table.axes.keys():
        found = (_value(text, fields, str(file)) for text in table.config[axis])
        size_ = next((value for value in found if value is not None), None)
        if size_ is not None:
            sizes[axis] = size_
    return table.with_axes(sizes)


def _value(text: str, fields: Mapping[str, object], file: str) -> int | None:
    """The number that a field or a quotient of two gives; None where one is missing, or null."""
    match = _QUOTIENT.fullmatch(text)
    if match is None:
        raise MappingError(
            f"expected a field of {CONFIG_FILE} or a quotient of two such as 'hidden_size / num_heads', got {text!r}"
        )
    numbers = [fields.get(name) for name in match.groups() if name is not None]
    if None in numbers:
        return None
    if not all(type(number) is int and number > 0 for number in numbers):
        raise MappingError(f"{file}: expected positive integers for {text!r}, got {numbers}")
    over, under = (*numbers, 1)[:2]
    assert isinstance(over, int)
    assert isinstance(under, int)
    if over % under:
        raise MappingError(f"{file}: expected {text!r} to be an integer, got {over} / {under}")
    return over // under
