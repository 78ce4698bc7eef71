"""The small files of an Orbax checkpoint, next to the arrays of its items.

_CHECKPOINT_METADATA           of the step: which handler of Orbax reads each item
commit_success.txt             of the step, and of an item that has a directory of its own
_METADATA                      of an item: the tree, see `tree.py`, which reads it
_strings.json                  text that is a leaf, by JSON pointer: {"a": {"b.c": "text"}} has leaf ("a/b", "c")
array_metadatas/process_0      which arrays are typed PRNG keys: their dtype, key<rbg>, is not in the data
_sharding                      {base64 of "rngs.dropout": a sharding as JSON text}

The values of a typed key are the uint32 of ``jax.random.key_data``. Stock Orbax makes keys only from leaves that it
restores as jax.Array, and looks up a sharding for such a leaf if the caller gives none.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from bridge.core.formats.files.manifest import ManifestFile, file_entry
from bridge.core.formats.orbax.item import COMMIT_FILE, STEP_FILE, TREE_FILE
from bridge.core.formats.orbax.tree import (
    MAPPING,
    SEQUENCE,
    Json,
    encode_object,
    leaf_name,
    leaves_of,
    storage_key,
)
from bridge.core.formats.orbax.zarr.arrays import ArrayLayout
from bridge.core.formats.reading.regular_files import small_file
from bridge.core.formats.tensors.base import CheckpointError, TreePath
from bridge.core.formats.tensors.leaves import EMPTY, SCALAR, STRING, is_unicode, key_implementation
from bridge.core.text_files import parse_json

HANDLERS: Final = {
    "v0": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "v1": "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler",
}
"""By layout, the name by which Orbax finds the handler that reads an item."""


def write_step(
    root: Path,
    handlers: str | Mapping[str, str],
    started: int,
    custom: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write the files that make `root` a step, or a checkpoint of one item; the completion mark is written last.

    handlers: the handler of the only item, or handlers by item name. started: when, in nanoseconds of the epoch.
    custom: metadata of the program that will read the step.
    """
    step = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": dict(custom),
    }
    (root / STEP_FILE).write_text(json.dumps(step))
    (root / COMMIT_FILE).write_text("This checkpoint is complete.\n")


def mark_item(item: Path) -> None:
    """Mark an item in its own directory as complete."""
    (item / COMMIT_FILE).write_text("This item is complete.\n")


def write_tree(
    item: Path,
    what: str,
    layouts: Mapping[TreePath, ArrayLayout],
    objects: Mapping[TreePath, object],
    kinds: Mapping[TreePath, str],
) -> None:
    """Write the metadata of an item next to its arrays: the tree, its strings and typed keys.

    layouts: of all arrays; objects, kinds: of leaves; each by tree path in the item. what: the item, for errors.
    """
    (item / TREE_FILE).write_text(render_tree(list(layouts), objects, kinds))
    leaves = leaves_of(list(layouts), objects, kinds)
    strings = {path: str(objects[path]) for path, leaf_kind in leaves.items() if leaf_kind == STRING}
    if strings:
        (item / STRINGS_FILE).write_text(json.dumps(render_strings(strings, what)))
    types = {path: key_implementation(leaf_kind) for path, leaf_kind in kinds.items()}
    keys = {
        layout.key: leaf_kind
        for path, layout in layouts.items()
        if (leaf_kind := types.get(path)) is not None
    }
    write_keys(item, keys, {layout.key: layout for layout in layouts.values()})


def require_key_data(what: str, leaf_kind: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """CheckpointError, beginning with `what`, if a tensor should be a typed key but does not have a key's data."""
    data = dtype == np.uint32 and len(shape) > 0
    if key_implementation(leaf_kind) is not None and not data:
        raise CheckpointError(
            f"{what}: expected uint32 of at least one dimension for a {leaf_kind}, got {dtype} of shape {shape}"
        )


def item_entry(path: Path) -> ManifestFile:
    """The manifest's entry for a file of an item."""
    # OCDBT's nodes and values are below "d".
    return ManifestFile(path.stat().st_size, None) if path.parent.name == "d" else file_entry(path)


def render_tree(
    arrays: Iterable[TreePath], objects: Mapping[TreePath, object], kinds: Mapping[TreePath, str]
) -> str:
    """The content of `_METADATA` for arrays stored as OCDBT and zarr3.

    As text, leaf by leaf: most leaves have the same parent as the previous leaf, whose keys are text already. Making
    objects of all leaves for `json.dumps` takes three times as long. Arrays are declared as NumPy arrays, except Python
    numbers and typed keys. Declared as jax.Array, they would need sharding files, and restoring would depend on these
    files. Objects that are not leaves are stored in the custom metadata.
    """
    paths = list(arrays)
    leaves = leaves_of(paths, objects, kinds)
    types = dict.fromkeys(paths, "np.ndarray")
    types |= {path: _value_type(key_type) for path, key_type in kinds.items() if path in types} | leaves
    children = _children(types)
    # A list position without a predecessor (if that is an object) makes stock Orbax fail: such lists become dicts.
    lists = {parent for parent, keys in children.items() if keys == set(range(len(keys)))}
    texts: dict[TreePath, str] = {(): ""}
    values = {
        key_type: f'{{"value_type": {quoted(key_type)}, "skip_deserialize": {json.dumps(key_type in EMPTY)}}}'
        for key_type in set(types.values())
    }

    def keys_of(path: TreePath) -> str:
        parent = path[:-1]
        if parent not in texts:
            texts[parent] = f"{keys_of(parent)}, "
        key_type = SEQUENCE if parent in lists else MAPPING
        return f'{texts[parent]}{{"key": {quoted(str(path[-1]))}, "key_type": {key_type}}}'

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
                # Then its parents are known, too.
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


def _value_type(leaf_kind: str) -> str:
    if key_implementation(leaf_kind) is not None:
        return "jax.Array"
    return SCALAR if leaf_kind == SCALAR else "np.ndarray"


def _render_objects(objects: Mapping[TreePath, object]) -> dict[str, Json]:
    return {
        "objects": {leaf_name(p): encode_object(v, f"object {leaf_name(p)!r}") for p, v in objects.items()},
        "paths": {leaf_name(p): list(p) for p in objects},
    }


STRINGS_FILE = "_strings.json"


def find_strings(content: object, paths: Iterable[TreePath], what: str) -> dict[TreePath, str]:
    """The texts of these leaves. CheckpointError, beginning with `what`, if one is missing."""
    texts: dict[TreePath, str] = {}
    for path in paths:
        value = content
        for token in _pointer(path):
            value = value.get(token) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise CheckpointError(f"{what}: expected a string for {leaf_name(path)!r}, found none")
        if not is_unicode(value):
            raise CheckpointError(f"{what}: expected Unicode text for {leaf_name(path)!r}, got {value!r:.80}")
        texts[path] = value
    return texts


def render_strings(strings: Mapping[TreePath, str], what: str) -> Json:
    """The content of the file. CheckpointError, beginning with `what`, if a leaf has the place of another leaf."""
    content: dict[str, Json] = {}
    for path, text in strings.items():
        container = content
        *parents, last = _pointer(path)
        for token in parents:
            below = container.setdefault(token, {})
            if not isinstance(below, dict):
                break
            container = below
        else:
            if last not in container:
                container[last] = text
                continue
        raise CheckpointError(
            f"{what}: leaf {leaf_name(path)!r}: expected a name whose place in {STRINGS_FILE} is free, but its part "
            "before a '/' is the name of another text: rename one of the two"
        )
    return content


def _pointer(path: TreePath) -> list[str]:
    # Orbax uses the name unchanged as a JSON pointer, in which "~" is an escape character.
    return [token.replace("~1", "/").replace("~0", "~") for token in storage_key(path).split("/")]


_FOLDER = "array_metadatas"
# Replicated on every device, whatever their number: NumPy takes -1 for as many as there are.
_EVERYWHERE = {
    "sharding_type": "NamedSharding",
    "shape": [-1],
    "axis_names": ["devices"],
    "partition_spec": [],
}


def read_keys(item: Path) -> Mapping[str, str]:
    """The implementation of every typed key, by the name of its array in the store.

    CheckpointError for a file of array metadata that is not JSON.
    """
    implementations: dict[str, str] = {}
    folder = item / _FOLDER
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        data = small_file(folder, file.name, "array metadata")
        implementations.update(_keys(parse_json(data, str(file), CheckpointError, "JSON")))
    return implementations


def write_keys(item: Path, keys: Mapping[str, str], arrays: Mapping[str, ArrayLayout]) -> None:
    """Write the files that make stock Orbax restore typed keys.

    keys: implementations, by the names of the arrays in the store; nothing is written if there are none.
    """
    if not keys:
        return
    described = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": arrays[name].stored_chunk,
                "chunk_shape": arrays[name].chunk,
                "ext_metadata": {"random_key_impl": implementation},
            }
        }
        for name, implementation in keys.items()
    ]
    (item / _FOLDER).mkdir(exist_ok=True)
    (item / _FOLDER / "process_0").write_text(json.dumps({_FOLDER: described}))
    # For all arrays: if the file exists, Orbax expects every jax.Array in it.
    shardings = {base64.urlsafe_b64encode(name.encode()).decode(): json.dumps(_EVERYWHERE) for name in arrays}
    (item / "_sharding").write_text(json.dumps(shardings))


def _keys(content: Any) -> Iterator[tuple[str, str]]:
    """An entry in another form than Orbax's is not about a key, and nothing else in these files is needed."""
    listed = content.get(_FOLDER) if isinstance(content, dict) else None
    for entry in listed if isinstance(listed, list) else ():
        array = entry.get("array_metadata") if isinstance(entry, dict) else None
        if not isinstance(array, dict):
            continue
        name, further = array.get("param_name"), array.get("ext_metadata")
        implementation = further.get("random_key_impl") if isinstance(further, dict) else None
        if isinstance(name, str) and isinstance(implementation, str):
            yield name, implementation
