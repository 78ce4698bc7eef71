"""The JSON half of an Orbax item: `_METADATA` says which leaves the tree has; arrays are stored by leaf name.

    path ("params", "layers", 0, "scale")      tree path: str = mapping key, int = list position
    name "params/layers/0/scale"               this package's name for the leaf
    key  "params.layers.0.scale"               Orbax's name for its array in the store

Neither name nor key can be split again (keys may contain "." and "/"), so paths are always taken from `_METADATA`.
Values that are not arrays are stored in `_METADATA` under custom_metadata["twinshard"], where stock Orbax ignores them:

    {"objects": {"optimizer/param_groups/0/betas": {"__tuple__": [0.9, 0.95]}},
     "paths": {"optimizer/param_groups/0/betas": ["optimizer", "param_groups", 0, "betas"]}}

A type that JSON lacks is an object with one key: {"__tuple__": [0.9, 0.95]}, {"__bytes__": ...}, {"__float__": ...}.
There, "positions" gives the paths of leaves in lists that also contain other things: Orbax has only lists of leaves.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from bridge.core.formats.tensors.base import CheckpointError, TreePath
from bridge.core.formats.tensors.leaves import (
    EMPTY,
    MAX_NAME,
    SCALAR,
    STRING,
    TREE_PATH_KEYS,
    implied_kinds,
    is_kind_of,
    is_tree_path,
    is_unicode,
)

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
    # Exact types: a NumPy float or a named tuple is a subclass, and would be read back as a different type.
    exact = type(value) in _EXACT
    if type(value) is float and not math.isfinite(value):
        # JSON has no such numbers, and would not distinguish one NaN from another.
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
    """The inverse of `encode_object`. CheckpointError, beginning with `what`, for values that it cannot have made."""
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
    # JSON may contain half of a surrogate pair, which no file can store as text.
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


SEQUENCE, MAPPING = 1, 2
"""The type of a path's key in `_METADATA`."""


def leaf_name(path: TreePath) -> str:
    """The leaf's name in TensorInfo and `objects`: "params/layers/0/scale"."""
    return "/".join(map(str, path))


def storage_key(path: TreePath) -> str:
    """The leaf's array in the store: "params.layers.0.scale"."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Tree:
    """`_METADATA`, checked. Each leaf of the checkpoint is in exactly one of `arrays`, `strings`, `objects`.

    strings: the values are in `_strings.json`. objects: empty containers, None, and this package's own objects. kinds:
    special types of leaves, see `tensors/leaves.py`. use_ocdbt: None if `_METADATA` does not say. keys: of arrays in
    the store, by path, if they are not the path's `storage_key`.
    """

    arrays: tuple[TreePath, ...]
    strings: tuple[TreePath, ...]
    objects: Mapping[TreePath, object]
    kinds: Mapping[TreePath, str]
    use_ocdbt: bool | None
    use_zarr3: bool
    keys: Mapping[TreePath, str] = field(default_factory=dict)


def parse_tree(data: object, what: str) -> Tree:
    """`_METADATA` from its parsed JSON; `what` names the file in errors. CheckpointError if it is malformed."""
    root = _mapping(data, what)
    arrays: list[TreePath] = []
    strings: list[TreePath] = []
    objects: dict[TreePath, object] = {}
    kinds: dict[TreePath, str] = {}
    for entry in _mapping(root.get("tree_metadata"), what, "tree_metadata").values():
        fields = _mapping(entry, what, "tree_metadata")
        path = _parse_path(fields, what)
        value = fields.get("value_metadata")
        if not isinstance(value, dict):
            value = _mapping(value, f"{what}: leaf {leaf_name(path)!r}")
        value_type = value.get("value_type")
        if value.get("skip_deserialize"):
            if not isinstance(value_type, str) or value_type not in EMPTY:
                raise CheckpointError(
                    f"{what}: leaf {leaf_name(path)!r}: expected a value without data to be one of "
                    f"{', '.join(EMPTY)}, got {str(value_type)[:80]!r}"
                )
            objects[path] = EMPTY[value_type]
            kinds[path] = value_type
        elif value_type == STRING:
            strings.append(path)
            kinds[path] = STRING
        else:
            arrays.append(path)
            if value_type == SCALAR:
                kinds[path] = SCALAR
    custom = root.get("custom_metadata")
    if isinstance(custom, dict) and "twinshard" in custom:
        own = f"{what}: custom_metadata['twinshard']"
        at = _own_positions((*arrays, *strings, *objects), custom["twinshard"], own)
        arrays, strings = [at[path] for path in arrays], [at[path] for path in strings]
        objects = {at[path]: value for path, value in objects.items()}
        kinds = {at[path]: value_type for path, value_type in kinds.items()}
        objects |= _parse_objects(custom["twinshard"], own)
    leaves = (*arrays, *strings, *objects)
    # Checking one by one takes four times as long, and is needed only to name the refused leaf.
    if not can_claim_all(leaves):
        claims = Claims(what)
        for path in leaves:
            require_unicode(leaf_name(path), f"{what}: the name of a leaf")
            claims.add(path)
    use_ocdbt = root.get("use_ocdbt")
    return Tree(
        arrays=tuple(arrays),
        strings=tuple(strings),
        objects=objects,
        kinds=kinds,
        use_ocdbt=None if use_ocdbt is None else bool(use_ocdbt),
        use_zarr3=bool(root.get("use_zarr3", False)),
    )


def leaves_of(
    arrays: Iterable[TreePath], objects: Mapping[TreePath, object], kinds: Mapping[TreePath, str]
) -> dict[TreePath, str]:
    """The objects that are leaves of the tree, and stock Orbax's names for their types.

    kinds: see `tensors/leaves.py`.
    """
    told = {path: kinds[path] for path, value in objects.items() if is_kind_of(kinds.get(path), value)}
    return implied_kinds(arrays, objects) | told


class Claims:
    """The tree positions taken so far; refuses two leaves that some view of a reader could not distinguish."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._names: dict[str, TreePath] = {}
        self._keys: dict[str, TreePath] = {}
        self._leaves: dict[tuple[str, ...], TreePath] = {}
        self._inner: dict[tuple[str, ...], TreePath] = {}

    def add(self, path: TreePath) -> None:
        """Claim a leaf. CheckpointError, naming both leaves, if it collides with an earlier one."""
        text = tuple(map(str, path))
        name, stored = "/".join(text), ".".join(text)
        if not is_tree_path(path) or "" in text or text[-1].endswith("/"):
            raise CheckpointError(
                f"{self._what}: expected a leaf path of non-empty keys ({TREE_PATH_KEYS}), the last not ending in '/', "
                f"got {path!r:.80}"
            )
        if (length := len(name)) > MAX_NAME:
            raise CheckpointError(
                f"{self._what}: expected leaf names of at most {MAX_NAME} characters, got one of {length}: "
                f"{name[:80]!r}..."
            )
        # Below a parent of earlier leaves, no position above is new: with a leaf there, those would have been refused.
        new = () if text[:-1] in self._inner else [text[:depth] for depth in range(1, len(text))]
        other = (
            self._names.get(name)
            or self._keys.get(stored)
            or self._inner.get(text)
            or next((self._leaves[p] for p in new if p in self._leaves), None)
        )
        if other is not None:
            raise CheckpointError(
                f"{self._what}: leaves {other} and {path} collide: Orbax stores leaf {path} as {stored!r}, "
                "and every name must belong to one leaf. Rename one of them"
            )
        self._names[name] = self._keys[stored] = self._leaves[text] = path
        for prefix in new:
            self._inner.setdefault(prefix, path)


def can_claim_all(paths: Sequence[TreePath]) -> bool:
    """Whether `Claims` would accept all of these leaves, and their names are Unicode."""
    if not all(map(is_tree_path, paths)):
        return False
    texts = [tuple(map(str, path)) for path in paths]
    names = list(map("/".join, texts))
    if "" in set(chain.from_iterable(texts)) or not is_unicode("".join(names)):
        return False
    if [name for name in names if len(name) > MAX_NAME or name.endswith("/")]:
        return False
    inner: set[tuple[str, ...]] = set()
    parents = {text[:-1] for text in texts}
    while parents:
        inner |= parents
        parents = {parent[:-1] for parent in parents if parent}
    distinct = len(set(names)) == len(set(map(".".join, texts))) == len(texts)
    return distinct and inner.isdisjoint(texts)


def _own_positions(leaves: Iterable[TreePath], data: object, what: str) -> dict[TreePath, TreePath]:
    """Leaves, with their list positions, of lists that are stored as dicts because some element is not a leaf."""
    positions = _mapping(_mapping(data, what).get("positions", {}), f"{what}: positions")
    own_paths: dict[TreePath, TreePath] = {}
    for path in leaves:
        own = positions.get(leaf_name(path), list(path))
        if not isinstance(own, list) or list(map(str, own)) != list(map(str, path)):
            raise CheckpointError(
                f"{what}: leaf {leaf_name(path)!r}: expected the positions of {path}, got {own!r:.80}"
            )
        own_paths[path] = tuple(own)
    return own_paths


def _parse_objects(data: object, what: str) -> dict[TreePath, object]:
    root = _mapping(data, what)
    paths = _mapping(root.get("paths", {}), f"{what}: paths")
    values: dict[TreePath, object] = {}
    for name, value in _mapping(root.get("objects", {}), f"{what}: objects").items():
        path = paths.get(name, name.split("/"))
        if not isinstance(path, list) or not all(type(key) in (str, int) for key in path):
            raise CheckpointError(f"{what}: object {name!r}: expected a path of keys, got {path!r:.80}")
        values[tuple(path)] = decode_object(value, f"{what}: object {name!r}")
    return values


def _parse_path(entry: Mapping[str, object], what: str) -> TreePath:
    keys = entry.get("key_metadata")
    if not isinstance(keys, list) or not keys:
        raise CheckpointError(f"{what}: expected key_metadata to be a list of keys, got {keys!r:.80}")
    path: list[str | int] = []
    for key in keys:
        fields = _mapping(key, what, "key_metadata")
        text, key_type = fields.get("key"), fields.get("key_type")
        if isinstance(text, str) and key_type == MAPPING:
            path.append(text)
            continue
        if not isinstance(text, str) or key_type not in (SEQUENCE, MAPPING):
            raise CheckpointError(f"{what}: expected a key with key_type 1 or 2, got {key!r:.80}")
        if not re.fullmatch("0|[1-9][0-9]{0,17}", text):
            raise CheckpointError(f"{what}: expected a list position to be a number, got {text[:80]!r}")
        path.append(int(text))
    return tuple(path)


def _mapping(value: object, *what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{': '.join(what)}: expected a JSON object, got {type(value).__name__}")
    return value


def as_path(path: str | Sequence[str | int]) -> TreePath:
    """A tree path from itself, or from a name: "params/scale" -> ("params", "scale")."""
    return tuple(path.split("/")) if isinstance(path, str) else tuple(path)
