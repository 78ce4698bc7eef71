"""The options of one unit, validated once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch_impl.layout import Granularity, plan_layout
from torch_impl.placement import Strategy
from torch_impl.precision import MixedPrecisionPolicy


@dataclass(frozen=True)
class UnitOptions:
    """What ``fully_shard`` was asked for. ``grad_divisor`` None stands for the number of ranks.

    Raises TypeError or ValueError that names the option, what was expected and what was given.
    """

    strategy: Strategy
    reshard_after_forward: bool
    policy: MixedPrecisionPolicy
    granularity: Granularity
    rows: int
    grad_divisor: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, bool):
            raise TypeError(f"reshard_after_forward: expected a bool, got {self.reshard_after_forward!r}")
        if not isinstance(self.policy, MixedPrecisionPolicy):
            raise TypeError(
                f"mp_policy: expected a torch_impl.MixedPrecisionPolicy, got {type(self.policy).__name__}"
            )
        # The planner knows what is legal; whether the names are those of parameters is not known here.
        names = self.granularity if isinstance(self.granularity, Mapping) else ()
        plan_layout(dict.fromkeys(names, ()), 1, granularity=self.granularity, rows=self.rows)
        if self.grad_divisor is not None:
            check_divisor(self.grad_divisor)

    @property
    def description(self) -> dict[str, object]:
        """What ranks compare, as JSON values."""
        return {
            "strategy": self.strategy.name,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": str(self.policy),
            "granularity": dict(self.granularity)
            if isinstance(self.granularity, Mapping)
            else self.granularity,
            "rows": self.rows,
            "grad_divisor": self.grad_divisor,
        }


def check_divisor(divisor: float) -> None:
    """ValueError unless gradients can be divided by this."""
    if not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
        raise ValueError(f"gradient divisor: expected a positive number, got {divisor!r}")
