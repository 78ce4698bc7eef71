"""Which optimizers update weights that are stored with remainders: ``MainWeightAdamW``; all others are refused.

Others would update the bfloat16 weights, and lose what is smaller than their last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_impl.dtensor.remainders import remainder_of


def check_no_remainders(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Raises TypeError, naming the optimizer, if one of ``params`` has a remainder."""
    for param in params:
        if remainder_of(param) is not None:
            raise TypeError(
                f"{type(optimizer).__name__}: expected parameters in one piece, got one of shape {tuple(param.shape)} "
                "that is stored as a bfloat16 weight and a remainder: use MainWeightAdamW, or shard without "
                "MixedPrecisionPolicy(store_param_remainders=True)"
            )


@functools.cache
def refuse_other_optimizers() -> None:
    """From now on steps of other optimizers on such parameters raise; calls after the first do nothing."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(optimizer, "updates_remainders", False):
        check_no_remainders(
            optimizer, (param for group in optimizer.param_groups for param in group["params"])
        )
