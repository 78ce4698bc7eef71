"""What the path of a leaf says: a step count, a moment, or random state of a program."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.checkpoints.ground.selection import STATE_ROOTS, root_of
from bridge.core.formats.tensors.base import TensorInfo, TreePath
from bridge.core.mapping.language.conventions import MOMENTS, WORDS, Section
from bridge.core.mapping.states.beside_weights import OPTIMIZER_KEYS

_STEPS = frozenset({"step", "count", "gradient_step"})
"""Last keys of step counts: of torch, optax and MaxText; ``gradient_step`` of ``optax.MultiSteps``."""

_ROOTS_OF_STEPS = OPTIMIZER_KEYS | {"step", "state", "param_groups", "train", "train_state"}
"""First keys above step counts: elsewhere, as in random state, a count counts something else."""

_KEYS = frozenset({"key", "rng", "rng_key"})
"""Last keys of random keys, as in ``optax.add_noise``."""

_MOMENT_OF: Mapping[str, Section] = {WORDS[moment]: moment for moment in MOMENTS} | {m: m for m in MOMENTS}
"""Moments by the key that optax and torch give them."""


def is_state(path: TreePath) -> bool:
    """Whether something is the program's own state, such as random state anywhere in the tree, not a weight."""
    return root_of(path) in STATE_ROOTS or not {"rng", "rngs"}.isdisjoint(path)


def is_count(path: TreePath) -> bool:
    """Whether a leaf counts steps."""
    last = str(path[-2] if len(path) > 1 and path[-1] == "value" else path[-1]).rpartition(".")[2]
    # Outside an optimizer, as among metrics, a count counts something else.
    return root_of(path) in _ROOTS_OF_STEPS and (
        last == "step" or (last in _STEPS and _below_optimizer(path))
    )


def tells_of_state(info: TensorInfo) -> bool:
    """Whether a tensor's origin tells the origin of a count next to it: an array's, or an optimizer's number's.

    A random key begins anew in any program.
    """
    is_number_of_state = _below_optimizer(info.path) and not is_count(info.path)
    return info.path[-1] not in _KEYS and (bool(info.shape) or is_number_of_state)


def _below_optimizer(path: TreePath) -> bool:
    return any(part in OPTIMIZER_KEYS for key in path for part in str(key).split("."))


def moment_of(path: TreePath) -> tuple[TreePath, Section] | None:
    """What a moment belongs to, as its path without the moment's key, and the moment; None for other tensors."""
    keys = tuple(part for key in path for part in str(key).split("."))
    if keys[0] not in OPTIMIZER_KEYS and "state" not in keys:
        return None
    place = next((k for k in reversed(range(len(keys))) if keys[k] in _MOMENT_OF), None)
    return None if place is None else ((*keys[:place], *keys[place + 1 :]), _MOMENT_OF[keys[place]])
