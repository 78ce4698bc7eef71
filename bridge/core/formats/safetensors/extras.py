"""Data that has no place in a safetensors file, stored as text in its header: values and tree paths.

    "__metadata__": {"format": "pt", "twinshard": "{\"paths\": {\"a.b\": [\"a\", \"b\"]}, \"objects\": {...}}"}

A tensor with path ("a", "b") is named "a.b", the name that other programs expect; "paths" keeps the difference. Values
are JSON. A type that JSON lacks is an object with the one key $tuple, $bytes, $float or $dict.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bridge.core.formats.tensors.base import CheckpointError, TreePath
from bridge.core.formats.tensors.leaves import TREE_PATH_KEYS, is_tree_path
from bridge.core.formats.tensors.plain import plain_value

EXTRAS_KEY: Final = "twinshard"


@dataclass(frozen=True)
class Extras:
    """paths: paths of tensors whose path is not just their name. objects: values by name, each with its path."""

    paths: Mapping[str, TreePath] = field(default_factory=dict)
    objects: Mapping[str, tuple[TreePath, object]] = field(default_factory=dict)


def format_extras(extras: Extras) -> str:
    """The text for `EXTRAS_KEY`. CheckpointError, naming it, for a value that is not plain."""
    objects = {
        name: {"path": path, "value": encode_value(value, f"object {name!r}")}
        for name, (path, value) in extras.objects.items()
    }
    return json.dumps({"paths": extras.paths, "objects": objects}, separators=(",", ":"))


def parse_extras(text: str, what: str) -> Extras:
    """The inverse of `format_extras`. CheckpointError, beginning with `what`, for anything else."""
    try:
        content: Any = json.loads(text)
        return Extras(
            {str(name): _path(path) for name, path in content["paths"].items()},
            {
                str(name): (
                    _path(entry["path"]),
                    decode_value(entry["value"], f"{what}: object {name!r:.200}"),
                )
                for name, entry in content["objects"].items()
            },
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{what}: malformed {EXTRAS_KEY!r} entry: {error!r:.200}") from error


def encode_value(value: object, what: str) -> object:
    """A plain value as JSON: None, bool, int, float, str, bytes, and list, tuple, dict of these.

    CheckpointError, beginning with `what`, for anything else (NumPy scalars included).
    """
    return _encode(plain_value(value, what, binary=True))


def _encode(value: object) -> object:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encode(item) for key, item in value.items()}
        return {"$dict": [[key, _encode(item)] for key, item in value.items()]}
    return value


def decode_value(value: object, what: str) -> object:
    """The inverse of `encode_value`. CheckpointError, beginning with `what`, for anything else."""
    try:
        return _decode(value)
    except (ValueError, TypeError, LookupError, struct.error) as error:
        raise CheckpointError(f"{what}: malformed value: {error!r:.200}") from error


def _decode(value: Any) -> object:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        ((tag, content),) = value.items()
        if tag == "$tuple":
            return tuple([_decode(item) for item in content])
        if tag == "$bytes":
            return base64.b64decode(content, validate=True)
        if tag == "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if tag == "$dict":
            return {key: _decode(item) for key, item in content}
        raise ValueError(f"unknown kind {tag!r:.80}")
    return {key: _decode(item) for key, item in value.items()}


def _path(value: Any) -> TreePath:
    if not isinstance(value, list) or not is_tree_path(value):
        raise ValueError(f"expected a path of {TREE_PATH_KEYS}")
    return tuple(value)
