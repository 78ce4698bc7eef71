"""What is split over which data-parallel mesh axes, as three numbers.

Mesh axes are listed outer to inner, and whatever is sharded is sharded over the innermost axes first. So a strategy
says for each kind of tensor over how many axes it is sharded::

    strategy             weights  gradients  state     at rest          each use of a unit   reductions
    no_shard             0        0          0         whole            nothing              once a step
    optim                0        0          1         shards           nothing              once a step
    optim_grads          0        1          1         shards           nothing              each microbatch
    optim_grads_params   1        1          1         shards           gather               each microbatch
    hsdp                 1        1          1         shards           gather               inner axis each, outer once
    hfsdp                1        1          2         finer shards     gather inner axis    inner axis each, outer once

*State* is the main weights and the optimizer's moments. Weights that are sharded less than the state are gathered from
it once a step, and gradients that are sharded less are reduced the rest of the way once a step. The order weights <=
gradients <= state is forced: a gradient shard has no use beside weights it does not cover, and an optimizer cannot
update rows for which it gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALLOWED = {
    "parameters": ("replicate", "shard"),
    "gradients": ("partial", "shard"),
    "optimizer": ("replicate", "shard"),
}


@dataclass(frozen=True)
class Strategy:
    """Over how many of the innermost mesh axes weights, accumulated gradients and state are sharded."""

    name: str
    weights: int
    gradients: int
    state: int

    @property
    def regathers(self) -> bool:
        """Whether a unit's weights are gathered for each use, and dropped after it."""
        return self.weights > 0


@dataclass(frozen=True)
class Placements:
    """A strategy in long form: one word for each mesh axis, outer to inner, for each kind of tensor.

    ``parameters`` and ``optimizer`` are "replicate" or "shard"; ``gradients`` are "partial" (reduced over that axis
    once a step) or "shard" (in every backward). Main weights go with the optimizer state. HFSDP is
    ``Placements(("replicate", "shard"), ("partial", "shard"), ("shard", "shard"))``.

    Raises ``ValueError`` for other words, different numbers of axes, a sharded axis outside of one that is not, and
    parameters or gradients sharded over axes that what depends on them is not.
    """

    parameters: Sequence[str]
    gradients: Sequence[str]
    optimizer: Sequence[str]

    def __post_init__(self) -> None:
        for kind, allowed in _ALLOWED.items():
            words = getattr(self, kind)
            words = (words,) if isinstance(words, str) else tuple(words)
            if not words or not set(words) <= set(allowed):
                raise ValueError(
                    f"placements: {kind}: expected {allowed[0]!r} or {allowed[1]!r} for each mesh axis, got {words}"
                )
            inner = words[len(words) - words.count("shard") :]
            if "shard" in words and set(inner) != {"shard"}:
                raise ValueError(
                    f"placements: {kind}: expected axes to be sharded from the innermost on, so that every device's "
                    f"part is contiguous, got {words}"
                )
            object.__setattr__(self, kind, words)
        if len({len(getattr(self, kind)) for kind in _ALLOWED}) != 1:
            raise ValueError(
                "placements: expected the same number of mesh axes for all three, got "
                + ", ".join(f"{kind} {getattr(self, kind)}" for kind in _ALLOWED)
            )
        weights, gradients, state = self._depths
        if not weights <= gradients <= state:
            raise ValueError(
                "placements: expected gradients to be sharded over every axis that parameters are, and the optimizer "
                f"over every axis that gradients are, got {self}"
            )

    @property
    def _depths(self) -> tuple[int, int, int]:
        weights, gradients, state = (getattr(self, kind).count("shard") for kind in _ALLOWED)
        return weights, gradients, state

    @property
    def strategy(self) -> Strategy:
        """Named after the preset that it equals, if there is one for as many axes."""
        depths, axes = self._depths, len(self.parameters)
        presets = ("hsdp", "hfsdp") if axes == 2 else STRATEGIES
        for name in presets:
            preset = STRATEGIES[name]
            if (preset.weights, preset.gradients, preset.state) == depths:
                return preset
        return Strategy(f"placements{depths}", *depths)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("no_shard", 0, 0, 0),
        Strategy("optim", 0, 0, 1),
        Strategy("optim_grads", 0, 1, 1),
        Strategy("optim_grads_params", 1, 1, 1),
        Strategy("hsdp", 1, 1, 1),
        Strategy("hfsdp", 1, 1, 2),
    )
}
_ON_TWO_AXES = ("hsdp", "hfsdp")


def strategy_named(name: str) -> Strategy:
    """Raises ``ValueError`` for a name that is not in ``STRATEGIES``."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name]


def check_axes(strategy: Strategy, placements: Placements | None, axes: Sequence[str]) -> None:
    """Raises ``ValueError`` when a strategy, or the placements it comes from, needs another number of mesh axes."""
    if placements is not None and len(placements.parameters) != len(axes):
        raise ValueError(
            f"placements: expected one word for each of the mesh axes {tuple(axes)}, got {placements}"
        )
    if strategy.name in _ON_TWO_AXES and len(axes) != 2:
        raise ValueError(
            f"strategy {strategy.name!r}: expected a mesh of two axes, outer and inner, got {tuple(axes)}"
        )
