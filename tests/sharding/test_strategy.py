"""Strategies and placements: which are legal, and what they are sharded over."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bridge.core.sharding import STRATEGIES, Placements, check_axes, strategy_named


def test_placements_are_legal_exactly_when_inner_axes_are_sharded_first_and_the_optimizer_most() -> None:
    for axes in (1, 2, 3):
        words = [
            list(itertools.product((kept, "shard"), repeat=axes))
            for kept in ("replicate", "partial", "replicate")
        ]
        for chosen in itertools.product(*words):
            depths = [placement.count("shard") for placement in chosen]
            inner = all(
                "shard" not in placement[: axes - n] for placement, n in zip(chosen, depths, strict=True)
            )
            if inner and depths == sorted(depths):
                placements = Placements(*chosen)
                assert (placements.parameters, placements.gradients, placements.optimizer) == chosen
                strategy = placements.strategy
                assert [strategy.parameters, strategy.gradients, strategy.optimizer] == depths
                assert strategy.shard_parameters == (depths[0] > 0)
            else:
                with pytest.raises(ValueError, match="Placements"):
                    Placements(*chosen)


@pytest.mark.parametrize("name", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_placements_on_one_axis_have_the_name_of_the_strategy_that_they_spell_out(name: str) -> None:
    strategy = STRATEGIES[name]
    words = (("replicate", "shard"), ("partial", "shard"), ("replicate", "shard"))
    depths = (strategy.parameters, strategy.gradients, strategy.optimizer)
    assert Placements(*(word[depth] for word, depth in zip(words, depths, strict=True))).strategy == strategy


@pytest.mark.parametrize(
    ("parameters", "gradients", "optimizer", "message"),
    [
        ("gather", "partial", "shard", "parameters: expected 'replicate' or 'shard' for each mesh axis"),
        ("sharded", "shard", "shard", "parameters: expected 'replicate' or 'shard'"),
        ("shard", "replicate", "shard", "gradients: expected 'partial' or 'shard'"),
        (("shard", "replicate"), ("partial", "shard"), ("shard", "shard"), "innermost"),
        ("shard", "partial", "shard", "gradients sharded wherever parameters are"),
        ("replicate", "shard", "replicate", "optimizer sharded wherever gradients are"),
        ("shard", ("shard", "shard"), ("shard", "shard"), "one entry for each mesh axis in all three"),
        ("shard", ("shard", "shard"), "shard", "one entry for each mesh axis in all three"),
        ((), (), (), "parameters: expected 'replicate' or 'shard'"),
    ],
)
def test_placements_that_cannot_work_are_refused_with_the_reason(
    parameters: Any, gradients: Any, optimizer: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Placements(parameters, gradients, optimizer)


def test_a_strategy_that_does_not_fit_the_mesh_is_refused() -> None:
    check_axes(strategy_named("hsdp"), None, 2)
    with pytest.raises(
        ValueError, match=r"strategy 'hsdp': expected a mesh of two axes \(outer, inner\), got 1"
    ):
        check_axes(strategy_named("hsdp"), None, 1)
    placements = Placements("shard", "shard", "shard")
    with pytest.raises(ValueError, match="expected one entry for each of the 2 mesh axes, got 1"):
        check_axes(placements.strategy, placements, 2)
    with pytest.raises(ValueError, match=r"strategy: expected one of no_shard, optim, .*, got 'zero9'"):
        strategy_named("zero9")
