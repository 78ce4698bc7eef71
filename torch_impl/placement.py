"""Sharding strategies: which of a unit's weights, gradients and optimizer state are sharded over the ranks.

    =====================  ==========  =========  ===============  =============
    strategy               parameters  gradients  optimizer state  also known as
    =====================  ==========  =========  ===============  =============
    no_shard               replicated  partial    replicated       DDP
    optim                  replicated  partial    sharded          ZeRO-1
    optim_grads            replicated  sharded    sharded          ZeRO-2
    optim_grads_params     sharded     sharded    sharded          ZeRO-3, FSDP
    =====================  ==========  =========  ===============  =============

"Partial" gradients may stay unreduced on each rank until the last microbatch of a step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """What is sharded between steps. The optimizer's main weights are sharded as its state is."""

    name: str
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool


_STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("no_shard", False, False, False),
        Strategy("optim", False, False, True),
        Strategy("optim_grads", False, True, True),
        Strategy("optim_grads_params", True, True, True),
    )
}


def strategy_named(name: str) -> Strategy:
    """Look a strategy up; ValueError for an unknown name."""
    if name not in _STRATEGIES:
        hint = (
            "; strategies over two data-parallel axes are not available" if name in ("hsdp", "hfsdp") else ""
        )
        raise ValueError(f"strategy: expected one of {', '.join(_STRATEGIES)}, got {name!r}{hint}")
    return _STRATEGIES[name]
