"""The optimizer state of one weight, in float64, as both libraries take a step from it, and the options of torch's.

optimizer.param_groups[0].lr = 0.1, .params = ["layers.0.weight", ...]      a group lists its weights
optimizer.param_groups.layers.0.weight.lr = 0.1                             flattened: an entry for each weight
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.formats.tensors.wrapping import value_of
from bridge.core.mapping.language.conventions import Moment

MOMENTUM: Moment = "momentum_buffer"
LARGEST: Moment = "max_exp_avg_sq"
_GROUPS = "param_groups"


@dataclass(frozen=True)
class WeightState:
    """weight, gradient, moments: float64 arrays of one shape. step: finished steps. options: torch's hyperparameters.

    An option that neither checkpoint has is the same usual number for both.
    """

    weight: np.ndarray
    gradient: np.ndarray
    moments: Mapping[Moment, np.ndarray]
    step: float
    options: Mapping[str, object]

    def number(self, option: str, default: float) -> float:
        """A hyperparameter."""
        value = self.options.get(option, default)
        return float(value) if isinstance(value, int | float) else default

    @property
    def decoupled(self) -> bool:
        """Whether the weight itself decays, as in AdamW, instead of its gradient, as in SGD and Adam."""
        return MOMENTUM not in self.moments and bool(self.options.get("decoupled_weight_decay", True))

    @property
    def betas(self) -> tuple[float, float]:
        """The decay of both moments of Adam."""
        value = self.options.get("betas", (0.9, 0.999))
        first, second = value if isinstance(value, list | tuple) and len(value) == 2 else (0.9, 0.999)
        return float(first), float(second)


def options_by_weight(reader: CheckpointReader) -> Mapping[str, Mapping[str, object]]:
    """By weight its options by name; none for a weight that no group names."""
    groups: dict[str, dict[str, object]] = defaultdict(dict)
    flat: dict[str, dict[str, object]] = defaultdict(dict)
    for name, path in reader.object_paths.items():
        before, mark, rest = ".".join(map(str, path)).partition(f"{_GROUPS}.")
        owner, _, entry = rest.rpartition(".")
        if mark and owner.isdecimal():
            groups[f"{before}{owner}"][entry] = value_of(reader, name)
        elif mark:
            flat[owner][entry] = value_of(reader, name)
    for group in groups.values():
        listed = group.get("params", ())
        for weight in listed if isinstance(listed, list | tuple) else ():
            flat[str(weight)].update(group)
    return flat
