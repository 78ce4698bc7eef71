"""What stands beside the weights in a checkpoint: step counts, training state, and hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bridge.formats.base import CheckpointReader, TensorInfo, TreePath
from bridge.mapping.errors import MappingError

# torch counts steps in float32, where the next integer after 2**24 does not exist.
LARGEST_STEP = 2**24

_CARRIED = frozenset({"train", "train_state", "lr_scheduler", "dataloader", "step"})
_HYPERPARAMETERS = "param_groups"
_MOMENTS = frozenset({"mu", "nu"})


def is_carried(path: TreePath, *, tree: bool) -> bool:
    """Whether a tensor that belongs to no weight goes along under its own path.

    Training state does; of an optimizer what is not kept per weight: hyperparameters, and, of a convention that is a
    `tree`, everything but moments, such as the step counts of schedules.
    """
    parts = [part for key in path for part in (str(key).split(".") if isinstance(key, str) else [str(key)])]
    if parts[0] in _CARRIED:
        return True
    if parts[0] == "opt_state":
        # In a checkpoint of the other kind it came from a tree, and goes back there.
        return not _MOMENTS & set(parts)
    return parts[0] in ("optimizer", "optim") and (_HYPERPARAMETERS in parts or tree)


def object_path(path: TreePath) -> TreePath:
    """The tree path of a hyperparameter in DCP, whose parameter groups are a list: ``'0'`` becomes ``0``."""
    if len(path) > 3 and path[:2] == ("optimizer", "param_groups") and str(path[2]).isdecimal():
        return (*path[:2], int(path[2]), *path[3:])
    return path


def count_from_steps(reader: CheckpointReader, steps: Sequence[TensorInfo], count: str) -> np.ndarray:
    """One int32 step count, 0-d, to be called ``count``, from the step tensors of all parameters.

    Raises MappingError when they differ (naming two), are not scalars, or are not integers from 0 to 2**24.
    """
    values = {}
    for info in steps:
        value = float(reader.read(info.name)) if info.shape == () else math.nan
        if not value.is_integer() or not 0 <= value <= LARGEST_STEP:
            raise MappingError(
                f"expected a whole number of steps from 0 to {LARGEST_STEP} (2**24, the last one float32 counts to) "
                f"in the scalar tensor {info.name}, got {value:g} of shape {info.shape}"
            )
        values[info.name] = value
    first = steps[0].name
    other = next((name for name in values if values[name] != values[first]), None)
    if other is not None:
        raise MappingError(
            f"expected the same step for every parameter, since {count} is one number, got "
            f"{values[first]:g} in {first} and {values[other]:g} in {other}"
        )
    return np.asarray(int(values[first]), np.int32)


def step_from_count(reader: CheckpointReader, info: TensorInfo) -> np.ndarray:
    """The float32 step tensor, 0-d, that every parameter gets. Raises MappingError when float32 cannot hold it."""
    count = int(reader.read(info.name)) if info.shape == () and info.dtype.kind in "iu" else -1
    if not 0 <= count <= LARGEST_STEP:
        raise MappingError(
            f"expected a scalar integer from 0 to {LARGEST_STEP} (2**24, the last one float32 counts to) in "
            f"{info.name}, got {count if count >= 0 else 'another value'} of dtype {info.dtype}, shape {info.shape}"
        )
    return np.asarray(count, np.float32)
