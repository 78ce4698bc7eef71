"""Leaves of a tree: their names and paths, and their special kinds.

"model.layers.0.w"   DCP, safetensors, torch.save      "model/layers/0/w"   Orbax, NumPy, flax

Kinds of leaves in a JAX tree that other formats cannot express:

    key<rbg>                               a typed PRNG key, stored as the uint32 data of `jax.random.key_data`
    scalar                                 a Python number, stored as an array without dimensions
    string                                 text that is a leaf of the tree
    None, Dict, List, Tuple, NamedTuple    None, and containers without leaves: a part of the tree's structure

An Orbax checkpoint records the kind with each leaf. Elsewhere an object records the kinds by name, and tells a
conversion to Orbax what to make of the leaves:

    twinshard.leaves = {"rngs.dropout": "key<rbg>", "ema": "None", "step": "scalar"}

None and empty containers below a top-level key that also has arrays are leaves of the tree even without a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Final

from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader, TreePath

MAX_NAME = 4096
"""The most characters in the name of a tensor or object, in all formats."""

_MAX_DEPTH = 256
TREE_PATH_KEYS = f"1 to {_MAX_DEPTH} keys, text or list positions from 0 to 2**63 - 1"
"""How errors describe the paths that `is_tree_path` accepts."""


def is_tree_path(keys: Sequence[object]) -> bool:
    """Whether these keys can be a leaf's path in all formats: see `TREE_PATH_KEYS`."""
    if not 0 < len(keys) <= _MAX_DEPTH:
        return False
    return set(map(type, keys)) == {str} or all(
        type(key) is str or (type(key) is int and 0 <= key < 1 << 63) for key in keys
    )


def is_unicode(text: str) -> bool:
    """Whether files can store this text: a lone surrogate, which JSON and Python can express, is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


TREE_FORMATS = frozenset({"orbax", "npz", "msgpack"})
"""Formats whose names join the keys of a path by "/"; other formats use "."."""


def separator_of(format: str) -> str:
    """The separator of a path's keys in the names of a format."""
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


LEAVES: Final[TreePath] = ("twinshard", "leaves")
SCALAR: Final = "scalar"
STRING: Final = "string"
EMPTY: Final[Mapping[str, object]] = MappingProxyType(
    {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
)
"""The values of the kinds that have no data, by kind."""

_KEY: Final = re.compile(r"key<(.+)>", re.DOTALL)


def key_kind(implementation: str) -> str:
    """The kind of a typed PRNG key of this implementation: "rbg" -> "key<rbg>"."""
    return f"key<{implementation}>"


def key_implementation(leaf_kind: str | None) -> str | None:
    """The inverse of `key_kind`; None for other kinds, or no kind."""
    match = _KEY.fullmatch(leaf_kind or "")
    return match and match[1]


def empty_kind(value: object) -> str | None:
    """The kind of an empty value; None for other values."""
    if value is None:
        return "None"
    names: dict[type, str] = {dict: "Dict", list: "List", tuple: "Tuple"}
    return names.get(type(value)) if not value else None


def is_kind_of(leaf_kind: str | None, value: object) -> bool:
    """Whether an object may be a leaf of this kind in a tree."""
    if leaf_kind == STRING:
        return type(value) is str
    return (
        leaf_kind is not None and leaf_kind in EMPTY and type(value) is type(EMPTY[leaf_kind]) and not value
    )


def implied_kinds(arrays: Iterable[TreePath], objects: Mapping[TreePath, object]) -> dict[TreePath, str]:
    """The kinds of objects that are leaves even without a note, such as the empty parts of an optax chain.

    arrays: the paths of all tensors.
    """
    roots = {path[0] for path in arrays}
    return {
        path: leaf_kind
        for path, value in objects.items()
        if path[0] in roots and path != LEAVES and (leaf_kind := empty_kind(value)) is not None
    }


def kinds_of(reader: CheckpointReader) -> Mapping[str, str]:
    """The kinds of tensors and objects by name, from the checkpoint's format or from an object that notes them."""
    own: Mapping[str, str] | None = getattr(reader, "kinds", None)
    if own is not None:
        return own
    name = next((name for name, path in reader.object_paths.items() if path == LEAVES), None)
    noted = None if name is None else reader.objects[name]
    if not isinstance(noted, dict):
        return {}
    return {str(name): leaf_kind for name, leaf_kind in noted.items() if isinstance(leaf_kind, str)}


def key_types(reader: CheckpointReader) -> dict[str, str]:
    """The implementations of typed PRNG keys, by the names of the uint32 tensors with their data."""
    implementations = {name: key_implementation(leaf_kind) for name, leaf_kind in kinds_of(reader).items()}
    return {
        name: leaf_kind
        for name, leaf_kind in implementations.items()
        if leaf_kind is not None and name in reader.tensors
    }


def tree_kinds(reader: CheckpointReader) -> dict[str, str]:
    """The kinds of all leaves of the tree, by name, including implied ones."""
    paths = {path: name for name, path in reader.object_paths.items()}
    values = {}
    for path, name in paths.items():
        # A value that cannot be read is not an empty container.
        with suppress(CheckpointError):
            values[path] = reader.objects[name]
    implied = implied_kinds((info.path for info in reader.tensors.values()), values)
    return {paths[path]: leaf_kind for path, leaf_kind in implied.items()} | dict(kinds_of(reader))
