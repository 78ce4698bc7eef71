"""What XLA:GPU makes of a step, for H100s that are not there: collectives, memory, and transfers beside products.

Skipped where the ``compilers`` extra is not installed. Nothing runs: these tests say what was compiled, not how fast it
is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.planning import Workload, make_plan, resolve_models
from bridge.sharding import ShardingPolicy, UnitPolicy
from tests.jax_impl.compilers.conftest import Compile
from tests.jax_impl.compilers.expected import (
    GATHER,
    SCATTER,
    ZERO_3,
    assert_as_much_overlap_as_by_hand,
    assert_collectives,
    assert_no_more_memory_than_by_hand,
    by_hand,
    case,
    wrong,
)
from tests.support.compilers.setting import SIZES, Setting

SLOW = pytest.mark.slow
ALL_REDUCED = wrong("pjit under optim: whole gradients are all-reduced and then cut: twice the bytes")


@pytest.mark.parametrize(
    "setting",
    [
        case("h100:8", "shard_map", "331", "no_shard"),
        case("h100:8", "shard_map", "331", "optim", stacked=True),
        case("h100:8", "shard_map", "256", "optim_grads", microbatches=3, recompute=True),
        case("h100:8", "shard_map", "331", microbatches=3, stacked=True),
        case("h100:64", "shard_map", "331", ZERO_3, SLOW, recompute=True),
        case("h100:64", "shard_map", "256", "hsdp", inner=8, stacked=True),
        case("h100:64", "shard_map", "331", "hfsdp", inner=8),
        case("h100:8", "shard_map", "256", ZERO_3, SLOW),
        case("h100:8", "shard_map", "331", ZERO_3, SLOW, recompute=True, stacked=True),
        case("h100:64", "shard_map", "256", ZERO_3, SLOW, microbatches=2),
        case("h100:8", "pjit", "256", "no_shard", SLOW),
        case("h100:8", "pjit", "256", "optim", ALL_REDUCED),
        case("h100:8", "pjit", "256", "optim_grads", microbatches=2),
        case("h100:8", "pjit", "256", ZERO_3, SLOW),
        case("h100:8", "pjit", "331", ZERO_3, SLOW, recompute=True),
        case("h100:64", "pjit", "256", stacked=True),
        case("h100:8", "pjit", "256", ZERO_3, SLOW, stacked=True, recompute=True, microbatches=2),
        case("h100:64", "pjit", "256", ZERO_3, SLOW),
        case("h100:64", "pjit", "331", ZERO_3, SLOW),
    ],
)
def test_a_step_has_the_collectives_of_its_strategy(gpu: Compile, setting: Setting):
    assert_collectives(setting, gpu(setting))


NOTHING_BETWEEN = wrong("nothing is scheduled between the start of a gather and its end")
AT_ONCE = wrong(
    "the last unit is gathered for its backward at once, with nothing to run beside: 62 % against 67 %"
)
REDUCED_ALONE = wrong("nothing is scheduled between the start of a reduction and its end")
# As by hand, where XLA gathers embedding and head each when it is used.
APART = ("embed", "layers/*", "lm_head")


def large(target: str, engine: str, *marks: Any, **options: Any) -> Any:
    return case(target, engine, "1024", ZERO_3, *marks, length=1024, **options)


@pytest.mark.parametrize(
    "setting",
    [
        large("h100:64", "shard_map"),
        large("h100:64", "pjit"),
        large("h100:8", "shard_map", SLOW),
        large("h100:8", "pjit", SLOW),
        large("h100:64", "shard_map", SLOW, stacked=True),
        large("h100:64", "pjit", SLOW, stacked=True),
        *(
            large("h100:64", engine, SLOW, stacked=stacked, recompute=True)
            for engine in ("shard_map", "pjit")
            for stacked in (False, True)
        ),
    ],
)
def test_a_step_needs_no_more_memory_than_one_by_hand(gpu: Compile, setting: Setting):
    assert_no_more_memory_than_by_hand(gpu(setting), gpu(by_hand(setting)))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_the_plan_knows_the_memory_of_prefetch(gpu: Compile, tmp_path: Path, recompute: bool):
    sizes = tmp_path / "sizes.toml"
    sizes.write_text("[model]\n" + "".join(f"{key} = {value}\n" for key, value in SIZES["1024"].items()))
    (model,) = resolve_models(f"decoder:{sizes}", ["jax"]).values()
    units = (UnitPolicy("layers.*", recompute=recompute), UnitPolicy(""))
    planned, compiled = [], []
    for prefetch in (0, 1):
        plan = make_plan(model, ShardingPolicy(units, prefetch=prefetch), 64, "jax", Workload(1, 64))
        # Main weights are arguments of the program, and it has no moments.
        planned.append(plan.peak.total - plan.at_rest.main_weights.allocated - plan.at_rest.moments.allocated)
        setting = Setting(
            "h100:64", "shard_map", "1024", rows=1, length=64, recompute=recompute, prefetch=prefetch
        )
        compiled.append(gpu(setting).temporary)
    assert planned == pytest.approx(compiled, rel=0.10)
    # Else a plan that knew nothing of prefetch would agree, too.
    assert compiled[1] > 1.15 * compiled[0]


@pytest.mark.parametrize(
    "setting",
    [
        large("h100:64", "shard_map", units=APART),
        large("h100:64", "pjit", NOTHING_BETWEEN),
        large("h100:8", "shard_map", SLOW, AT_ONCE, units=APART),
        large("h100:8", "pjit", SLOW, NOTHING_BETWEEN),
        *(
            large("h100:64", engine, SLOW, NOTHING_BETWEEN, stacked=True, recompute=recompute)
            for engine in ("shard_map", "pjit")
            for recompute in (False, True)
        ),
    ],
)
def test_gathers_run_beside_products_as_in_a_step_by_hand(gpu: Compile, setting: Setting):
    assert_as_much_overlap_as_by_hand(gpu(setting), gpu(by_hand(setting)), (GATHER,))


@pytest.mark.parametrize(
    "setting",
    [
        large("h100:64", "shard_map"),
        large("h100:64", "pjit"),
        large("h100:8", "shard_map", SLOW, units=APART),
        large("h100:8", "pjit", SLOW, REDUCED_ALONE),
    ],
)
def test_reductions_run_beside_products_as_in_a_step_by_hand(gpu: Compile, setting: Setting):
    assert_as_much_overlap_as_by_hand(gpu(setting), gpu(by_hand(setting)), (SCATTER,))
