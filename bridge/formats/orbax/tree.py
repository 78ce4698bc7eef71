"""The JSON half of an Orbax item: `_METADATA` says which leaves the tree has; arrays are stored by leaf name.

    path ("params", "layers", 0, "scale")      tree path: str = mapping key, int = list position
    name "params/layers/0/scale"               how this package calls the leaf
    key  "params.layers.0.scale"               how Orbax calls its array in the store

Neither name nor key can be split again (keys may contain "." and "/"), so paths are always taken from `_METADATA`.
Values that are no arrays ride in `_METADATA` under custom_metadata["twinshard"], where stock Orbax ignores them:

    {"objects": {"optimizer/param_groups/0/betas": {"__tuple__": [0.9, 0.95]}},
     "paths": {"optimizer/param_groups/0/betas": ["optimizer", "param_groups", 0, "betas"]}}

There "positions" gives the paths of arrays in lists that also hold other things: Orbax has only lists of arrays.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bridge.formats.base import MAX_NAME, TREE_PATH_KEYS, CheckpointError, TreePath, is_tree_path, is_unicode

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

_SEQUENCE, _MAPPING = 1, 2
_TUPLE = "__tuple__"
_BYTES = "__bytes__"
_FLOAT = "__float__"
_MAX_DEPTH = 64
_EXACT = frozenset({bool, int, float, str, list, tuple, dict})
_EMPTY: Mapping[str, object] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}


def leaf_name(path: TreePath) -> str:
    """The leaf's name in TensorInfo and `objects`: "params/layers/0/scale"."""
    return "/".join(map(str, path))


def storage_key(path: TreePath) -> str:
    """The leaf's array in the store: "params.layers.0.scale"."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class Tree:
    """`_METADATA`, checked. Each leaf of the checkpoint is in exactly one of `arrays`, `strings`, `objects`.

    strings: the values are in `_strings.json`. objects: empty containers, None, and this package's own objects.
    use_ocdbt: None where `_METADATA` does not say.
    """

    arrays: tuple[TreePath, ...]
    strings: tuple[TreePath, ...]
    objects: Mapping[TreePath, object]
    use_ocdbt: bool | None
    use_zarr3: bool


def parse_tree(data: object, what: str) -> Tree:
    """`_METADATA` from its parsed JSON; `what` names the file in errors. CheckpointError if it is malformed."""
    root = _mapping(data, what)
    arrays: list[TreePath] = []
    strings: list[TreePath] = []
    objects: dict[TreePath, object] = {}
    for entry in _mapping(root.get("tree_metadata"), f"{what}: tree_metadata").values():
        path = _parse_path(entry, what)
        value = _mapping(_mapping(entry, what).get("value_metadata"), f"{what}: leaf {leaf_name(path)!r}")
        kind = value.get("value_type")
        if value.get("skip_deserialize"):
            if not isinstance(kind, str) or kind not in _EMPTY:
                raise CheckpointError(
                    f"{what}: leaf {leaf_name(path)!r}: expected a value without data to be one of "
                    f"{', '.join(_EMPTY)}, got {str(kind)[:80]!r}"
                )
            objects[path] = _EMPTY[kind]
        elif kind == "string":
            strings.append(path)
        else:
            arrays.append(path)
    custom = root.get("custom_metadata")
    if isinstance(custom, dict) and "twinshard" in custom:
        own = f"{what}: custom_metadata['twinshard']"
        objects |= _parse_objects(custom["twinshard"], own)
        arrays = _at_their_positions(arrays, custom["twinshard"], own)
    claims = Claims(what)
    for path in (*arrays, *strings, *objects):
        _text(leaf_name(path), f"{what}: the name of a leaf")
        claims.add(path)
    use_ocdbt = root.get("use_ocdbt")
    return Tree(
        arrays=tuple(arrays),
        strings=tuple(strings),
        objects=objects,
        use_ocdbt=None if use_ocdbt is None else bool(use_ocdbt),
        use_zarr3=bool(root.get("use_zarr3", False)),
    )


def render_tree(arrays: Iterable[TreePath], objects: Mapping[TreePath, object]) -> Json:
    """The content of `_METADATA` for arrays stored as OCDBT and zarr3, all called NumPy arrays.

    Called jax.Array, they would need sharding files, and restoring would depend on the topology. None and empty
    containers that are beside arrays, such as the parts of an optax chain that hold nothing, are leaves of the tree as
    in stock Orbax, which compares structures when it restores.
    """
    paths = list(arrays)
    roots = {path[0] for path in paths}
    empty = {
        path: kind for path, value in objects.items() if path[0] in roots and (kind := _empty_kind(value))
    }
    paths += empty
    children: defaultdict[TreePath, set[str | int]] = defaultdict(set)
    for path in paths:
        for depth in range(len(path)):
            children[path[:depth]].add(path[depth])
    # A list position that has no predecessor (it is an object, say) makes stock Orbax fail: such lists become dicts.
    lists = {parent for parent, keys in children.items() if keys == set(range(len(keys)))}
    tree: dict[str, Json] = {}
    for path in paths:
        keys: list[Json] = [
            {"key": str(key), "key_type": _SEQUENCE if path[:depth] in lists else _MAPPING}
            for depth, key in enumerate(path)
        ]
        tree[str(tuple(map(str, path)))] = {
            "key_metadata": keys,
            "value_metadata": {
                "value_type": empty.get(path, "np.ndarray"),
                "skip_deserialize": path in empty,
            },
        }
    objects = {path: value for path, value in objects.items() if path not in empty}
    own: dict[str, Json] = _render_objects(objects) if objects else {}
    positions: dict[str, Json] = {
        leaf_name(path): [*path]
        for path in paths
        if any(isinstance(key, int) and path[:depth] not in lists for depth, key in enumerate(path))
    }
    if positions:
        own["positions"] = positions
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {"twinshard": own} if own else None,
    }


def _empty_kind(value: object) -> str | None:
    """The name that stock Orbax has for a value that holds nothing; None for other values."""
    if value is None:
        return "None"
    names: dict[type, str] = {dict: "Dict", list: "List", tuple: "Tuple"}
    return names.get(type(value)) if not value else None


class Claims:
    """The tree positions taken so far; refuses two leaves that any of a reader's views could not tell apart."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._names: dict[str, TreePath] = {}
        self._keys: dict[str, TreePath] = {}
        self._leaves: dict[tuple[str, ...], TreePath] = {}
        self._inner: dict[tuple[str, ...], TreePath] = {}

    def add(self, path: TreePath) -> None:
        """Claim a leaf. CheckpointError, naming both leaves, if it collides with an earlier one."""
        text = tuple(map(str, path))
        if not is_tree_path(path) or "" in text or text[-1].endswith("/"):
            raise CheckpointError(
                f"{self._what}: expected a leaf path of non-empty keys ({TREE_PATH_KEYS}), the last not ending in '/', "
                f"got {path!r:.80}"
            )
        if (length := len(leaf_name(path))) > MAX_NAME:
            raise CheckpointError(
                f"{self._what}: expected leaf names of at most {MAX_NAME} characters, got one of {length}: "
                f"{leaf_name(path)[:80]!r}..."
            )
        prefixes = [text[:depth] for depth in range(1, len(text))]
        other = (
            self._names.get(leaf_name(path))
            or self._keys.get(storage_key(path))
            or self._inner.get(text)
            or next((self._leaves[p] for p in prefixes if p in self._leaves), None)
        )
        if other is not None:
            raise CheckpointError(
                f"{self._what}: leaves {other} and {path} collide: Orbax stores leaf {path} as {storage_key(path)!r}, "
                "and every name must belong to one leaf. Rename one of them"
            )
        self._names[leaf_name(path)] = self._keys[storage_key(path)] = self._leaves[text] = path
        for prefix in prefixes:
            self._inner.setdefault(prefix, path)


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


def _decode_object(value: object, what: str, depth: int = 0) -> object:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{what}: expected at most {_MAX_DEPTH} levels of nesting, got more")
    if isinstance(value, list):
        return [_decode_object(item, what, depth + 1) for item in value]
    if isinstance(value, dict):
        items = value.get(_TUPLE)
        if len(value) == 1 and isinstance(items, list):
            return tuple(_decode_object(item, what, depth + 1) for item in items)
        if len(value) == 1 and isinstance(value.get(_BYTES), str):
            return _decode_bytes(value[_BYTES], what)
        if len(value) == 1 and isinstance(value.get(_FLOAT), str):
            return _decode_float(value[_FLOAT], what)
        return {_text(key, what): _decode_object(item, what, depth + 1) for key, item in value.items()}
    return _text(value, what) if isinstance(value, str) else value


def _text(value: str, what: str) -> str:
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


def _at_their_positions(arrays: list[TreePath], data: object, what: str) -> list[TreePath]:
    """Arrays of lists that are dicts in the tree, since something in them is no array, with their list positions."""
    positions = _mapping(_mapping(data, what).get("positions", {}), f"{what}: positions")
    found = []
    for path in arrays:
        own = positions.get(leaf_name(path), list(path))
        if not isinstance(own, list) or list(map(str, own)) != list(map(str, path)):
            raise CheckpointError(
                f"{what}: array {leaf_name(path)!r}: expected the positions of {path}, got {own!r:.80}"
            )
        found.append(tuple(own))
    return found


def _render_objects(objects: Mapping[TreePath, object]) -> dict[str, Json]:
    return {
        "objects": {leaf_name(p): encode_object(v, f"object {leaf_name(p)!r}") for p, v in objects.items()},
        "paths": {leaf_name(p): list(p) for p in objects},
    }


def _parse_objects(data: object, what: str) -> dict[TreePath, object]:
    root = _mapping(data, what)
    paths = _mapping(root.get("paths", {}), f"{what}: paths")
    found: dict[TreePath, object] = {}
    for name, value in _mapping(root.get("objects", {}), f"{what}: objects").items():
        path = paths.get(name, name.split("/"))
        if not isinstance(path, list) or not all(type(key) in (str, int) for key in path):
            raise CheckpointError(f"{what}: object {name!r}: expected a path of keys, got {path!r:.80}")
        found[tuple(path)] = _decode_object(value, f"{what}: object {name!r}")
    return found


def _parse_path(entry: object, what: str) -> TreePath:
    keys = _mapping(entry, f"{what}: tree_metadata").get("key_metadata")
    if not isinstance(keys, list) or not keys:
        raise CheckpointError(f"{what}: expected key_metadata to be a list of keys, got {keys!r:.80}")
    path: list[str | int] = []
    for key in keys:
        text, kind = (_mapping(key, f"{what}: key_metadata").get(field) for field in ("key", "key_type"))
        if not isinstance(text, str) or kind not in (_SEQUENCE, _MAPPING):
            raise CheckpointError(f"{what}: expected a key with key_type 1 or 2, got {key!r:.80}")
        if kind == _SEQUENCE and not re.fullmatch("0|[1-9][0-9]{0,17}", text):
            raise CheckpointError(f"{what}: expected a list position to be a number, got {text[:80]!r}")
        path.append(int(text) if kind == _SEQUENCE else text)
    return tuple(path)


def _mapping(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, got {type(value).__name__}")
    return value


def as_path(path: str | Sequence[str | int]) -> TreePath:
    """A tree path from itself, or from a name: "params/scale" -> ("params", "scale")."""
    return tuple(path.split("/")) if isinstance(path, str) else tuple(path)
