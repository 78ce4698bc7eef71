"""Which of a unit's weights, gradients and optimizer state are sharded over which axes of the data-parallel mesh.

The mesh has one or two axes, outer to inner. A tensor that is sharded over some axes is sharded over the innermost
ones, so that each rank holds one range of each buffer. A strategy is the number of these axes for each kind of tensor:

    ==================  ==========  =========  ===============  ===========================
    strategy            parameters  gradients  optimizer state  also known as
    ==================  ==========  =========  ===============  ===========================
    no_shard            0           0          0                DDP
    optim               0           0          1                ZeRO-1
    optim_grads         0           1          1                ZeRO-2
    optim_grads_params  1           1          1                ZeRO-3, FSDP; HSDP on two axes
    hsdp                1           1          1                HSDP, on two axes
    hfsdp               1           1          2                HFSDP, on two axes
    ==================  ==========  =========  ===============  ===========================

Parameters are never sharded over more axes than gradients, nor gradients over more axes than optimizer state: no
collective gathers gradients, and an optimizer cannot update rows for which it has no gradients. Every backward reduces
gradients over the axes that shard them. Over other axes, only the last microbatch of a step reduces them; until then
they are "partial" there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

StrategyName: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp"]
"""The names in ``STRATEGIES``."""
Engine: TypeAlias = Literal["shard_map", "pjit"]
ENGINES: Final[tuple[Engine, ...]] = get_args(Engine)
"""How ``jax_impl`` shards: explicit collectives, or annotations that XLA follows."""

_WORDS = {
    "parameters": ("replicate", "shard"),
    "gradients": ("partial", "shard"),
    "optimizer": ("replicate", "shard"),
}


@dataclass(frozen=True)
class Strategy:
    """For each kind of tensor, over how many of the innermost mesh axes it is sharded between steps.

    Main weights are sharded like the optimizer state.
    """

    name: str
    parameters: int
    gradients: int
    optimizer: int

    @property
    def shard_parameters(self) -> bool:
        """Whether a unit's parameters are gathered for each use, and freed after it."""
        return self.parameters > 0


@dataclass(frozen=True)
class Placements:
    """A strategy in detail: for each mesh axis, outer to inner, what happens to each kind of tensor.

    parameters: "replicate" or "shard" for each axis.
    gradients: "partial" (reduced once per step) or "shard" (reduced in every backward).
    optimizer: "replicate" or "shard"; main weights follow the optimizer state.

    ``Placements(("replicate", "shard"), ("partial", "shard"), ("shard", "shard"))`` is HFSDP. Raises ValueError, with
    the reason, for a combination that cannot work.
    """

    parameters: Sequence[str]
    gradients: Sequence[str]
    optimizer: Sequence[str]

    def __post_init__(self) -> None:
        depths = []
        for state, words in _WORDS.items():
            chosen = getattr(self, state)
            axes = (chosen,) if isinstance(chosen, str) else tuple(chosen)
            if not axes or any(word not in words for word in axes):
                raise ValueError(
                    f"Placements.{state}: expected {' or '.join(map(repr, words))} for each mesh axis, got {chosen!r}"
                )
            object.__setattr__(self, state, axes)
            if sorted(axes, key="shard".__eq__) != list(axes):
                raise ValueError(
                    f"Placements.{state}: expected the sharded axes to be the innermost ones, so that a rank's part is "
                    f"one range, got {axes}"
                )
            depths.append((state, axes.count("shard"), len(axes)))
        if len({ndim for _, _, ndim in depths}) > 1:
            listed = ", ".join(f"{state} {ndim}" for state, _, ndim in depths)
            raise ValueError(f"Placements: expected one entry for each mesh axis in all three, got {listed}")
        for (less, few, _), (more, many, _) in itertools.pairwise(depths):
            if few > many:
                raise ValueError(
                    f"Placements: expected {more} sharded wherever {less} are, got {less}={getattr(self, less)} with "
                    f"{more}={getattr(self, more)}"
                )

    @property
    def strategy(self) -> Strategy:
        depths = [getattr(self, state).count("shard") for state in _WORDS]
        known = [s.name for s in STRATEGIES.values() if [s.parameters, s.gradients, s.optimizer] == depths]
        name = known[0] if known and len(self.parameters) == 1 else f"placements{tuple(depths)}"
        return Strategy(name, *depths)


_DEPTHS: Final[Mapping[StrategyName, tuple[int, int, int]]] = {
    "no_shard": (0, 0, 0),
    "optim": (0, 0, 1),
    "optim_grads": (0, 1, 1),
    "optim_grads_params": (1, 1, 1),
    "hsdp": (1, 1, 1),
    "hfsdp": (1, 1, 2),
}
STRATEGIES: Final[Mapping[StrategyName, Strategy]] = {
    name: Strategy(name, *depths) for name, depths in _DEPTHS.items()
}
_ON_TWO_AXES = ("hsdp", "hfsdp")


def strategy_named(name: str) -> Strategy:
    """Look a strategy up; ValueError for an unknown name."""
    for known, strategy in STRATEGIES.items():
        if name == known:
            return strategy
    raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")


def check_axes(strategy: Strategy, placements: Placements | None, ndim: int) -> None:
    """ValueError if a strategy, or its placements, do not fit a mesh of ``ndim`` axes."""
    if placements is not None and len(placements.parameters) != ndim:
        raise ValueError(
            f"placements: expected one entry for each of the {ndim} mesh axes, got {len(placements.parameters)}"
        )
    if strategy.name in _ON_TWO_AXES and ndim != 2:
        raise ValueError(
            f"strategy {strategy.name!r}: expected a mesh of two axes (outer, inner), got {ndim}; give one, or "
            "choose 'optim_grads_params'"
        )
