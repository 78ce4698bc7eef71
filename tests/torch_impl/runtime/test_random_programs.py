"""Random programs train as plain replicas whose gradients are averaged do."""

from __future__ import annotations

import pytest

from tests.support.ranks import on_ranks
from tests.support.torch_impl.random_programs import Player, Program, draw
from tests.support.torch_impl.toy import assert_same_weights

# In one job of the ranks: a program takes a second, and on a busy machine ten.
SEEDS = [range(6), *(pytest.param(range(k, k + 9), marks=pytest.mark.slow) for k in range(6, 60, 9))]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@on_ranks("world")
def test_random_programs_equal_plain_replicas(seeds: range) -> None:
    for seed in seeds:
        program = draw(seed)
        try:
            compare_steps(program)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {program}") from error


def compare_steps(program: Program) -> None:
    player, plain = Player(program), Player(None)
    for name, *args in program.ops:
        for one in (player, plain):
            getattr(one, name)(*args)
        if name == "step":
            assert_same_weights(player.model, plain.model, rtol=1e-9, atol=1e-12)
