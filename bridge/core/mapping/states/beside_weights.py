"""The parts of a checkpoint other than weights: step counts, training state, and hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bridge.core.formats.tensors.base import CheckpointReader, TensorInfo, TreePath
from bridge.core.mapping.language.conventions import WEIGHT, WORDS
from bridge.core.mapping.language.errors import MappingError

# torch counts steps in float32, which cannot represent 2**24 + 1.
LARGEST_STEP = 2**24

WORDS_OF_MOMENTS = frozenset(WORDS.values())

_CARRIED = frozenset(
    {"train", "train_state", "lr_scheduler", "scheduler", "dataloader", "step", "rng", "rngs"}
)
OPTIMIZER_KEYS = frozenset({"optimizer", "optimizers", "optim", "opt_state", "opt"})


def is_carried(info: TensorInfo, *, between_trees: bool, weights: str = WEIGHT) -> bool:
    """Whether a tensor that belongs to no weight is copied under its own path.

    Training state is copied. So is optimizer state other than moments: hyperparameters, and optax's own values, such as
    the counts of schedules. between_trees: only scalars of an optimizer are copied. Its other tensors, such as
    accumulated gradients, have the layout of the source's weights, and would be misread in the layout of the target's.
    weights: their place. A number next to a root of all weights is one of the program's own, such as an epoch. Empty: a
    mapping of equal names, which knows all weights; anything next to them is the program's own.
    """
    parts = [part for key in info.path for part in str(key).split(".")]
    if len(info.path) == 1 and not (weights and (info.shape or weights.startswith(WEIGHT))):
        return True
    # MaxText stores generators in nnx_aux, together with parts of the model, which are not training state.
    if parts[0] in _CARRIED or (parts[0] == "nnx_aux" and "rngs" in parts):
        return True
    kept_by_weight = "state" in parts or not WORDS_OF_MOMENTS.isdisjoint(parts)
    return parts[0] in OPTIMIZER_KEYS and not kept_by_weight and not (between_trees and info.shape)


def object_path(path: TreePath) -> TreePath:
    """The tree path of a hyperparameter in DCP. Parameter groups are a list there, so ``'0'`` becomes ``0``."""
    if len(path) > 3 and path[:2] == ("optimizer", "param_groups") and str(path[2]).isdecimal():
        return (*path[:2], int(path[2]), *path[3:])
    return path


def one_step(reader: CheckpointReader, infos: Sequence[TensorInfo], name: str, *, whole: bool) -> int:
    """The step that all of these tensors contain, to be stored as ``name``. whole: tensors are integers, not floats.

    Raises MappingError if they differ (naming two), are not scalars, or are not integers from 0 to 2**24.
    """
    values = {info.name: (_count if whole else _step)(reader, info) for info in infos}
    first = infos[0].name
    other = next((step for step in values if values[step] != values[first]), None)
    if other is not None:
        raise MappingError(
            f"expected the same step for every parameter, since {name} is one number, got "
            f"{values[first]} in {first} and {values[other]} in {other}"
        )
    return values[first]


def _step(reader: CheckpointReader, info: TensorInfo) -> int:
    value = float(reader.read(info.name)) if info.shape == () else math.nan
    if not value.is_integer() or not 0 <= value <= LARGEST_STEP:
        raise MappingError(
            f"expected a whole number of steps from 0 to {LARGEST_STEP} (2**24, the last one float32 counts to) "
            f"in the scalar tensor {info.name}, got {value:g} of shape {info.shape}"
        )
    return int(value)


def _count(reader: CheckpointReader, info: TensorInfo) -> int:
    count = int(reader.read(info.name)) if info.shape == () and info.dtype.kind in "iu" else -1
    if not 0 <= count <= LARGEST_STEP:
        raise MappingError(
            f"expected a scalar integer from 0 to {LARGEST_STEP} (2**24, the last one float32 counts to) in "
            f"{info.name}, got {count if count >= 0 else 'another value'} of dtype {info.dtype}, shape {info.shape}"
        )
    return count
