"""A search finds what trying all of its space finds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.sharding import ShardingPolicy
from bridge.planning import (
    CostPlan,
    PlanError,
    Workload,
    load_policy,
    make_plan,
    parse_policy,
    resolve_models,
)
from bridge.planning.answers.changes import variants
from bridge.planning.answers.comparison import compare, fits_within
from bridge.planning.answers.search import (
    FewestDevices,
    Finding,
    LargestBatch,
    device_counts,
    fewest_devices,
    largest_batch,
    search,
)
from bridge.planning.answers.search_report import as_json, only_file, policy_file
from bridge.planning.models.formulas import FormulaSegment
from bridge.planning.models.model import Model, Parameter
from bridge.planning.models.shipped_models import shipped_model
from tests.support.examples import examples

LAYERS = 3
MODEL = Model.of(
    "small",
    [
        Parameter("embed.weight", (96, 40)),
        *(Parameter(f"layers.{k}.{name}", (56, 40)) for k in range(LAYERS) for name in ("up", "down")),
    ],
    [
        FormulaSegment("embed", working=40),
        *(FormulaSegment(f"layers.{k}", input=40, saved=200, working=90) for k in range(LAYERS)),
        FormulaSegment("", input=40, saved=96, saved_bytes=400, working=100),
    ],
)
MODELS = {"torch": MODEL, "jax": MODEL}
WORK = Workload(1, 16)
LADDERS = {
    1: ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    2: ("no_shard", "optim", "optim_grads", "hsdp", "hfsdp", "everything"),
}
EVERYTHING = "".join(f'{key} = ["shard", "shard"]\n' for key in ("parameters", "gradients", "optimizer"))


def text(mesh: str, compute: str, strategy: str, recompute: bool) -> str:
    narrow = 'compute = "bfloat16"\nreduce = "float32"\n' if compute == "bfloat16" else ""
    chosen = EVERYTHING if strategy == "everything" else f'strategy = "{strategy}"\n'
    layers = f'[[unit]]\nmatch = "layers.*"\nrecompute = {str(recompute).lower()}\n{chosen}'
    return f'[mesh]\n{mesh}\n[precision]\n{narrow}{layers}[[unit]]\nmatch = ""\n{chosen}'


def planned(runtime: str, policy: ShardingPolicy, devices: int, work: Workload) -> CostPlan:
    return make_plan(MODELS[runtime], policy, devices, runtime, work)


def tried(
    base: tuple[str, str, str, bool], devices: int, usable: int, runtimes: tuple[str, ...]
) -> list[tuple[int, int, int, ShardingPolicy]]:
    """Changes, bytes sent, peak and policy of all policies of the space that fit."""
    outcomes = []
    ndim = base[0].count("=")
    meshes = (
        [base[0]] if ndim == 1 else [f'out = "all"\ndp = {n}' for n in range(2, devices) if devices % n == 0]
    )
    ladder = LADDERS[ndim]
    space = itertools.product(
        meshes,
        dict.fromkeys((base[1], "bfloat16")),
        ladder[ladder.index(base[2]) :],
        dict.fromkeys((base[3], True)),
    )
    for point in space:
        changed = sum(mine != its for mine, its in zip(point, base, strict=True))
        policy = parse_policy(text(*point), "mine.toml")
        plans = [planned(runtime, policy, devices, WORK) for runtime in runtimes]
        peak = max(plan.peak.total for plan in plans)
        if peak <= usable:
            outcomes.append((changed, max(plan.traffic.wire_bytes() for plan in plans), peak, policy))
    return sorted(outcomes, key=lambda outcome: outcome[:3])


def searched(
    policy: ShardingPolicy, devices: int, memory: int, models: dict[str, Model] = MODELS, **options: Any
) -> Finding:
    work, reserve = options.pop("work", WORK), options.pop("reserve", 0)
    comparison = compare(models, [policy], [devices], work, memory, reserve)

    def plan(runtime: str, policy: ShardingPolicy, devices: int, work: Workload) -> CostPlan:
        return make_plan(models[runtime], policy, devices, runtime, work)

    (answer,) = search(comparison, [policy], plan, **options)
    return answer


@st.composite
def questions(draw: st.DrawFn) -> tuple[tuple[str, str, str, bool], int, int, tuple[str, ...]]:
    ndim = draw(st.sampled_from([1, 2]))
    devices = draw(st.sampled_from([4, 6, 8, 16]))
    mesh = 'dp = "all"' if ndim == 1 else 'out = "all"\ndp = 2'
    base = (
        mesh,
        draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.sampled_from(LADDERS[ndim])),
        draw(st.booleans()),
    )
    runtimes = draw(st.sampled_from([("torch",), ("jax",), ("torch", "jax")]))
    return base, devices, draw(st.integers(80_000, 400_000)), runtimes


@examples(25)
@given(question=questions())
def test_the_fewest_changes_are_those_that_trying_all_finds(
    question: tuple[tuple[str, str, str, bool], int, int, tuple[str, ...]],
) -> None:
    base, devices, usable, runtimes = question
    expected = tried(base, devices, usable, runtimes)
    answer = searched(parse_policy(text(*base), "mine.toml"), devices, usable, dict.fromkeys(runtimes, MODEL))
    if expected and expected[0][0] == 0:
        assert (answer.fits, answer.ways, answer.nearest) == (True, (), None)
        return
    # A device may hold less than a peak.
    plans = [planned(runtime, parse_policy(text(*base), "mine.toml"), devices, WORK) for runtime in runtimes]
    assert answer.fits is (False if any(plan.least > usable for plan in plans) else None)
    least = [outcome for outcome in expected if outcome[0] == expected[0][0]]
    assert [(len(way.changes), way.sent, way.peak) for way in answer.ways] == [
        outcome[:3] for outcome in least
    ]
    assert {way.policy for way in answer.ways} == {outcome[3] for outcome in least}
    assert (answer.nearest is None) == bool(expected)


def test_the_questions_have_all_kinds_of_answers() -> None:
    """Else the test above could pass where nothing is ever found."""
    every = tried(('out = "all"\ndp = 2', "float32", "no_shard", False), 16, 10**9, ("torch", "jax"))
    counts = {
        min((changed for changed, _, peak, _ in every if peak <= memory), default=None)
        for memory in range(80_000, 400_000, 1_000)
    }
    assert counts == {None, 0, 1, 2, 3}


@pytest.mark.slow
@examples(25)
@given(
    strategy=st.sampled_from(LADDERS[1]),
    recompute=st.booleans(),
    runtime=st.sampled_from(["torch", "jax"]),
    usable=st.integers(100_000, 3_000_000),
    microbatches=st.integers(1, 2),
)
def test_the_largest_batch_is_the_one_that_trying_all_finds(
    strategy: str, recompute: bool, runtime: str, usable: int, microbatches: int
) -> None:
    policy = parse_policy(text('dp = "all"', "float32", strategy, recompute), "mine.toml")
    plan = planned(runtime, policy, 4, Workload(1, 16, microbatches))
    fitting = [
        batch
        for batch in range(1, 200)
        if planned(runtime, policy, 4, Workload(batch, 16, microbatches)).peak.total <= usable
    ]
    assert len(fitting) < 199
    batch = largest_batch(plan, usable).batch
    if batch is None:
        # Not even one sequence has a peak that fits, and what must be there does.
        assert not fitting
        assert fits_within(plan, usable) is None
    else:
        assert batch == max(fitting, default=0)


@pytest.mark.fast_cases("torch-decoder:quick")
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "decoder:quick"])
@pytest.mark.parametrize("runtime", ["torch", "jax"])
def test_the_peak_never_falls_when_the_batch_grows(name: str, runtime: str) -> None:
    (model,) = resolve_models(name, [runtime]).values()
    traced = name.startswith("decoder")
    for policy in ("no_shard", "mixture") if traced else ("no_shard", "zero2", "fsdp_bf16", "mixture"):
        for microbatches in (1, 2):
            peaks = [
                make_plan(
                    model, load_policy(policy), 8, runtime, Workload(batch, 48, microbatches)
                ).peak.total
                for batch in ((1, 2, 3) if traced else range(1, 7))
            ]
            assert peaks == sorted(peaks)


@examples(20)
@given(
    mesh=st.sampled_from(
        ['dp = "all"', 'out = "all"\ndp = 2', 'out = "all"\ndp = 3', "dp = 12", "out = 3\ndp = 4"]
    ),
    strategy=st.sampled_from(["no_shard", "optim", "optim_grads_params"]),
    runtime=st.sampled_from(["torch", "jax"]),
    usable=st.integers(60_000, 500_000),
)
def test_the_fewest_devices_are_those_that_trying_all_finds(
    mesh: str, strategy: str, runtime: str, usable: int
) -> None:
    policy = parse_policy(text(mesh, "float32", strategy, False), "mine.toml")
    fitting = []
    for devices in range(1, 257):
        try:
            plan = planned(runtime, policy, devices, WORK)
        except PlanError:
            continue
        if plan.peak.total <= usable and (devices in (1, 2, 3, 4, 6, 12) or devices % 8 == 0):
            fitting.append(devices)
    fewest = fewest_devices(planned, runtime, policy, WORK, usable, 8).devices
    tried_too = [count for count in fitting if count in set(device_counts(policy, 8))]
    assert fewest == min(tried_too, default=None) or (not tried_too and (fewest or 512) > 256)


def test_numbers_of_devices_are_parts_of_a_node_then_nodes_then_eight_a_doubling() -> None:
    def counts(mesh: str, node: int) -> list[int]:
        return list(device_counts(parse_policy(f'[mesh]\n{mesh}\n[[unit]]\nmatch = ""\n', "x"), node))

    plain = counts('dp = "all"', 8)
    assert plain[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert plain[-2:] == [15 * 1024, 16 * 1024]
    assert [count for count in plain if 128 <= count <= 256] == [128, 144, 160, 176, 192, 208, 224, 240, 256]
    assert plain == sorted(set(plain))
    assert counts('out = "all"\ndp = 4', 8)[:4] == [4, 8, 16, 24]
    assert counts('out = "all"\ndp = 3', 8)[:5] == [3, 6, 12, 24, 48]
    assert counts('out = "all"\ndp = 16', 8)[:2] == [16, 32]
    assert counts("dp = 12", 8) == [12]


def test_a_lower_bound_never_answers_yes() -> None:
    unknown = replace(shipped_model("llama3-8b"), activations=())
    known = shipped_model("llama3-8b")
    for models in ({"torch": unknown}, {"torch": known, "jax": unknown}):
        answer = searched(load_policy("no_shard"), 8, 80 * 10**9, models)
        assert answer.fits is False
        assert answer.ways == ()
        assert answer.nearest is not None
        assert answer.nearest.bound == "lower"
        assert "unknown, because the peak is incomplete; the fewest bytes at rest are" in answer.summary()
        (batch,) = (batch for batch in answer.batches if models[batch.runtime] is unknown)
        assert batch.batch == 0
        fits = searched(load_policy("fsdp"), 8, 10**12, models)
        assert fits.fits is None
        assert [batch.batch for batch in fits.batches if models[batch.runtime] is unknown] == [None]
        (fewest,) = (count for count in fits.fewest if models[count.runtime] is unknown)
        assert fewest == FewestDevices(fewest.runtime, None, 1)
        assert policy_file(fits, "m") is None
    # Of fewer devices the bound says no.
    bound = make_plan(unknown, load_policy("fsdp"), 4, "torch", Workload()).peak.total
    (fewest,) = searched(load_policy("fsdp"), 8, bound, {"torch": unknown}).fewest
    assert (fewest.devices, fewest.not_below) == (None, 4)


def test_recomputation_is_of_the_outer_of_units_inside_each_other() -> None:
    model = shipped_model("llama3-8b")
    changed = {
        variant.changes: variant.policy
        for variant in variants(load_policy("mixture"), model, 8)
        if len(variant.changes) == 1
    }
    changed_policy = changed["recompute layers.*",]
    assert {unit.match: unit.recompute for unit in changed_policy.units} == {
        "layers.*.mlp": True,
        "layers.*": True,
        "embed": False,
        "": False,
    }
    # What is sharded more than a rung stays as it is.
    raised = changed["strategy optim_grads",]
    assert [unit.chosen.name for unit in raised.units] == ["optim_grads_params"] * 2 + ["optim_grads"] * 2


@pytest.mark.slow
def test_the_file_is_the_policy_that_was_found(tmp_path: Any) -> None:
    answer = searched(load_policy("no_shard"), 8, 80 * 10**9, {"torch": shipped_model("llama3-8b")})
    written = only_file([answer], "llama3-8b")
    path = tmp_path / "found.toml"
    path.write_text(written)
    assert load_policy(path) == answer.ways[0].policy
    (again,) = compare(
        {"torch": shipped_model("llama3-8b")}, [load_policy(path)], [8], WORK, 80 * 10**9, 0
    ).plans
    assert again.peak.total == answer.ways[0].peak
    with pytest.raises(PlanError, match=r"--save: expected one policy, .* got 2 searches"):
        only_file([answer, answer], "llama3-8b")
    nothing = searched(load_policy("no_shard"), 8, 10**9, {"torch": shipped_model("llama3-8b")})
    with pytest.raises(
        PlanError, match=r"--save: no_shard.toml on 8 devices, .* no set of changes is known to fit"
    ):
        only_file([nothing], "llama3-8b")
    (document,) = as_json([nothing], "llama3-8b")
    assert (document["ways"], document["file"]) == ([], None)
    assert document["nearest"]["peak"] > 10**9


def test_another_inner_axis_keeps_the_number_of_devices() -> None:
    for outer, meshes in (("4", {(4, 2), (2, 4)}), ('"all"', {("all", 2), ("all", 4)})):
        policy = parse_policy(text(f"out = {outer}\ndp = 2", "float32", "hfsdp", False), "mine.toml")
        assert {tuple(variant.policy.mesh.values()) for variant in variants(policy, MODEL, 8)} == meshes


def test_model_axes_stay_as_they_are() -> None:
    model = shipped_model("llama3-8b")
    for policy, meshes in (
        (load_policy("fsdp_tp"), {(("dp", "all"), ("tp", 2))}),
        (
            replace(
                load_policy("hsdp"),
                mesh={"out": "all", "dp": 2, "tp": 2},
                parallel=load_policy("fsdp_tp").parallel,
            ),
            {(("out", "all"), ("dp", count), ("tp", 2)) for count in (2, 4)},
        ),
    ):
        varied = list(variants(policy, model, 16))
        assert {variant.policy.axes for variant in varied} == meshes
        assert all(variant.policy.parallel == policy.parallel for variant in varied)
        for variant in varied:
            make_plan(model, variant.policy, 16, "torch", Workload(1, 16))


@pytest.mark.slow
def test_an_upper_bound_never_answers_no() -> None:
    model, policy = shipped_model("llama3-8b"), load_policy("fsdp_tp")
    plan = make_plan(model, policy, 16, "torch", Workload())
    assert plan.peak_is_upper_bound
    # Less than the bound, and more than what is there without activations.
    usable = plan.peak.total - plan.peak.terms["activations"] // 2
    answer = searched(policy, 16, usable, {"torch": model}, work=Workload())
    assert answer.fits is None
    assert answer.batches == (LargestBatch("torch", None),)
    (fewest,) = answer.fewest
    assert fewest.not_below is not None
    assert fewest.not_below <= 16
    assert answer.ways[0].peak <= usable
    more = searched(policy, 16, 2 * plan.peak.total, {"torch": model}, work=Workload())
    (batch,) = more.batches
    assert batch.batch is not None
    assert batch.batch >= 1
    nothing = searched(policy, 16, plan.at_rest.main_weights.allocated * 4, {"torch": model}, work=Workload())
    assert nothing.nearest is not None
    assert nothing.nearest.bound == "upper"
    assert "no set of changes is known to fit; the lowest peak is" in nothing.summary()
