"""Which arrays of a train state lie in the host's memory: ``Offload``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jax_impl.optimizer.in_turn import key_of
from jax_impl.runtime.memory_kinds import HOST
from jax_impl.runtime.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class Offload:
    """What of a train state lies in the host's memory (``pinned_host``); a step brings it to the device and back.

    moments: the share of the optimizer's state, from 0 to 1. The moments of one array of weights (of a unit, or in the
        pjit engine of a parameter) are picked together, in the plan's order, so that the picked arrays have this share
        of all elements to within half of the largest array. A stack of layers is one array. Step counts stay on the
        device.
    main_weights: whether the weights lie there, too, frozen ones included.

    Raises ``ValueError`` for a share that is none, ``TypeError`` for other types.
    """

    moments: float = 1.0
    main_weights: bool = False
    update: str = "device"

    def __post_init__(self) -> None:
        if isinstance(self.moments, bool) or not isinstance(self.moments, int | float):
            raise TypeError(f"Offload: moments: expected a number from 0 to 1, got {self.moments!r}")
        if not isinstance(self.main_weights, bool):
            raise TypeError(f"Offload: main_weights: expected True or False, got {self.main_weights!r}")
        if not 0 <= self.moments <= 1:
            raise ValueError(f"Offload: moments: expected a share from 0 to 1, got {self.moments}")

    def kinds(self, plan: ShardingPlan, opt_state: Any) -> tuple[dict[str, str], Any]:
        """In place of each array of the weights and of ``opt_state`` its kind of memory, "" for the device's own."""
        picked = _picked(_sizes(plan, opt_state), self.moments)
        return dict.fromkeys(plan.arrays, HOST if self.main_weights else ""), jax.tree.map_with_path(
            lambda path, leaf: HOST if key_of(plan, path, leaf) in picked or (self.update == "host" and key_of(plan, path, leaf) is None) else "", opt_state
        )


def _sizes(plan: ShardingPlan, opt_state: Any) -> dict[str, int]:
    """Elements of the arrays of weights that have moments, in the plan's order."""
    having = {key_of(plan, path, leaf) for path, leaf in jax.tree.leaves_with_path(opt_state)}
    return {key: math.prod(stored.shape) for key, stored in plan.arrays.items() if key in having}


def _picked(sizes: Mapping[str, int], share: float) -> frozenset[str]:
    """One by one, so that what is picked is ``share`` of what was seen, to within half of the largest."""
    seen = taken = 0
    found = []
    for key, size in sizes.items():
        seen += size
        if size and taken + size / 2 <= share * seen:
            taken += size
            found.append(key)
    return frozenset(found)
