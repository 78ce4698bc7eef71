"""Text that is a leaf of the tree, in `_strings.json`: a JSON object in which tensorstore's JSON driver looks it up.

{"name": "run", "a": {"b.c": "text"}}      by JSON pointer: leaf ("a/b", "c") is at "/a/b.c"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bridge.core.formats.orbax.objects import Json
from bridge.core.formats.orbax.tree import leaf_name, storage_key
from bridge.core.formats.tensors.base import CheckpointError, TreePath
from bridge.core.formats.tensors.leaf_names import is_unicode

STRINGS_FILE = "_strings.json"


def find_strings(content: object, paths: Iterable[TreePath], what: str) -> dict[TreePath, str]:
    """The texts of these leaves. CheckpointError, beginning with `what`, for one that is not there."""
    found: dict[TreePath, str] = {}
    for path in paths:
        value = content
        for token in _pointer(path):
            value = value.get(token) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise CheckpointError(f"{what}: expected a string for {leaf_name(path)!r}, found none")
        if not is_unicode(value):
            raise CheckpointError(f"{what}: expected Unicode text for {leaf_name(path)!r}, got {value!r:.80}")
        found[path] = value
    return found


def render_strings(strings: Mapping[TreePath, str], what: str) -> Json:
    """The content of the file. CheckpointError, beginning with `what`, for a leaf in the place of another."""
    content: dict[str, Json] = {}
    for path, text in strings.items():
        place = content
        *parents, last = _pointer(path)
        for token in parents:
            below = place.setdefault(token, {})
            if not isinstance(below, dict):
                break
            place = below
        else:
            if last not in place:
                place[last] = text
                continue
        raise CheckpointError(
            f"{what}: leaf {leaf_name(path)!r}: expected a name whose place in {STRINGS_FILE} is free, but a part of "
            "it up to a '/' is the name of another text: rename one of them"
        )
    return content


def _pointer(path: TreePath) -> list[str]:
    # Orbax takes the name as it is for a pointer, in which "~" is a mark.
    return [token.replace("~1", "/").replace("~0", "~") for token in storage_key(path).split("/")]
