"""Finding the Orbax item with arrays in a checkpoint directory, or the items whose trees are one state.

    v0                   <path>/_METADATA
    v1                   <path>/state/_METADATA                      (before Orbax 0.12: pytree)
    CheckpointManager    <path>/<step>/<item>/_METADATA              item: default, state, params, ...

A level with several candidates is an error that lists them: a choice made for the user could convert the wrong step.
Items are found without being named only if their names say that each is a part of one train state, as
`Composite(params=..., opt_state=...)` saves it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridge.core.formats.files.atomic import is_unfinished
from bridge.core.formats.reading.regular_files import small_file
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.text import first_of
from bridge.core.text_files import parse_json

TREE_FILE = "_METADATA"
STEP_FILE = "_CHECKPOINT_METADATA"
COMMIT_FILE = "commit_success.txt"
_STEP = re.compile(r"(.+_)?\d+")


def find_item(path: Path) -> Path:
    """The directory that contains `_METADATA`: `path`, or the only such directory at most two levels below it.

    CheckpointError when no directory has it, or several do.
    """
    if is_unfinished(path):
        raise CheckpointError(
            f"{path} is a checkpoint that was never finished (its writer stopped half-way): use an earlier checkpoint"
        )
    if (path / TREE_FILE).is_file():
        return path
    below = _directories(path)
    items = {
        child: item
        for child in below
        for item in [child, *_directories(child)]
        if (item / TREE_FILE).is_file()
    }
    if not items:
        raise CheckpointError(f"{path}: {_why_none(path)}")
    if len(items) > 1:
        raise CheckpointError(_which(path, list(items)))
    child, _ = items.popitem()
    return find_item(child)


def items_beside(path: Path, item: Path) -> list[str]:
    """Names of the other items in the step of `item`, such as JSON; none if `path` is the item itself."""
    if item == path:
        return []
    return [child.name for child in _directories(item.parent) if child != item and any(child.iterdir())]


def is_committed(path: Path, item: Path) -> bool:
    """Whether any directory from `item` up to `path` contains the file that Orbax writes last."""
    levels = [item, *(parent for parent in item.parents if parent.is_relative_to(path))]
    return any((level / COMMIT_FILE).is_file() for level in levels)


def _which(path: Path, candidates: list[Path]) -> str:
    names = [child.name for child in candidates]
    steps = all(_STEP.fullmatch(name) for name in names)
    if steps:
        names.sort(key=lambda name: (len(name), name))
    shown = first_of(names, 20)
    noun = "step" if steps else "item"
    return f"{path} holds several {noun}s: {shown}. Give the path of one {noun}, e.g. {path / names[-1]}"


def _why_none(path: Path) -> str:
    if (path / "checkpoint").is_file():
        return "this is a checkpoint of the old flax msgpack format; load and save it again with Orbax first"
    shown = first_of(sorted(child.name for child in path.iterdir())) or "an empty directory"
    return f"expected an Orbax checkpoint with {TREE_FILE} here or in an item or step below, found {shown}"


_WEIGHTS: Final = frozenset({"params", "model", "weights"})
_BESIDE: Final = frozenset(
    {
        *("opt_state", "optimizer_state", "optimizer", "optim", "opt", "lr_scheduler", "scheduler"),
        *("batch_stats", "model_state", "variables", "ema", "ema_params", "rng", "rngs"),
        *("step", "train", "extra", "data_iter", "twinshard"),
    }
)


def named_items(path: Path, names: Sequence[str]) -> dict[str, Path]:
    """The directories of these items of the one step at `path` or in it. CheckpointError where one is missing."""
    items = _items(path)
    missing = [name for name in names if name not in items]
    if missing:
        raise CheckpointError(
            f"{path}: expected the item{'s' if len(missing) > 1 else ''} {', '.join(missing)} (--item), found "
            f"{', '.join(items) or 'no items with arrays'}"
        )
    return {name: items[name] for name in names}


def items_of_one_state(path: Path) -> dict[str, Path]:
    """The items at `path`, weights first, if there are several and all their names are known; else none."""
    if not path.is_dir() or is_unfinished(path) or (path / TREE_FILE).is_file():
        return {}
    items = _items(path)
    weights = [name for name in items if name in _WEIGHTS]
    if len(items) < 2 or len(weights) != 1 or not items.keys() <= _WEIGHTS | _BESIDE:
        return {}
    return {name: items[name] for name in (*weights, *(name for name in items if name not in weights))}


def has_items(path: Path) -> bool:
    """Whether there are items at `path`, or in the one step that it has."""
    return not (path / TREE_FILE).is_file() and bool(_items(path))


@dataclass(frozen=True)
class StepMetadata:
    """A step with named items, as another program saved it.

    handlers: by item with arrays, the class by which Orbax reads it; empty if the step does not tell. custom: the
    program's own metadata.
    """

    handlers: Mapping[str, str]
    custom: Mapping[str, object]


def step_metadata(path: Path) -> StepMetadata | None:
    """The metadata of the one step at `path` or in it; None if `path` is an item, or there is no step with items.

    CheckpointError for metadata that is no JSON.
    """
    items = {} if not path.is_dir() or (path / TREE_FILE).is_file() else _items(path)
    if not items:
        return None
    step = next(iter(items.values())).parent
    content: object = {}
    if (step / STEP_FILE).is_file():
        content = parse_json(
            small_file(step, STEP_FILE, "the step's metadata"), str(step / STEP_FILE), CheckpointError, "JSON"
        )
    told = content if isinstance(content, dict) else {}
    handlers, custom = told.get("item_handlers"), told.get("custom_metadata")
    known = handlers if isinstance(handlers, dict) else {}
    return StepMetadata(
        {name: str(known.get(name, "")) for name in items}, custom if isinstance(custom, dict) else {}
    )


def _items(path: Path) -> dict[str, Path]:
    below = _directories(path)
    items = {child.name: child for child in below if (child / TREE_FILE).is_file()}
    if items:
        return items
    steps = [child for child in below if any((item / TREE_FILE).is_file() for item in _directories(child))]
    return _items(steps[0]) if len(steps) == 1 else {}


def _directories(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(child for child in path.iterdir() if child.is_dir() and not is_unfinished(child))
