"""The four ways to split training state over one data-parallel axis, as data.

===================  =================  ==================  ===============
name                 compute weights    gradients           optimizer state
===================  =================  ==================  ===============
no_shard             replicate          sum once per step   replicate
optim                gather per step    scatter per step    shard
optim_grads          gather per step    scatter per unit    shard
optim_grads_params   gather per use     scatter per unit    shard
===================  =================  ==================  ===============
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """What is sharded. Main weights and optimizer state always go together.

    ``shards_state``: each rank stores and updates one shard of the main weights and moments.
    ``shards_gradients``: a unit's gradient is reduce-scattered in its own backward, so no rank ever accumulates whole
    gradients; otherwise whole gradients are accumulated and reduced once per step.
    ``shards_weights``: compute weights are gathered before each use of a unit and dropped after it; otherwise once
    per step.
    """

    name: str
    shards_state: bool
    shards_gradients: bool
    shards_weights: bool


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("no_shard", shards_state=False, shards_gradients=False, shards_weights=False),
        Strategy("optim", shards_state=True, shards_gradients=False, shards_weights=False),
        Strategy("optim_grads", shards_state=True, shards_gradients=True, shards_weights=False),
        Strategy("optim_grads_params", shards_state=True, shards_gradients=True, shards_weights=True),
    )
}


def strategy_named(name: str) -> Strategy:
    """Raises ``ValueError`` for a name that is not in ``STRATEGIES``."""
    if name in ("hsdp", "hfsdp"):
        raise ValueError(
            f"strategy {name!r} needs a second data-parallel mesh axis, and jax_impl shards over one so far: "
            f"expected one of {list(STRATEGIES)}"
        )
    if name not in STRATEGIES:
        raise ValueError(f"expected a strategy among {list(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name]
