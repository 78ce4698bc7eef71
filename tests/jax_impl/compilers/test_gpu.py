"""What XLA:GPU makes of a step, for H100s that are not there: collectives, memory, and transfers beside products.

Skipped where the ``compilers`` extra is not installed. Nothing runs: these tests say what was compiled, not how fast it
is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bridge.core.sharding import ShardingPolicy, UnitPolicy
from bridge.planning import Workload, make_plan, resolve_models
from tests.jax_impl.compilers.conftest import Compile
from tests.jax_impl.compilers.expected import (
    GATHER,
    REDUCE,
    SCATTER,
    ZERO_3,
    assert_as_much_overlap_as_by_hand,
    assert_collectives,
    assert_no_more_memory_than_by_hand,
    assert_parts_travel,
    assert_payload_travels,
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
from tests.support.compilers.setting import SIZES, Setting

SLOW = pytest.mark.slow


@pytest.mark.fast_cases("h100:8-shard_map-331-optim_grads_params-k3-stacked")
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
        case("h100:8", "pjit", "256", "optim"),
        case("h100:8", "pjit", "256", "optim", SLOW, microbatches=3),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        case("h100:8", "shard_map", "256", tensors=2),
        case("h100:64", "shard_map", "256", ZERO_3, SLOW, tensors=4, stacked=True, microbatches=2),
    ],
)
def test_parts_of_what_a_model_axis_cuts_travel_alone(gpu: Compile, setting: Setting):
    assert_parts_travel(setting, gpu(setting))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        case("h100:8", "shard_map", "256", gather="mxfp8", dtype="bfloat16"),
        case("h100:8", "shard_map", "256", ZERO_3, SLOW, gather="float8_e4m3fn", stacked=True),
        case("h100:8", "shard_map", "331", ZERO_3, SLOW, gather="mxfp8"),
        case("h100:8", "pjit", "256", gather="mxfp8", dtype="bfloat16"),
        case("h100:8", "pjit", "256", ZERO_3, SLOW, gather="float8_e4m3fn", stacked=True),
    ],
)
def test_what_travels_of_float8_weights_is_their_payload(gpu: Compile, setting: Setting):
    assert_payload_travels(setting, gpu(setting))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "share"),
    [
        (Setting("h100:8", "shard_map", gather="float8_e4m3fn", dtype="bfloat16", products=True), 1),
        pytest.param(Setting("h100:8", "pjit", gather="float8_e4m3fn", products=True), 1, marks=SLOW),
        pytest.param(
            Setting("a100:8", "shard_map", gather="float8_e4m3fn", dtype="bfloat16", products=True),
            0,
            marks=SLOW,
        ),
    ],
    ids=str,
)
def test_projections_multiply_in_float8_forward_and_for_their_inputs(
    gpu: Compile, setting: Setting, share: int
):
    projections = 7 * SIZES[setting.size]["n_layers"] + 1
    assert gpu(setting).products == share * 2 * projections
    assert_payload_travels(setting, gpu(setting))


AT_ONCE = wrong(
    "the last unit is gathered for its backward at once, with nothing to run beside: 62 and 54 % against 67 %"
)
WHERE_COMPUTED = wrong("pjit: XLA reduces in the unit itself, with less beside: 38 % against 48 %")
# As by hand, where XLA gathers embedding and head each when it is used.
APART = ("embed", "layers/*", "lm_head")


def large(target: str, engine: str, *marks: Any, **options: Any) -> Any:
    return case(target, engine, "1024", ZERO_3, *marks, length=1024, **options)


def llama(target: str, engine: str, *marks: Any, units: tuple[str, ...] = APART) -> Any:
    options: dict[str, Any] = {
        "stacked": True,
        "recompute": True,
        "dtype": "bfloat16",
        "length": 1024,
        "units": units,
    }
    return case(target, engine, "Llama-3-8B", ZERO_3, *marks, **options)


IN_ROOT = wrong(
    "recomputed, tables in the root are there all the time, beside two layers with prefetch: up to 1.5 times by hand"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        large("h100:64", "shard_map"),
        large("h100:64", "pjit"),
        large("h100:64", "pjit", units=APART),
        large("h100:64", "shard_map", units=APART, stacked=True),
        large("h100:8", "shard_map", SLOW),
        large("h100:8", "pjit", SLOW),
        large("h100:64", "shard_map", SLOW, stacked=True),
        large("h100:64", "pjit", SLOW, stacked=True),
        large("h100:64", "shard_map", SLOW, recompute=True),
        large("h100:64", "shard_map", SLOW, stacked=True, recompute=True),
        large("h100:64", "pjit", SLOW, recompute=True),
        large("h100:64", "pjit", SLOW, stacked=True, recompute=True),
        large("h100:8", "shard_map", SLOW, stacked=True),
        *(
            large("h100:8", engine, SLOW, IN_ROOT, stacked=True, recompute=True)
            for engine in ("shard_map", "pjit")
        ),
        llama("h100:64", "shard_map", SLOW, IN_ROOT, units=()),
        *(
            large(target, engine, SLOW, units=APART, stacked=stacked, recompute=recompute)
            for target in ("h100:8", "h100:64")
            for engine in ("shard_map", "pjit")
            for stacked in (False, True)
            for recompute in (False, True)
            if target == "h100:8" or recompute or (engine, stacked) == ("pjit", True)
        ),
        *(llama("h100:8", engine, SLOW) for engine in ("shard_map", "pjit")),
    ],
)
def test_a_step_needs_no_more_memory_than_one_by_hand(gpu: Compile, setting: Setting):
    assert_no_more_memory_than_by_hand(gpu(setting), gpu(by_hand(setting)))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_the_plan_knows_the_memory_of_prefetch(gpu: Compile, tmp_path: Path, recompute: bool):
    def planned_and_compiled(size: str) -> tuple[list[int], list[int]]:
        """Bytes of a step without and with prefetch."""
        sizes = tmp_path / "sizes.toml"
        sizes.write_text("[model]\n" + "".join(f"{key} = {value}\n" for key, value in SIZES[size].items()))
        (model,) = resolve_models(f"decoder:{sizes}", ["jax"]).values()
        units = (UnitPolicy("layers.*", recompute=recompute), UnitPolicy(""))
        planned, compiled = [], []
        for prefetch in (0, 1):
            plan = make_plan(model, ShardingPolicy(units, prefetch=prefetch), 64, "jax", Workload(1, 64))
            # Main weights are arguments of the program, and it has no moments.
            at_rest = plan.at_rest.main_weights.allocated + plan.at_rest.moments.allocated
            planned.append(plan.peak.total - at_rest)
            setting = Setting(
                "h100:64", "shard_map", size, rows=1, length=64, recompute=recompute, prefetch=prefetch
            )
            compiled.append(gpu(setting).temporary)
        return planned, compiled

    # With large tables the peak is the reduction of their gradients, with and without prefetch.
    planned, compiled = planned_and_compiled("1024")
    assert planned == pytest.approx(compiled, rel=0.10)
    # With small tables the peak is in the layers, where XLA adds cuBLAS's workspace of 34 MB.
    # The difference that is planned is an upper bound.
    planned, compiled = planned_and_compiled("1024x6")
    assert 0 < compiled[1] - compiled[0] <= planned[1] - planned[0]


@pytest.mark.fast_cases("h100:64-shard_map-1024-optim_grads_params-k1-stacked-units")
@pytest.mark.parametrize(
    "setting",
    [
        large("h100:64", "shard_map", units=APART),
        large("h100:64", "pjit", units=APART),
        large("h100:64", "shard_map", units=APART, stacked=True),
        large("h100:64", "pjit", SLOW, units=APART, stacked=True),
        large("h100:8", "shard_map", SLOW, AT_ONCE, units=APART),
        large("h100:8", "pjit", SLOW, AT_ONCE, units=APART),
        *(
            large(target, engine, SLOW, units=APART, stacked=True, recompute=recompute)
            for target in ("h100:8", "h100:64")
            for engine in ("shard_map", "pjit")
            for recompute in (False, True)
            if target == "h100:8" or recompute
        ),
        *(llama("h100:8", engine, SLOW) for engine in ("shard_map", "pjit")),
    ],
)
def test_gathers_run_beside_products_as_in_a_step_by_hand(gpu: Compile, setting: Setting):
    assert_as_much_overlap_as_by_hand(gpu(setting), gpu(by_hand(setting)), (GATHER,))


@pytest.mark.parametrize(
    "setting",
    [
        large("h100:64", "shard_map", SLOW),
        large("h100:64", "shard_map", units=APART, stacked=True),
        large("h100:8", "shard_map", SLOW, units=APART),
        large("h100:8", "pjit", SLOW, WHERE_COMPUTED, units=APART),
        llama("h100:8", "shard_map", SLOW),
        llama("h100:8", "pjit", SLOW, WHERE_COMPUTED),
    ],
)
def test_reductions_run_beside_products_as_in_a_step_by_hand(gpu: Compile, setting: Setting):
    assert_as_much_overlap_as_by_hand(gpu(setting), gpu(by_hand(setting)), (SCATTER,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        case("h100:8", "shard_map", "1024", "no_shard", length=1024, units=APART),
        case("h100:8", "shard_map", "1024", "optim", SLOW, length=1024, units=APART),
    ],
)
def test_transfers_before_and_after_all_units_run_beside_them(gpu: Compile, setting: Setting):
    # Beside them no product runs: the first gathers, and the reductions of the first layer and the embedding.
    assert gpu(setting).overlap(GATHER, SCATTER, REDUCE) >= 0.45


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=SLOW)])
def test_all_transfers_of_scanned_layers_run_beside_products(gpu: Compile, recompute: bool):
    (setting,) = large("h100:8", "shard_map", units=APART, stacked=True, recompute=recompute).values
    compiled = gpu(setting)
    (layer,) = (stored for stored in compiled.stored if stored.layers > 1)
    each = [
        collective
        for collective in compiled.collectives
        if layer.size in (array.size for array in collective.arrays)
    ]
    # No product runs while the first unit of a step is gathered or the last one is reduced.
    overlapped = {
        operation: sum(
            collective.times for collective in each if collective.kind == operation and collective.overlaps
        )
        for operation in (GATHER, SCATTER)
    }
    assert overlapped == {GATHER: 2 * layer.layers - 1, SCATTER: layer.layers - 1}


@pytest.mark.parametrize("stacked", [pytest.param(False, marks=SLOW), True])
def test_a_step_without_backward_gathers_ahead(gpu: Compile, stacked: bool):
    (setting,) = large("h100:8", "shard_map", units=APART, stacked=stacked, forward=True).values
    compiled = gpu(setting)
    # No product precedes the gathers of the root's scale, of the embedding and of the first layer.
    overlapped = [
        collective for collective in compiled.collectives if collective.kind == GATHER and collective.overlaps
    ]
    gathered = Counter(
        size
        for collective in overlapped
        for array in collective.arrays
        for size in [array.size] * collective.times
    )
    head = max(stored.size for stored in compiled.stored)
    layer = SIZES["1024"]["n_layers"] - 1
    assert sorted(gathered.values()) == [1, layer]
    assert gathered[head] == 1
    assert (
        sum(collective.times for collective in compiled.collectives if collective.kind == GATHER) == layer + 4
    )


@pytest.mark.fast_cases("h100:8-shard_map-1024x6-optim_grads_params-k1-offload0.5-bfloat16-bfloat16")
@pytest.mark.parametrize(
    "setting",
    [
        Setting("h100:8", "shard_map", "1024x6", offload=1.0),
        Setting("h100:8", "shard_map", "1024x6", offload=0.5, moments=("bfloat16", "bfloat16")),
    ],
    ids=str,
)
def test_moments_travel_while_others_are_updated(gpu: Compile, setting: Setting, tmp_path: Path):
    assert_streamed(setting, gpu(setting))
    assert_planned(setting, gpu(setting), 8, tmp_path)


@pytest.mark.slow
def test_units_come_from_the_hosts_memory_and_their_gradients_leave_one_by_one(gpu: Compile):
    setting = Setting("h100:2", "shard_map", "256x12", rows=1, length=64)
    plain = gpu(setting)
    weights = gpu(dataclasses.replace(setting, weights_on_host=True))
    assert_units_travel(weights, plain, 3)
    both = gpu(dataclasses.replace(setting, weights_on_host=True, update="host"))
    assert_units_travel(both, plain, 5)
    assert_gradients_leave(both, plain)


@pytest.mark.slow
def test_bytes_of_scaled_moments_are_planned(gpu: Compile, tmp_path: Path):
    setting = Setting("h100:8", "shard_map", "1024x6", offload=0.5, moments=("float8_e4m3fn", "float8_e5m2"))
    assert_planned(setting, gpu(setting), 8, tmp_path)
