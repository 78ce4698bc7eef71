"""What leaves of a JAX tree are beyond arrays and values, which other formats have no place for.

    key<rbg>                               a typed PRNG key; stored is the uint32 data of `jax.random.key_data`
    scalar                                 a number of Python, stored as an array without dimensions
    string                                 text that is a leaf of the tree
    None, Dict, List, Tuple, NamedTuple    None, and containers without leaves: a part of the tree's structure

An Orbax checkpoint says so beside each leaf. Elsewhere these are an object, by name, which dictates what a conversion
to Orbax makes of the leaf:

    twinshard.leaves = {"rngs.dropout": "key<rbg>", "ema": "None", "step": "scalar"}

None and empty containers below a top-level key that also has arrays are leaves of the tree without being noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Final

from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader, TreePath

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


def key_implementation(kind: str | None) -> str | None:
    """The inverse of `key_kind`; None for another kind, or none."""
    found = _KEY.fullmatch(kind or "")
    return found and found[1]


def empty_kind(value: object) -> str | None:
    """The kind of a value that holds nothing; None for other values."""
    if value is None:
        return "None"
    names: dict[type, str] = {dict: "Dict", list: "List", tuple: "Tuple"}
    return names.get(type(value)) if not value else None


def is_kind_of(kind: str | None, value: object) -> bool:
    """Whether an object may be a leaf of this kind in a tree."""
    if kind == STRING:
        return type(value) is str
    return kind is not None and kind in EMPTY and type(value) is type(EMPTY[kind]) and not value


def implied_kinds(arrays: Iterable[TreePath], objects: Mapping[TreePath, object]) -> dict[TreePath, str]:
    """The kinds of objects that are leaves of the tree without being noted, such as the empty parts of an optax chain.

    arrays: the paths of all tensors.
    """
    roots = {path[0] for path in arrays}
    return {
        path: kind
        for path, value in objects.items()
        if path[0] in roots and path != LEAVES and (kind := empty_kind(value)) is not None
    }


def kinds_of(reader: CheckpointReader) -> Mapping[str, str]:
    """The kinds of tensors and objects by name, as the checkpoint's format says or as an object notes them."""
    own: Mapping[str, str] | None = getattr(reader, "kinds", None)
    if own is not None:
        return own
    name = next((name for name, path in reader.object_paths.items() if path == LEAVES), None)
    noted = None if name is None else reader.objects[name]
    if not isinstance(noted, dict):
        return {}
    return {str(name): kind for name, kind in noted.items() if isinstance(kind, str)}


def key_types(reader: CheckpointReader) -> dict[str, str]:
    """The implementations of typed PRNG keys by the names of the tensors of uint32 that hold their data."""
    found = {name: key_implementation(kind) for name, kind in kinds_of(reader).items()}
    return {name: kind for name, kind in found.items() if kind is not None and name in reader.tensors}


def tree_kinds(reader: CheckpointReader) -> dict[str, str]:
    """The kinds of all leaves of the tree, by name, those that are implied among them."""
    paths = {path: name for name, path in reader.object_paths.items()}
    values = {}
    for path, name in paths.items():
        # A value that cannot be read is no empty container.
        with suppress(CheckpointError):
            values[path] = reader.objects[name]
    implied = implied_kinds((info.path for info in reader.tensors.values()), values)
    return {paths[path]: kind for path, kind in implied.items()} | dict(kinds_of(reader))
