"""Steps whose state is in several items, as `CheckpointManager` with `Composite(params=..., opt_state=...)` saves it.

    run/3/params/_METADATA      run/3/opt_state/_METADATA      run/3/metrics/metrics     (no arrays: no item here)

Items whose names say that each is a part of one train state are found without being named.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bridge.core.formats.orbax.item import TREE_FILE, is_unfinished
from bridge.core.formats.tensors.base import CheckpointError

_WEIGHTS: Final = frozenset({"params", "model", "weights"})
_BESIDE: Final = frozenset(
    {
        *(
            "opt_state",
            "optimizer",
            "optim",
            "opt",
            "batch_stats",
            "variables",
            "rng",
            "rngs",
            "ema",
            "ema_params",
            "twinshard",
        ),
        *(
            "step",
            "train",
            "extra",
            "model_state",
            "optimizer_state",
            "data_iter",
            "lr_scheduler",
            "scheduler",
        ),
    }
)


def named_items(path: Path, names: Sequence[str]) -> dict[str, Path]:
    """The directories of these items of the one step at `path` or in it. CheckpointError where one is missing."""
    found = _items(path)
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(
            f"{path}: expected the item{'s' if len(missing) > 1 else ''} {', '.join(missing)} (--item), found "
            f"{', '.join(found) or 'no items with arrays'}"
        )
    return {name: found[name] for name in names}


def items_of_one_state(path: Path) -> dict[str, Path]:
    """The items at `path`, weights first, if there are several and all names say what they are; else none."""
    if not path.is_dir() or is_unfinished(path) or (path / TREE_FILE).is_file():
        return {}
    found = _items(path)
    weights = [name for name in found if name in _WEIGHTS]
    if len(found) < 2 or len(weights) != 1 or not found.keys() <= _WEIGHTS | _BESIDE:
        return {}
    return {name: found[name] for name in (*weights, *(name for name in found if name not in weights))}


def has_items(path: Path) -> bool:
    """Whether there are items at `path`, or in the one step that it has."""
    return not (path / TREE_FILE).is_file() and bool(_items(path))


def _items(path: Path) -> dict[str, Path]:
    below = _directories(path)
    found = {child.name: child for child in below if (child / TREE_FILE).is_file()}
    if found:
        return found
    steps = [child for child in below if any((item / TREE_FILE).is_file() for item in _directories(child))]
    return _items(steps[0]) if len(steps) == 1 else {}


def _directories(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(child for child in path.iterdir() if child.is_dir() and not is_unfinished(child))
