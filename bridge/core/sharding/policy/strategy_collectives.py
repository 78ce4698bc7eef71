"""The collectives of a strategy: over which mesh axes a group's buffers travel, and when.

Axes are counted from the innermost one, 0. Buffers of level a are cut over the a innermost axes. A strategy that shards
parameters over p axes, gradients over g and optimizer state over o, on a mesh of d axes, takes::

    field           when                    collective        over axis         between levels
    gathered_once   once a step             all-gather        o-1 ... p         o -> p
    gathered        each use of a unit      all-gather        p-1 ... 0         p -> 0
    scattered       each backward           reduce-scatter    0 ... g-1         0 -> g
    scattered_once  last backward of step   reduce-scatter    g ... o-1         g -> o
    summed_once     last backward of step   all-reduce        o ... d-1         o

HSDP (p, g, o = 1, 1, 1 of two axes) sums over the outer axis once a step. HFSDP (1, 1, 2) gathers
and scatters over the outer axis, once a step as well. An axis of one device takes no collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.policy.group_dtypes import GroupDtypes
from bridge.core.sharding.policy.strategy import Strategy


@dataclass(frozen=True)
class StrategyCollectives:
    """Mesh axes in the order of their collectives, see above."""

    gathered_once: range
    gathered: range
    scattered: range
    scattered_once: range
    summed_once: range
    reduced_last: tuple[int, ...]
    """The axes over which the last backward of a step reduces gradients; earlier ones reduce over ``scattered``."""


@cache  # Called in every backward.
def collectives_of(strategy: Strategy, ndim: int) -> StrategyCollectives:
    """``ndim``: the number of data-parallel axes of the mesh."""
    parameters, gradients, optimizer = strategy.parameters, strategy.gradients, strategy.optimizer
    scattered, scattered_once = range(gradients), range(gradients, optimizer)
    summed_once = range(optimizer, ndim)
    return StrategyCollectives(
        gathered_once=range(optimizer - 1, parameters - 1, -1),
        gathered=range(parameters - 1, -1, -1),
        scattered=scattered,
        scattered_once=scattered_once,
        summed_once=summed_once,
        reduced_last=(*scattered, *scattered_once, *summed_once),
    )


def keeps_shard(strategy: Strategy) -> bool:
    """Whether a rank keeps compute weights at a level between main and whole weights, as in HFSDP."""
    return 0 < strategy.parameters < strategy.optimizer


def computes_with_main(strategy: Strategy, dtypes: GroupDtypes[Any]) -> bool:
    """Whether forward and backward read the main weights themselves, which are then whole."""
    return not strategy.optimizer and dtypes.compute == dtypes.main and dtypes.gather is None


def num_flags(layout: Layout, shards: int) -> int:
    """Extra elements at the end of a PyTorch gradient buffer that is cut into ``shards``.

    One for each parameter and finest shard in the buffer: they tell ranks which parameters other ranks used, without
    another collective. ``layout``: of the finest shards.
    """
    return layout.num_shards // shards * len(layout.slots)
