"""What XLA:GPU makes of a step, for H100s that are not there: collectives, memory, and transfers beside products.

Skipped where the ``compilers`` extra is not installed. Nothing runs: these tests say what was compiled, not how fast it
is.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.jax_impl.compilers.conftest import Compile
from tests.jax_impl.compilers.expected import (
    GATHER,
    REDUCE,
    SCATTER,
    assert_as_much_overlap_as_by_hand,
    assert_collectives,
    assert_no_more_memory_than_by_hand,
    by_hand,
)
from tests.support.compilers.setting import Setting

ZERO_3 = "optim_grads_params"


def case(target: str, engine: str, size: str, strategy: str = ZERO_3, *marks: Any, **options: Any) -> Any:
    setting = Setting(target, engine, size, strategy=strategy, **options)
    return pytest.param(setting, id=str(setting), marks=marks)


def wrong(reason: str) -> Any:
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


ALL_REDUCED = "pjit under optim: whole gradients are all-reduced and then cut, which sends twice the bytes"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "setting",
    [
        case("h100:8", "shard_map", "331", "no_shard"),
        case("h100:8", "shard_map", "331", "optim", stacked=True),
        case("h100:8", "shard_map", "256", "optim_grads", microbatches=3, recompute=True),
        case("h100:8", "shard_map", "331", microbatches=3, stacked=True),
        case("h100:64", "shard_map", "331", recompute=True),
        case("h100:64", "shard_map", "256", "hsdp", inner=8, stacked=True),
        case("h100:64", "shard_map", "331", "hfsdp", inner=8),
        case("h100:8", "shard_map", "256", ZERO_3, SLOW),
        case("h100:8", "shard_map", "331", ZERO_3, SLOW, recompute=True, stacked=True),
        case("h100:64", "shard_map", "256", ZERO_3, SLOW, microbatches=2),
        case("h100:8", "pjit", "256", "no_shard"),
        case("h100:8", "pjit", "256", "optim", wrong(ALL_REDUCED)),
        case("h100:8", "pjit", "256", "optim_grads", microbatches=2),
        case("h100:8", "pjit", "256"),
        case("h100:8", "pjit", "331", recompute=True),
        case("h100:64", "pjit", "256", stacked=True),
        case("h100:8", "pjit", "256", ZERO_3, SLOW, stacked=True, recompute=True, microbatches=2),
        case("h100:64", "pjit", "256", ZERO_3, SLOW),
        case("h100:64", "pjit", "331", ZERO_3, SLOW),
    ],
)
def test_a_step_has_the_collectives_of_its_strategy(gpu: Compile, setting: Setting):
    assert_collectives(setting, gpu(setting))


def large(target: str, engine: str, *marks: Any, **options: Any) -> Any:
    return case(target, engine, "1024", ZERO_3, *marks, length=1024, **options)
