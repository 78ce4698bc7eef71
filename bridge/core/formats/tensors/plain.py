"""Plain values: a checkpoint's contents other than tensors, checked and copied.

None, bool, int, float, str, bytes, and list, tuple, dict of these. A small file may refer to one long text a million
times, and so describe terabytes: a copy counts at every place that refers to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.leaves import is_unicode

MAX_NODES = 1 << 20
PLAIN_VALUE = "expected None, bool, int, float, str, or list, tuple, dict of these"
_MAX_DEPTH = 32
_MAX_TEXT = 128 << 20
_MAX_INT_BYTES = 255  # the limit of a pickle's LONG1


@dataclass(frozen=True)
class Described:
    """The plain value that an object of another type stands for."""

    value: object


def _type_name(node: object) -> bytes | str | Described:
    return type(node).__name__


def plain_value(
    value: object,
    what: str,
    *,
    binary: bool = False,
    foreign: Callable[[object], bytes | str | Described] = _type_name,
) -> object:
    """A deep copy made of None, bool, int, float, str, bytes, list, tuple and dict (keys str, int, bool, None) only.

    binary: whether bytes are allowed. foreign: for an object of another type, gives the bytes or the value that it
    describes, or its name for errors. CheckpointError, beginning with `what`, for anything else, for trees deeper than
    32 or above a million nodes, for more than 128 MiB of text and bytes, for integers above 255 bytes and for text that
    is not valid Unicode.
    """
    budget, letters = MAX_NODES, _MAX_TEXT
    described: dict[int, bytes | str | Described] = {}

    def counted(text: str | bytes) -> str | bytes:
        nonlocal letters
        letters -= len(text)
        if letters < 0:
            raise CheckpointError(f"{what}: expected at most {_MAX_TEXT} characters and bytes, got more")
        return text

    def copy(node: object, depth: int) -> object:
        nonlocal budget
        budget -= 1
        if budget < 0 or depth > _MAX_DEPTH:
            raise CheckpointError(
                f"{what}: expected at most {MAX_NODES} values, nested {_MAX_DEPTH} deep, got more"
            )
        node_type = type(node)
        if node is None or node_type in (bool, float):
            return node
        if isinstance(node, int) and node_type is int and node.bit_length() < 8 * _MAX_INT_BYTES:
            return node
        if isinstance(node, str) and node_type is str and is_unicode(node):
            return counted(node)
        if binary and isinstance(node, bytes) and node_type is bytes:
            return counted(node)
        if isinstance(node, list) and node_type is list:
            return [copy(item, depth + 1) for item in node]
        if isinstance(node, tuple) and node_type is tuple:
            return tuple([copy(item, depth + 1) for item in node])
        if isinstance(node, dict) and node_type is dict:
            for key in node:
                if type(key) not in (str, int, bool, type(None)):
                    raise CheckpointError(
                        f"{what}: expected dict keys that are str or int, got {type(key).__name__}"
                    )
            return {copy(key, depth + 1): copy(item, depth + 1) for key, item in node.items()}
        # Decoded once for all places that refer to the object: there may be a million places.
        description = described[id(node)] = described.get(id(node)) or foreign(node)
        if isinstance(description, bytes):
            return counted(description)
        if isinstance(description, Described):
            return copy(description.value, depth + 1)
        raise CheckpointError(f"{what}: {PLAIN_VALUE}, got {description}")

    return copy(value, 0)
