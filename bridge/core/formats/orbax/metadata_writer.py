"""Writes the small files of an Orbax checkpoint, which stand beside the arrays of its items.

_CHECKPOINT_METADATA    of the step: which handler of Orbax reads each item
commit_success.txt      of the step, and of an item that has a directory of its own
_METADATA, ...          of an item: the tree, its strings and typed keys
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from bridge.core.formats.files.manifest import ManifestFile, file_entry
from bridge.core.formats.orbax.item import COMMIT_FILE, STEP_FILE, TREE_FILE
from bridge.core.formats.orbax.keys import write_keys
from bridge.core.formats.orbax.strings import STRINGS_FILE, render_strings
from bridge.core.formats.orbax.tree import leaves_of
from bridge.core.formats.orbax.tree_writer import render_tree
from bridge.core.formats.orbax.zarr.arrays import ArrayLayout
from bridge.core.formats.tensors.base import CheckpointError, TreePath
from bridge.core.formats.tensors.leaf_kinds import STRING, key_implementation

HANDLERS: Final = {
    "v0": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "v1": "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler",
}
"""By layout, the name by which Orbax finds what reads an item."""


def write_step(root: Path, handlers: str | Mapping[str, str], started: int) -> None:
    """Write what makes `root` a step, or a checkpoint of one item, the mark that it is complete last.

    handlers: that of the only item, or each by the item's name. started: when, in nanoseconds of the epoch.
    """
    step = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    _write_json(root / STEP_FILE, step)
    (root / COMMIT_FILE).write_text("This checkpoint is complete.\n")


def mark_item(item: Path) -> None:
    """Say that an item in a directory of its own is complete."""
    (item / COMMIT_FILE).write_text("This item is complete.\n")


def write_tree(
    item: Path,
    what: str,
    layouts: Mapping[TreePath, ArrayLayout],
    objects: Mapping[TreePath, object],
    kinds: Mapping[TreePath, str],
) -> None:
    """Write the metadata of an item beside its arrays: the tree, its strings and typed keys.

    layouts: of all arrays, objects and kinds: of leaves, each by tree path in the item. what: the item, for errors.
    """
    (item / TREE_FILE).write_text(render_tree(list(layouts), objects, kinds))
    leaves = leaves_of(list(layouts), objects, kinds)
    strings = {path: str(objects[path]) for path, kind in leaves.items() if kind == STRING}
    if strings:
        _write_json(item / STRINGS_FILE, render_strings(strings, what))
    types = {path: key_implementation(kind) for path, kind in kinds.items()}
    keys = {layout.key: kind for path, layout in layouts.items() if (kind := types.get(path)) is not None}
    write_keys(item, keys, {layout.key: layout for layout in layouts.values()})


def require_key_data(what: str, kind: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """CheckpointError, beginning with `what`, where a tensor is to be a typed key and has not the data of one."""
    data = dtype == np.uint32 and len(shape) > 0
    if key_implementation(kind) is not None and not data:
        raise CheckpointError(
            f"{what}: expected uint32 of at least one dimension for a {kind}, got {dtype} of shape {shape}"
        )


def item_entry(path: Path) -> ManifestFile:
    """The entry of a file of an item in the manifest."""
    # Below "d" are the nodes and values of OCDBT.
    return ManifestFile(path.stat().st_size, None) if path.parent.name == "d" else file_entry(path)


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))
