"""The trees around the weights: which names optimizer state and train state have in either format.

    DCP (torch)                                   Orbax (jax)
    model.<weight>                                params/<weight>
    optimizer.state.<weight>.exp_avg              opt_state/mu/<weight>
    optimizer.state.<weight>.exp_avg_sq           opt_state/nu/<weight>
    optimizer.state.<weight>.step   (each)        opt_state/count   (one)
    train.<a>.<b>                                 train/<a>/<b>

Rules name weights only; the first three rows are the *sections* they are applied to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bridge.formats.base import CheckpointReader, TreePath
from bridge.mapping.errors import MappingError
from bridge.mapping.rules import Side

Format = Literal["dcp", "orbax"]

SIDES: dict[str, Side] = {"dcp": "torch", "orbax": "jax"}
"""The side of a rule that names the tensors of each format."""

COUNT = "opt_state/count"

# torch counts steps in float32, where the next integer after 2**24 does not exist.
LARGEST_STEP = 2**24


@dataclass(frozen=True)
class Section:
    """Tensors that exist once per weight. ``dcp`` and ``orbax`` are what stands before and after the weight's name."""

    title: str
    dcp: tuple[str, str]
    orbax: tuple[str, str]

    def weight_of(self, name: str, format: Format) -> str | None:
        """The weight's name inside a full tensor name, or None when the tensor is of another section."""
        before, after = self.dcp if format == "dcp" else self.orbax
        if len(name) > len(before) + len(after) and name.startswith(before) and name.endswith(after):
            return name[len(before) : len(name) - len(after)]
        return None

    def name_of(self, weight: str, format: Format) -> str:
        """The full tensor name."""
        before, after = self.dcp if format == "dcp" else self.orbax
        return before + weight + after

    def path_of(self, weight: str, format: Format) -> TreePath:
        """The tree path: a weight's dots separate nothing in DCP, as in ``('model', 'layers.0.w')``."""
        if format == "orbax":
            return tuple(self.name_of(weight, format).split("/"))
        before, after = self.dcp
        return (*before.strip(".").split("."), weight, *filter(None, [after.strip(".")]))


WEIGHTS = Section("weights", ("model.", ""), ("params/", ""))
MOMENTS = (
    Section("first moments", ("optimizer.state.", ".exp_avg"), ("opt_state/mu/", "")),
    Section("second moments", ("optimizer.state.", ".exp_avg_sq"), ("opt_state/nu/", "")),
)
STEP = Section("steps", ("optimizer.state.", ".step"), ("opt_state/step/", ""))
SECTIONS = (WEIGHTS, *MOMENTS)


def is_train(name: str, format: Format) -> bool:
    """Whether a tensor belongs to the train state, which the runtimes carry without looking into it."""
    return name.startswith("train." if format == "dcp" else "train/")


def canonical_to(name: str, format: Format) -> str:
    """A name written with slashes, such as ``train/model/head_dim``, as ``format`` writes it."""
    return name.replace("/", ".") if format == "dcp" else name


def object_path(path: TreePath) -> TreePath:
    """The tree path of a hyperparameter in DCP, whose parameter groups are a list: ``'0'`` becomes ``0``."""
    if len(path) > 3 and path[:2] == ("optimizer", "param_groups") and str(path[2]).isdecimal():
        return (*path[:2], int(path[2]), *path[3:])
    return path


def count_from_steps(reader: CheckpointReader, names: list[str]) -> np.ndarray:
    """One int32 step count, 0-d, from the step tensors of all parameters.

    Raises MappingError when they differ (naming two), are not scalars, or are not integers from 0 to 2**24.
    """
    steps = {}
    for name in names:
        shape = reader.tensors[name].shape
        value = float(reader.read(name)) if shape == () else math.nan
        if not value.is_integer() or not 0 <= value <= LARGEST_STEP:
            raise MappingError(
                f"expected a whole number of steps from 0 to {LARGEST_STEP} (2**24, the last one float32 counts to) "
                f"in the scalar tensor {name}, got {value:g} of shape {shape}"
            )
        steps[name] = value
    first = names[0]
    other = next((name for name in names if steps[name] != steps[first]), None)
    if other is not None:
        raise MappingError(
            f"expected the same step for every parameter, since {COUNT} is one number, got "
            f"{steps[first]:g} in {first} and {steps[other]:g} in {other}"
        )
    return np.asarray(int(steps[first]), np.int32)


def step_from_count(reader: CheckpointReader) -> np.ndarray:
    """The float32 step tensor, 0-d, that every parameter gets. Raises MappingError when float32 cannot hold it."""
    info = reader.tensors[COUNT]
    count = int(reader.read(COUNT)) if info.shape == () and info.dtype.kind in "iu" else -1
    if not 0 <= count <= LARGEST_STEP:
        raise MappingError(
            f"expected a scalar integer from 0 to {LARGEST_STEP} (2**24, the last one float32 counts to) in {COUNT}, "
            f"got {count if count >= 0 else 'another value'} of dtype {info.dtype}, shape {info.shape}"
        )
    return np.asarray(count, np.float32)
