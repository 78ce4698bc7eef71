"""Writes `_METADATA`, the JSON half of an Orbax item; see `tree.py`, which reads it.

As text, leaf by leaf: of thousands of leaves most have the parent of the one before, whose keys are text already.
Making objects of all leaves first, for `json.dumps`, takes three times as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from json.encoder import encode_basestring_ascii as quoted

from bridge.core.formats.orbax.objects import Json, encode_object
from bridge.core.formats.orbax.tree import MAPPING, SEQUENCE, leaf_name, leaves_of
from bridge.core.formats.tensors.base import TreePath
from bridge.core.formats.tensors.leaf_kinds import EMPTY, SCALAR, key_implementation


def render_tree(
    arrays: Iterable[TreePath], objects: Mapping[TreePath, object], kinds: Mapping[TreePath, str]
) -> str:
    """The content of `_METADATA` for arrays stored as OCDBT and zarr3.

    Arrays are called NumPy arrays, but for numbers of Python and typed keys. Called jax.Array, they need sharding
    files, and restoring depends on what these say. Objects that are no leaves ride in the custom metadata.
    """
    paths = list(arrays)
    leaves = leaves_of(paths, objects, kinds)
    types = dict.fromkeys(paths, "np.ndarray")
    types |= {path: _value_type(kind) for path, kind in kinds.items() if path in types} | leaves
    children = _children(types)
    # A list position that has no predecessor (it is an object, say) makes stock Orbax fail: such lists become dicts.
    lists = {parent for parent, keys in children.items() if keys == set(range(len(keys)))}
    texts: dict[TreePath, str] = {(): ""}
    values = {
        kind: f'{{"value_type": {quoted(kind)}, "skip_deserialize": {json.dumps(kind in EMPTY)}}}'
        for kind in set(types.values())
    }

    def keys_of(path: TreePath) -> str:
        parent = path[:-1]
        if parent not in texts:
            texts[parent] = f"{keys_of(parent)}, "
        kind = SEQUENCE if parent in lists else MAPPING
        return f'{texts[parent]}{{"key": {quoted(str(path[-1]))}, "key_type": {kind}}}'

    entries = [
        f'{quoted(str(tuple(map(str, path))))}: {{"key_metadata": [{keys_of(path)}], '
        f'"value_metadata": {values[value_type]}}}'
        for path, value_type in types.items()
    ]
    objects = {path: value for path, value in objects.items() if path not in leaves}
    own: dict[str, Json] = _render_objects(objects) if objects else {}
    if positions := _positions(types, children, lists):
        own["positions"] = positions
    rest = {
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {"twinshard": own} if own else None,
    }
    return f'{{"tree_metadata": {{{", ".join(entries)}}}, {json.dumps(rest)[1:]}'


def _children(paths: Iterable[TreePath]) -> dict[TreePath, set[str | int]]:
    """The keys below each inner place of the tree."""
    children: dict[TreePath, set[str | int]] = {}
    for path in paths:
        for depth in range(len(path) - 1, -1, -1):
            parent = path[:depth]
            if parent in children:
                # So are those above.
                children[parent].add(path[depth])
                break
            children[parent] = {path[depth]}
    return children


def _positions(
    paths: Iterable[TreePath], children: Mapping[TreePath, set[str | int]], lists: set[TreePath]
) -> dict[str, Json]:
    """The paths of leaves in lists that are dicts in the tree, by name."""
    unlisted = {
        parent
        for parent, keys in children.items()
        if parent not in lists and any(isinstance(key, int) for key in keys)
    }
    if not unlisted:
        return {}
    return {
        leaf_name(path): [*path]
        for path in paths
        if any(isinstance(key, int) and path[:depth] in unlisted for depth, key in enumerate(path))
    }


def _value_type(kind: str) -> str:
    if key_implementation(kind) is not None:
        return "jax.Array"
    return SCALAR if kind == SCALAR else "np.ndarray"


def _render_objects(objects: Mapping[TreePath, object]) -> dict[str, Json]:
    return {
        "objects": {leaf_name(p): encode_object(v, f"object {leaf_name(p)!r}") for p, v in objects.items()},
        "paths": {leaf_name(p): list(p) for p in objects},
    }
