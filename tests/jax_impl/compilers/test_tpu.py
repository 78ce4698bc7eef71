"""What XLA:TPU makes of a step, for TPUs that are not there: collectives, memory, and transfers beside products.

A compilation takes a minute, and libtpu serves one process at a time. Skipped where the ``compilers`` extra is not
installed, or another process holds libtpu.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.jax_impl.compilers.conftest import Compile
from tests.jax_impl.compilers.expected import (
    GATHER,
    REDUCE,
    SCATTER,
    ZERO_3,
    assert_as_much_overlap_as_by_hand,
    assert_collectives,
    assert_no_more_memory_than_by_hand,
    by_hand,
    case,
    wrong,
)
from tests.support.compilers.setting import Setting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

UNALIGNED = wrong(
    "shards of no multiple of 128 elements: every gather and reduction is an all-reduce of all elements"
)
ALL_REDUCED = wrong("pjit: gradients are all-reduced and then cut")
ALONE = wrong("collectives are not asynchronous")


def tpu_case(target: str, engine: str, size: str, *marks: Any, **options: Any) -> Any:
    return case(target, engine, size, ZERO_3, *marks, length=256, **options)


@pytest.mark.parametrize(
    "setting",
    [
        tpu_case("v5e:4x4", "shard_map", "256", UNALIGNED),
        tpu_case("v5e:4x4", "shard_map", "256", UNALIGNED, stacked=True),
        tpu_case("v5e:4x4", "shard_map", "331", UNALIGNED),
        tpu_case("v5p:4x4x4", "shard_map", "256", UNALIGNED),
        tpu_case("v5e:4x4", "pjit", "256", ALL_REDUCED),
    ],
)
def test_a_step_has_the_collectives_of_its_strategy(tpu: Compile, setting: Setting):
    assert_collectives(setting, tpu(setting))


@pytest.mark.parametrize(
    "setting",
    [
        tpu_case("v5e:4x4", "shard_map", "256"),
        tpu_case("v5e:4x4", "pjit", "256", wrong("pjit: temporary bytes, 1.3 of a step by hand")),
    ],
)
def test_a_step_needs_no_more_memory_than_one_by_hand(tpu: Compile, setting: Setting):
    assert_no_more_memory_than_by_hand(tpu(setting), tpu(by_hand(setting)))


@pytest.mark.parametrize(
    "setting",
    [tpu_case("v5e:4x4", "shard_map", "256", ALONE), tpu_case("v5e:4x4", "pjit", "256", ALONE)],
)
def test_gathers_and_reductions_run_beside_products_as_in_a_step_by_hand(tpu: Compile, setting: Setting):
    assert_as_much_overlap_as_by_hand(tpu(setting), tpu(by_hand(setting)), (GATHER, SCATTER, REDUCE))
