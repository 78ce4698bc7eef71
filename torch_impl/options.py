"""The options of one unit, validated once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.fsdp import CPUOffloadPolicy

from bridge.core.sharding import Align, Granularity, Placements, Strategy, plan_layout, strategy_named
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy


@dataclass(frozen=True)
class UnitOptions:
    """The arguments of ``fully_shard``.

    None means: the number of ranks for ``grad_divisor``, yes except for the root for ``reshard_after_forward``, 1 for
    ``prefetch``, and main weights on the device for ``offload``.

    Raises TypeError, ValueError or NotImplementedError that names the option, what was expected and what was given.
    """

    strategy: Strategy
    reshard_after_forward: bool | None
    policy: MixedPrecisionPolicy
    granularity: Granularity
    rows: int
    align: Align
    grad_divisor: float | None
    prefetch: int | None
    offload: CPUOffloadPolicy | None

    def __post_init__(self) -> None:
        # The planner knows which values are legal; the names of the parameters are not known yet.
        names = self.granularity if isinstance(self.granularity, Mapping) else ()
        plan_layout(
            dict.fromkeys(names, ()), 1, granularity=self.granularity, rows=self.rows, align=self.align
        )
        if self.grad_divisor is not None:
            check_divisor("grad_divisor", self.grad_divisor)
        if self.prefetch is not None and (type(self.prefetch) is not int or self.prefetch not in (0, 1)):
            raise ValueError(f"prefetch: expected 0, 1 or None (the default), got {self.prefetch!r}")
        if self.policy.store_param_remainders:
            self._check_remainders()

    def _check_remainders(self) -> None:
        option = "MixedPrecisionPolicy(store_param_remainders=True)"
        if self.strategy.shard_parameters:
            raise ValueError(
                f"{option}: expected a strategy that keeps compute weights whole at rest (no_shard, optim, "
                f"optim_grads), got {self.strategy.name}, which stores no whole weights at rest, so nothing is saved"
            )
        if self.offload is not None:
            raise NotImplementedError(
                f"{option} with offload_policy=CPUOffloadPolicy() is not available: use one of the two"
            )
        if self.policy.gather is not None:
            raise NotImplementedError(
                f"{option} with gather_dtype={self.policy.gather!r} is not available: with it, compute weights are not "
                "the rounded main weights"
            )

    @property
    def description(self) -> dict[str, object]:
        """The values that ranks compare, as JSON values."""
        return {
            "strategy": str(self.strategy),
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": str(self.policy),
            "granularity": dict(self.granularity)
            if isinstance(self.granularity, Mapping)
            else self.granularity,
            "rows": self.rows,
            "align": self.align,
            "grad_divisor": self.grad_divisor,
            "prefetch": self.prefetch,
            "offload": self.offload is not None,
        }


def chosen_strategy(strategy: str | None, placements: Placements | None) -> Strategy:
    """The strategy given by name or by placements; sharding everything when neither is given.

    Raises TypeError or ValueError when both are given, or for an unknown name.
    """
    if placements is None:
        return strategy_named("optim_grads_params" if strategy is None else strategy)
    if not isinstance(placements, Placements):
        raise TypeError(f"placements: expected torch_impl.Placements, got {type(placements).__name__}")
    if strategy is not None:
        raise ValueError(
            f"fully_shard: expected strategy or placements, got both ({strategy!r} and {placements})"
        )
    return placements.strategy


def check_divisor(option: str, divisor: float) -> None:
    """ValueError unless gradients can be divided by ``divisor``."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
        raise ValueError(f"{option}: expected a positive number, got {divisor!r}")
