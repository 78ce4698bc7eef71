"""The parts of a checkpoint that is several: items of an Orbax step, folders of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bridge.core.formats.orbax.items import has_items, items_of_one_state, named_items
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.whole.joined import require_one_tree
from bridge.core.formats.whole.pipeline import pipeline_parts


def parts_of(path: Path, items: Sequence[str] = ()) -> dict[str, Path]:
    """The places of the parts of the checkpoint at `path`, by name; none where it has no parts.

    items: those that are wanted. CheckpointError for one that is not there.
    """
    require_one_tree(path, list(items))
    if not path.is_dir():
        if items:
            raise CheckpointError(f"{path}: expected a checkpoint of several items (--item), found one file")
        return {}
    folders = pipeline_parts(path)
    if not folders:
        return named_items(path, items) if items else items_of_one_state(path)
    missing = [name for name in items if name not in folders]
    if missing:
        raise CheckpointError(
            f"{path}: expected {', '.join(missing)} (--item), found folders with weights: {', '.join(folders)}"
        )
    return {name: folders[name] for name in items} if items else folders


def has_parts(path: Path) -> bool:
    """Whether there are parts, of which some may be asked for."""
    return path.is_dir() and (has_items(path) or bool(pipeline_parts(path)))
