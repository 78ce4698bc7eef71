"""Names and tree paths of leaves: which ones all formats can hold, and how the keys of a path make a name.

"model.layers.0.w"   DCP, safetensors, torch.save      "model/layers/0/w"   Orbax, NumPy, flax
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge.core.formats.tensors.base import CheckpointError, TreePath

MAX_NAME = 4096
"""Characters of a tensor's or object's name, in all formats."""

_MAX_DEPTH = 256
TREE_PATH_KEYS = f"1 to {_MAX_DEPTH} keys, text or list positions from 0 to 2**63 - 1"
"""How errors describe the paths that `is_tree_path` accepts."""


def is_tree_path(keys: Sequence[object]) -> bool:
    """Whether these can be a leaf's path in all formats: see `TREE_PATH_KEYS`."""
    if not 0 < len(keys) <= _MAX_DEPTH:
        return False
    return set(map(type, keys)) == {str} or all(
        type(key) is str or (type(key) is int and 0 <= key < 1 << 63) for key in keys
    )


def is_unicode(text: str) -> bool:
    """Whether files can hold this text: a lone surrogate, which JSON and Python can express, is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


TREE_FORMATS = frozenset({"orbax", "npz", "msgpack"})
"""Formats whose names join the keys of a path by "/"; the others join them by "."."""


def separator_of(format: str) -> str:
    """What joins the keys of a path in the names of a format."""
    return "/" if format in TREE_FORMATS else "."


def flat_name(path: str | Sequence[str | int]) -> tuple[str, TreePath]:
    """The name of a tree path in formats whose names join it by ".", and the path.

    CheckpointError for an empty path, keys that are neither text nor list positions, text that is not Unicode,
    and names above MAX_NAME characters.
    """
    parts: TreePath = (path,) if isinstance(path, str) else tuple(path)
    if not is_tree_path(parts):
        raise CheckpointError(f"expected a name or a path of {TREE_PATH_KEYS}, got {parts!r:.80}")
    name = ".".join(map(str, parts))
    if not is_unicode(name):
        raise CheckpointError(f"expected a name of Unicode characters, got {name!r}")
    if len(name) > MAX_NAME:
        raise CheckpointError(
            f"expected a name of at most {MAX_NAME} characters, got one of {len(name)}: {name[:80]!r}..."
        )
    return name, parts
