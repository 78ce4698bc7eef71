"""Values that are no arrays as JSON, in the metadata of an Orbax checkpoint.

What JSON lacks is an object with one key: {"__tuple__": [0.9, 0.95]}, {"__bytes__": ...}, {"__float__": ...}.
"""

from __future__ import annotations

import base64
import math
import struct
from typing import TypeAlias

from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.leaf_names import is_unicode

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

_TUPLE = "__tuple__"
_BYTES = "__bytes__"
_FLOAT = "__float__"
_MAX_DEPTH = 64
_EXACT = frozenset({bool, int, float, str, list, tuple, dict})


def encode_object(value: object, what: str, depth: int = 0) -> Json:
    """JSON for None, bool, int, float, str, bytes, and lists, tuples and str-keyed dicts of them, at most 64 deep.

    CheckpointError, naming `what`, for anything else: nothing is converted silently.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{what}: expected at most {_MAX_DEPTH} levels of nesting, got more")
    # Exact types: a NumPy float or a named tuple is a subclass that would come back as something else.
    exact = type(value) in _EXACT
    if type(value) is float and not math.isfinite(value):
        # JSON has no such numbers, and would not tell one NaN from another.
        return {_FLOAT: struct.pack(">d", value).hex()}
    if value is None or (exact and isinstance(value, bool | int | float | str)):
        return value
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode()}
    if exact and isinstance(value, list | tuple):
        items: list[Json] = [encode_object(item, what, depth + 1) for item in value]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if (
        exact
        and isinstance(value, dict)
        and value.keys().isdisjoint((_TUPLE, _BYTES, _FLOAT))
        and all(type(key) is str for key in value)
    ):
        return {key: encode_object(item, what, depth + 1) for key, item in value.items()}
    raise CheckpointError(
        f"{what}: expected None, bool, int, float, str, bytes, or a list, tuple or dict with str keys of these, "
        f"got {type(value).__name__} {value!r:.80}"
    )


def decode_object(value: object, what: str, depth: int = 0) -> object:
    """The inverse of `encode_object`. CheckpointError, beginning with `what`, for what it cannot have made."""
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{what}: expected at most {_MAX_DEPTH} levels of nesting, got more")
    if isinstance(value, list):
        return [decode_object(item, what, depth + 1) for item in value]
    if isinstance(value, dict):
        items = value.get(_TUPLE)
        if len(value) == 1 and isinstance(items, list):
            return tuple(decode_object(item, what, depth + 1) for item in items)
        if len(value) == 1 and isinstance(value.get(_BYTES), str):
            return _decode_bytes(value[_BYTES], what)
        if len(value) == 1 and isinstance(value.get(_FLOAT), str):
            return _decode_float(value[_FLOAT], what)
        return {
            require_unicode(key, what): decode_object(item, what, depth + 1) for key, item in value.items()
        }
    return require_unicode(value, what) if isinstance(value, str) else value


def require_unicode(value: str, what: str) -> str:
    """The text itself; CheckpointError, beginning with `what`, for text that is not Unicode."""
    # JSON may escape half a character alone, which no file can be given.
    if not is_unicode(value):
        raise CheckpointError(f"{what}: expected Unicode text, got {value!r:.80}")
    return value


def _decode_bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise CheckpointError(f"{what}: expected bytes in base 64, got something else: {error}") from error


def _decode_float(text: str, what: str) -> float:
    try:
        return float(struct.unpack(">d", bytes.fromhex(text))[0])
    except (ValueError, struct.error) as error:
        raise CheckpointError(
            f"{what}: expected a float as 16 hexadecimal digits, got {text[:80]!r}"
        ) from error
