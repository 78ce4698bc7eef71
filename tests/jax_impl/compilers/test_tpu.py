"""What XLA:TPU makes of a step, for TPUs that are not there: collectives, memory, and transfers beside products.

A compilation takes a minute, and libtpu serves one process at a time. Skipped where the ``compilers`` extra is not
installed, or another process holds libtpu.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
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
    assert_gathers,
    assert_no_more_memory_than_by_hand,
    assert_payload_travels,
    assert_reduce_scatters,
    by_hand,
    case,
    wrong,
)
from tests.jax_impl.compilers.updates import (
    assert_gradients_leave,
    assert_planned,
    assert_streamed,
    assert_units_travel,
)
from tests.support.compilers.setting import Setting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SQUARE = wrong("over both axes of a square torus XLA:TPU reduces whole buffers, and cuts them")
CUBE = wrong("over all three axes of a torus XLA:TPU makes an all-reduce of every gather, of any shape")
ALL_REDUCED = wrong("pjit: gradients are all-reduced and then cut")
ALONE = wrong("a smaller share of gathers than by hand is asynchronous, and no reduction")


APART = ("embed", "layers/*", "lm_head")
IN_THE_ROOT = wrong("1.6 of a step by hand: both tables are gathered as one array, beside the logits")


def tpu_case(target: str, engine: str, size: str, *marks: Any, strategy: str = ZERO_3, **options: Any) -> Any:
    return case(target, engine, size, strategy, *marks, **{"length": 256, **options})


@pytest.mark.parametrize(
    "setting",
    [
        tpu_case("v5e:4x4", "shard_map", "37", align=1),
        tpu_case("v5e:4x4", "shard_map", "37", align=1, dtype="bfloat16", microbatches=2),
        tpu_case("v5p:4x4x4", "shard_map", "37", CUBE, align=1),
        tpu_case("v5p:4x4x4", "shard_map", "37", align=1, strategy="hfsdp", inner=4),
        tpu_case("v5e:4x4", "shard_map", "256"),
        tpu_case("v5e:4x4", "shard_map", "256", stacked=True),
        tpu_case("v5e:4x4", "shard_map", "331"),
        tpu_case("v5e:4x4", "shard_map", "331", align=1),
        tpu_case("v5e:4x4", "shard_map", "256", tensors=4),
        tpu_case("v5e:4x4", "shard_map", "256", tensors=2, stacked=True, recompute=True, microbatches=2),
    ],
)
def test_every_gather_is_one_whatever_the_alignment(tpu: Compile, setting: Setting):
    assert_gathers(setting, tpu(setting))


@pytest.mark.parametrize(
    "setting",
    [
        tpu_case("v5e:4x4", "shard_map", "256", strategy="hfsdp", inner=4),
        tpu_case("v5e:4x4", "shard_map", "256", SQUARE),
    ],
)
def test_reductions_over_one_axis_of_the_torus_are_reduce_scatters(tpu: Compile, setting: Setting):
    assert_reduce_scatters(setting, tpu(setting))


@pytest.mark.parametrize("setting", [tpu_case("v5e:4x4", "pjit", "256", ALL_REDUCED)])
def test_a_step_has_the_collectives_of_its_strategy(tpu: Compile, setting: Setting):
    assert_collectives(setting, tpu(setting))


@pytest.mark.parametrize(
    "setting",
    [
        tpu_case("v5e:4x4", "shard_map", "256"),
        tpu_case("v5e:4x4", "shard_map", "512", units=APART, length=512),
        tpu_case("v5e:4x4", "shard_map", "512", IN_THE_ROOT, length=512),
        tpu_case("v5p:4x4x4", "shard_map", "512", units=APART, length=512),
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


@pytest.mark.parametrize(
    "setting",
    [
        Setting("v5e:2x2", "shard_map", "1024x6", offload=1.0),
        Setting("v5e:2x2", "shard_map", "1024x6", offload=0.5),
    ],
    ids=str,
)
def test_moments_travel_while_others_are_updated(tpu: Compile, setting: Setting, tmp_path: Path):
    assert_streamed(setting, tpu(setting), tiles=1.01)
    assert_planned(setting, tpu(setting), 4, tmp_path, tiles=1.01)


@pytest.mark.parametrize(
    "setting",
    [
        tpu_case("v5e:4x4", "shard_map", "256", gather="mxfp8"),
        tpu_case("v5e:4x4", "pjit", "256", gather="float8_e4m3fn"),
    ],
)
def test_what_travels_of_float8_weights_is_their_payload(tpu: Compile, setting: Setting):
    assert_payload_travels(setting, tpu(setting))


def test_units_come_from_the_hosts_memory_one_by_one(tpu: Compile):
    setting = Setting("v5e:2x2", "shard_map", "256x12", rows=1, length=64)
    plain = tpu(setting)
    assert_units_travel(tpu(dataclasses.replace(setting, weights_on_host=True)), plain, 4)


@wrong("XLA:TPU holds all gradients until the end of the program, where memory is not short")
def test_gradients_leave_for_the_hosts_memory_one_by_one(tpu: Compile):
    setting = Setting("v5e:2x2", "shard_map", "256x12", rows=1, length=64)
    both = tpu(dataclasses.replace(setting, weights_on_host=True, update="host"))
    assert_gradients_leave(both, tpu(setting))
    assert_units_travel(both, tpu(setting), 5)


@pytest.mark.parametrize("moments", ["float32", "float8_e4m3fn"])
def test_the_host_updates_what_lies_there_and_nothing_of_it_comes_to_a_device(tpu: Compile, moments: str):
    """One program of the host, without collectives, changes all keys in their place and reads the gradients."""
    compiled = tpu(
        Setting(
            "v5e:2x2",
            "shard_map",
            "1024x6",
            offload=1.0,
            weights_on_host=True,
            update="host",
            moments=(moments, moments),
        )
    )
    assert compiled.by_host == 1
    assert compiled.transfers == ()
    # With the step count, and the gradients.
    whole = sum(compiled.travelling) + sum(4 * stored.size // 4 for stored in compiled.stored)
    assert whole <= compiled.host <= 1.01 * whole
    assert compiled.arguments < 2**12
    largest = max(compiled.travelling)
    assert compiled.temporary < min(largest / 8, 2**18)
