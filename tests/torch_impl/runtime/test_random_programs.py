"""Random programs train as plain replicas whose gradients are averaged do."""

from __future__ import annotations

import itertools
import os
import time

import pytest

from tests.support.ranks import RankGroup
from tests.support.torch_impl.program_player import compare

# In one job of the ranks: a program takes a second, and on a busy machine ten.
SEEDS = [range(6), *(pytest.param(range(k, k + 9), marks=pytest.mark.slow) for k in range(6, 60, 9))]
SECONDS = 20


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_programs_equal_plain_replicas(ranks: RankGroup, seeds: range, world: int) -> None:
    ranks.run(world, compare, seeds)


def test_new_programs_equal_plain_replicas(ranks: RankGroup) -> None:
    """Programs that no run had before; ``TWINSHARD_SEED=N`` begins with the program of seed N."""
    end = time.monotonic() + SECONDS
    for seed in itertools.count(int(os.environ["TWINSHARD_SEED"])):
        ranks.run(2 + seed % 3, compare, range(seed, seed + 1), timeout=120)
        if time.monotonic() > end:
            break
