"""By what the sums of a step are divided: its loss, the statistics with it, and the gradients.

::

    loss returns        grad_divisor     loss, gradients of all parts are divided by
    mean                None             the number of parts: the mean over equal parts
    (sum, weight)       None             the sum of the weights; 1 where that is zero, since the sums are zeros, too
    sum                 a number         that number; 1 gives sums
    mean                by unit          the number of parts; gradients of these units by their own number

A part is what one call of the loss sees: the rows of one device in one microbatch, in the pjit engine those of all
devices. The divisor of a unit is for weights that do not see each part once: experts that get the tokens of four
devices of which each has averaged its own.

In float16 reductions take means over the devices (``Wire.averages``), so what is left to divide by is less.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.comm.collectives import divide_exactly
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.step.losses import LossParts


@dataclass(frozen=True)
class Divisors:
    """``loss``: None where the loss has a weight, or the number of parts. ``gradients``: by key, where they are others.

    ``averaged``: by key, by what the reduction has divided already.
    """

    parts: int
    loss: float | None
    gradients: Mapping[str, float]
    averaged: Mapping[str, int]

    @classmethod
    def of(
        cls, plan: ShardingPlan, microbatches: int, grad_divisor: float | Mapping[str, float] | None
    ) -> Divisors:
        """Raises ``ValueError`` for a divisor that is no positive number, and a pattern that matches no unit."""
        flat = plan.engine == "shard_map"
        own: dict[str, float] = {}
        averaged: dict[str, int] = {}
        for path, unit in plan.units.items():
            divisor = _of_unit(path, grad_divisor) if isinstance(grad_divisor, Mapping) else None
            for group in unit.groups:
                for key in group.stored if group.trainable else ():
                    if divisor is not None:
                        own[key] = divisor
                    if flat and group.wire.averages:
                        averaged[key] = plan.data_ranks
        if isinstance(grad_divisor, Mapping):
            _check_patterns(plan, grad_divisor)
        elif grad_divisor is not None:
            _check("grad_divisor", grad_divisor)
        whole = None if isinstance(grad_divisor, Mapping) else grad_divisor
        return cls(microbatches * (plan.data_ranks if flat else 1), whole, own, averaged)

    def divided(self, parts: LossParts, gradients: Buffers) -> tuple[LossParts, Buffers]:
        """Loss, floating-point statistics and gradients from their sums over all parts.

        Raises ``ValueError`` for a ``(sum, weight)`` with a ``grad_divisor``.
        """
        divisor: Any = self.parts if self.loss is None else self.loss
        counted: Any = self.parts
        if parts.weight is not None:
            if self.loss is not None or self.gradients:
                raise ValueError(
                    "loss: expected a scalar, since grad_divisor is given, got (sum, weight), which says itself what "
                    "to divide by: return the sum, or leave out grad_divisor"
                )
            divisor = counted = jnp.where(parts.weight == 0, jnp.ones_like(parts.weight), parts.weight)

        def statistic(x: jax.Array) -> jax.Array:
            return divide_exactly(x, counted) if jnp.issubdtype(x.dtype, jnp.floating) else x

        def gradient(key: str, x: jax.Array) -> jax.Array:
            left = self.gradients.get(key, divisor) / self.averaged.get(key, 1)
            return divide_exactly(x, left)

        loss = LossParts(
            divide_exactly(parts.value, divisor), parts.weight, jax.tree.map(statistic, parts.aux)
        )
        return loss, {key: gradient(key, x) for key, x in gradients.items()}


def _of_unit(path: str, by_pattern: Mapping[str, float]) -> float | None:
    return next((d for pattern, d in by_pattern.items() if _matches(path, pattern)), None)


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _check_patterns(plan: ShardingPlan, by_pattern: Mapping[str, float]) -> None:
    for pattern, divisor in by_pattern.items():
        _check(f"grad_divisor[{pattern!r}]", divisor)
        if not any(_matches(path, pattern) for path in plan.units):
            raise ValueError(
                f"grad_divisor: expected patterns of units, but {pattern!r} matches none of {list(plan.units)[:12]}"
            )


def _check(name: str, divisor: Any) -> None:
    number = isinstance(divisor, int | float) and not isinstance(divisor, bool)
    if not number or not 0 < divisor < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {divisor!r}")
