"""Plans by hand: the sums a person would do, warnings, comparisons, and what planning itself needs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.planning import (
    CostPlan,
    PlanError,
    Workload,
    load_policy,
    make_plan,
    parse_policy,
    resolve_models,
)
from bridge.planning.answers.comparison import compare
from bridge.planning.answers.document import document
from bridge.planning.answers.report import notes, overview
from bridge.planning.cost.mesh import MeshShape
from bridge.planning.cost.peak import TERMS
from bridge.planning.models.formulas import Attention
from bridge.planning.models.model import Model, Parameter
from bridge.planning.models.shipped_models import shipped_model
from bridge.planning.models.sizes import parse_bytes, parse_counts, parse_share

ROOT = Path(__file__).parents[2]


def policy(strategy: str, mesh: str = 'dp = "all"', precision: str = "") -> str:
    units = "".join(f'[[unit]]\nmatch = "{match}"\nstrategy = "{strategy}"\n' for match in ("layers.*", ""))
    return f"[mesh]\n{mesh}\n[precision]\n{precision}\n{units}"


# Rows of 4 and 8 elements: 128 elements a layer and 32 at the root divide evenly by 2, 4 and 8.
SMALL = Model.of(
    "small",
    [
        Parameter("embed.weight", (8, 4)),
        *(Parameter(f"layers.{k}.{name}", (8, 8)) for k in range(3) for name in ("up", "down")),
    ],
)
P = 3 * 128 + 32
# PyTorch's gradients have a flag for each of these and each shard.
PARAMETERS = 7


@pytest.mark.parametrize(
    ("strategy", "main", "gradients", "compute"),
    [
        ("no_shard", 4 * P, 4 * P, 2 * P),
        ("optim", P, P, 2 * P),
        ("optim_grads", P, P, 2 * P),
        ("optim_grads_params", P, P, 0),
    ],
)
def test_bytes_at_rest_are_those_of_the_design(
    strategy: str, main: int, gradients: int, compute: int
) -> None:
    mixed = parse_policy(policy(strategy, precision='compute = "bfloat16"'), "x")
    plan = make_plan(SMALL, mixed, 4, "torch", Workload())
    rest = plan.at_rest
    assert rest.by_kind() == {
        "main_weights": main,
        "moments": 2 * main,
        "gradients": gradients,
        "compute_weights": compute,
        "padding": 4 * PARAMETERS,
    }
    assert rest.total == 3 * main + gradients + compute + 4 * PARAMETERS
    assert make_plan(SMALL, mixed, 4, "jax", Workload()).at_rest.total == 3 * main
    assert [unit.count for unit in plan.units] == [3, 1]


@pytest.mark.parametrize(
    ("precision", "reduced", "kept"),
    [
        ("", "float32", 4),
        ('compute = "bfloat16"', "bfloat16", 4),
        ('compute = "bfloat16"\nreduce = "float32"\ngrad = "bfloat16"', "float32", 2),
    ],
)
def test_dtypes_that_are_left_out(precision: str, reduced: str, kept: int) -> None:
    plan = make_plan(SMALL, parse_policy(policy("optim", precision=precision), "x"), 4, "torch", Workload())
    dtypes = {call.dtype for call in plan.traffic.calls if call.kind == "reduce_scatter"}
    assert dtypes == {reduced}
    assert plan.at_rest.gradients.real == kept * P // 4


def test_no_shard_in_one_dtype_computes_with_the_main_weights() -> None:
    plan = make_plan(SMALL, parse_policy(policy("no_shard"), "x"), 4, "torch", Workload())
    assert plan.at_rest.compute_weights.allocated == 0


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # gathers, scatters, all-reduces: bytes of whole buffers, in bfloat16 and float32
        ("no_shard", (0, 0, 4 * P)),
        ("optim", (2 * P, 4 * P, 0)),
        ("optim_grads", (2 * P, 3 * 4 * P, 0)),
        ("optim_grads_params", (3 * 2 * 2 * P, 3 * 4 * P, 0)),
    ],
)
@pytest.mark.parametrize("runtime", ["torch", "jax"])
def test_traffic_of_three_microbatches(strategy: str, expected: tuple[int, ...], runtime: str) -> None:
    mixed = policy(strategy, precision='compute = "bfloat16"\nreduce = "float32"')
    traffic = make_plan(SMALL, parse_policy(mixed, "x"), 4, runtime, Workload(microbatches=3)).traffic
    sent = [traffic.nbytes(collective) for collective in ("all_gather", "reduce_scatter", "all_reduce")]
    gathers, scatters, reduces = expected
    if runtime == "torch":
        # Four units are reduced once or in every microbatch.
        scatters += traffic.count("reduce_scatter") // 4 * 4 * 4 * PARAMETERS
        reduces += 4 * PARAMETERS if reduces else 0
    assert sent == [gathers, scatters, reduces]
    assert traffic.wire_bytes() == round(3 / 4 * (gathers + scatters + 2 * reduces))
    assert traffic.loss == (runtime == "jax")


def test_traffic_by_axis_of_hfsdp() -> None:
    plan = make_plan(
        SMALL,
        parse_policy(policy("hfsdp", 'outer = 2\ninner = "all"'), "x"),
        8,
        "jax",
        Workload(microbatches=2),
    )
    traffic, units = plan.traffic, 4
    # Once a step over the outer axis, on shards of the inner one; every use over the inner axis.
    assert (traffic.count("all_gather", "outer"), traffic.nbytes("all_gather", "outer")) == (
        units,
        4 * P // 4,
    )
    assert (traffic.count("all_gather", "inner"), traffic.nbytes("all_gather", "inner")) == (
        4 * units,
        4 * 4 * P,
    )
    assert (traffic.count("reduce_scatter", "outer"), traffic.nbytes("reduce_scatter", "outer")) == (units, P)
    assert (traffic.count("reduce_scatter", "inner"), traffic.count("all_reduce")) == (2 * units, 0)
    assert traffic.wire_bytes("reduce_scatter", "outer") == P // 2


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=2))
def test_every_shard_lies_on_as_many_devices_as_the_other_axes_have(sizes: list[int]) -> None:
    mesh = MeshShape(tuple(f"axis{k}" for k in range(len(sizes))), tuple(sizes))
    for axes in range(mesh.ndim + 1):
        index = mesh.shard_by_device(axes)
        times = mesh.devices // mesh.shards(axes)
        assert np.array_equal(np.bincount(index), [times] * mesh.shards(axes))
    if len(sizes) == 2:
        # A gather over the outer axis joins neighbouring shards.
        grid = mesh.shard_by_device(2).reshape(sizes)
        assert all(list(grid[:, n]) == list(range(n * sizes[0], (n + 1) * sizes[0])) for n in range(sizes[1]))


def test_the_fullest_device_is_the_one_that_is_reported() -> None:
    model = Model.of("m", [Parameter("a", (3, 5)), Parameter("b", (2,))])
    uneven = parse_policy('[[unit]]\nmatch = ""\n', "x")
    plan = make_plan(model, uneven, 4, "torch", Workload())
    totals = [make_plan(model, uneven, 4, "torch", Workload(), device=k).at_rest.total for k in range(4)]
    assert len(set(totals)) > 1
    assert plan.at_rest.total == max(totals) == totals[plan.device]


def test_large_padding_is_warned_of() -> None:
    model = Model.of("m", [Parameter("layers.0.w", (2, 999)), Parameter("head", (64, 64))])
    unaligned = policy("optim", 'dp = "all"\nalign = 1')
    plan = make_plan(model, parse_policy(unaligned, "x"), 8, "jax", Workload())
    (warning,) = plan.warnings()
    assert "unit layers.0: 300.0 % padding on 8 devices" in warning
    assert make_plan(model, parse_policy(policy("optim"), "x"), 2, "jax", Workload()).warnings() == []


def test_a_policy_that_does_not_fit_is_one_clear_error() -> None:
    fixed = parse_policy(policy("optim", "dp = 4"), "mine.toml")
    with pytest.raises(PlanError, match=r"mine.toml: \[mesh\]: expected axes of 8 devices"):
        make_plan(SMALL, fixed, 8, "jax", Workload())
    other = parse_policy(policy("optim").replace("layers.*", "blocks.*"), "mine.toml")
    with pytest.raises(PlanError, match=r"model small: mine\.toml: .*blocks"):
        make_plan(SMALL, other, 8, "jax", Workload())
    with pytest.raises(PlanError, match=r"mine\.toml"):
        parse_policy("[[unit]]\nmatch = 3", "mine.toml")
    with pytest.raises(PlanError, match="batch: expected an int >= 1, got 0"):
        Workload(batch=0)
    with pytest.raises(PlanError, match="device: expected one of 4, got 4"):
        make_plan(SMALL, fixed, 4, "jax", Workload(), device=4)


def test_scanned_layers_rest_and_travel_like_others_and_are_cut_alike() -> None:
    stacked = replace(SMALL, stacks=("layers",))
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        # In a loop nothing is gathered ahead.
        chosen = parse_policy(policy(strategy, "prefetch = 0"), "mine.toml")
        plain, scanned = (make_plan(model, chosen, 4, "jax", Workload(1, 1, 3)) for model in (SMALL, stacked))
        assert scanned.at_rest == plain.at_rest
        assert scanned.traffic == plain.traffic
        assert scanned.peak.total >= plain.peak.total
        assert (
            make_plan(stacked, chosen, 4, "torch", Workload()).peak
            == make_plan(SMALL, chosen, 4, "torch", Workload()).peak
        )
    alone = '[[unit]]\nmatch = "layers.1"\nstrategy = "optim"\n'
    root = '[[unit]]\nmatch = ""\n'
    for uneven in (policy("no_shard").replace("[[unit]]", alone + "[[unit]]", 1), alone + root):
        with pytest.raises(
            PlanError, match=r"one policy for all layers of the stack 'layers', .* for layers 1 and 0"
        ):
            make_plan(stacked, parse_policy(uneven, "mine.toml"), 4, "jax", Workload())
        make_plan(SMALL, parse_policy(uneven, "mine.toml"), 4, "jax", Workload())


@pytest.mark.parametrize("runtime", ["torch", "jax"])
def test_prefetch_adds_one_units_weights_and_gradients_to_the_peak(runtime: str) -> None:
    def planned(model: Model, strategy: str, line: str) -> CostPlan:
        return make_plan(model, parse_policy(policy(strategy, line), "x"), 4, runtime, Workload())

    serial, ahead, default = (
        planned(SMALL, "optim_grads_params", line) for line in ("prefetch = 0", "prefetch = 1", "align = 1")
    )
    assert [plan.prefetch for plan in (serial, ahead, default)] == [0, 1, 1]
    assert (serial.at_rest, serial.traffic) == (ahead.at_rest, ahead.traffic)
    added = {name: ahead.peak.terms[name] - serial.peak.terms[name] for name in TERMS}
    layer = 4 * 128
    # The worst moment comes a layer earlier, when that layer's gradients are not there yet.
    gradients = layer if runtime == "jax" else layer + 4 * 4 * 2
    moved = {"gathered_weights": layer, "gradient_buffers": gradients}
    if runtime == "torch":
        moved["gradients"] = -gradients // 4
    assert added == dict.fromkeys(TERMS, 0) | moved
    assert default.peak == ahead.peak
    stacked = replace(SMALL, stacks=("layers",))
    serial, ahead = (
        planned(stacked, "optim_grads_params", line) for line in ("prefetch = 0", "prefetch = 1")
    )
    more = ahead.peak.terms["gathered_weights"] - serial.peak.terms["gathered_weights"]
    assert more == layer
    # Whole weights are there anyway, and in JAX gradients that are whole until the end of the step, too.
    serial, ahead = (planned(SMALL, "optim", line) for line in ("prefetch = 0", "prefetch = 1"))
    assert ahead.peak.total - serial.peak.total == (gradients if runtime == "torch" else 0)


@pytest.mark.fast_cases("fsdp_tp", "mixture", "hfsdp", "zero1", "fsdp_bf16")
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "bridge" / "core" / "sharding" / "policies").glob("*.toml"))
)
def test_every_shipped_policy_plans_every_decoder(name: str) -> None:
    loaded = load_policy(name)
    # Model axes must divide widths, and of cut parameters a part is planned: ``test_plan_model_axes``.
    decoders = () if loaded.model_axes else resolve_models("decoder:quick").values()
    for model in (shipped_model("llama3-8b"), *decoders):
        for runtime in ("torch", "jax"):
            plan = make_plan(model, loaded, 8, runtime, Workload(1, 16))
            assert (plan.numel < model.numel) if loaded.model_axes else (plan.numel == model.numel)
            assert plan.peak.total >= plan.at_rest.total - plan.at_rest.gradients.allocated


def test_the_cheapest_that_fits() -> None:
    model = {"torch": shipped_model("llama3-8b")}
    policies = [load_policy(name) for name in ("no_shard", "zero1", "fsdp", "fsdp_bf16")]
    comparison = compare(model, policies, [8, 64], Workload(), parse_bytes("80GB"))
    fitting = {
        devices: {
            p.policy: p.traffic.wire_bytes()
            for p in comparison.plans
            if p.mesh.devices == devices and comparison.fits(p)
        }
        for devices in (8, 64)
    }
    for choice in comparison.choices:
        costs = fitting[choice.devices]
        assert choice.policy in costs
        assert costs[choice.policy] == min(costs.values())
    nothing = compare(model, policies, [8], Workload(), parse_bytes("1GB"))
    assert [choice.policy for choice in nothing.choices] == [None]
    assert not nothing.anything_fits
    assert compare(model, policies, [8], Workload()).choices == ()


def test_a_policy_fits_within_the_memory_less_the_reserve() -> None:
    models, policies = {"torch": shipped_model("llama3-8b")}, [load_policy("fsdp")]
    peak = compare(models, policies, [8], Workload()).plans[0].peak.total
    # The largest memory of which 9 tenths, rounded down, are just below the peak, and one byte more.
    short = -(-10 * peak // 9) - 1
    for memory, reserve, fits in (
        (short, Fraction(1, 10), None),
        (short + 1, Fraction(1, 10), True),
        (peak, Fraction(0), True),
        (peak - 1, Fraction(0), None),
    ):
        comparison = compare(models, policies, [8], Workload(), memory, reserve)
        assert comparison.fits(comparison.plans[0]) is fits
        assert comparison.anything_fits is bool(fits)
        written = document(comparison)
        assert (written["reserve"], written["plans"][0]["fits"]) == (float(reserve), fits)
        assert written["usable"] == int(memory * (1 - reserve))
        assert any(f"less {float(100 * reserve):g} % of reserve" in line for line in notes(comparison))
    assert not compare(models, policies, [8], Workload(), short).anything_fits
    assert document(compare(models, policies, [8], Workload()))["usable"] is None


def test_each_workload_has_a_choice_of_its_own() -> None:
    works = [Workload(1, 16), Workload(1, 16384)]
    comparison = compare(
        {"torch": shipped_model("llama3-8b")}, [load_policy("fsdp")], [8], works, parse_bytes("80GB")
    )
    assert [(choice.workload, choice.policy) for choice in comparison.choices] == [
        (works[0], "fsdp.toml"),
        (works[1], None),
    ]
    assert comparison.anything_fits


def test_a_lower_bound_says_no_or_nothing() -> None:
    policies = [load_policy(name) for name in ("no_shard", "fsdp")]
    known = shipped_model("llama3-8b")
    unknown = replace(known, activations=())
    for models in ({"torch": unknown}, {"torch": known, "jax": unknown}):
        comparison = compare(models, policies, [8], Workload(1, 16), parse_bytes("80GB"))
        assert {(p.policy, p.runtime): comparison.fits(p) for p in comparison.plans} == {
            ("no_shard.toml", runtime): False for runtime in models
        } | {("fsdp.toml", runtime): None if models[runtime] is unknown else True for runtime in models}
        (choice,) = comparison.choices
        assert (choice.policy, choice.unknown) == (None, ("fsdp.toml",))
        assert not comparison.anything_fits
        assert [entry["policy"] for entry in document(comparison)["cheapest"]] == [None]
        text = " ".join(notes(comparison))
        assert "unknown whether fsdp.toml fit" in text
        assert "cheapest that fits" not in text
        assert [row[-1] for row in overview(comparison)[1]][-1] == "unknown"


def test_notes_and_document_say_which_attention_is_counted() -> None:
    for asked, attentions in ((None, ("fused", "plain")), (Attention.fused, ("fused", "fused"))):
        comparison = compare(
            resolve_models("llama3-8b", attention=asked), [load_policy("fsdp")], [8], Workload()
        )
        (line,) = (note for note in notes(comparison) if note.startswith("attention: "))
        assert line.startswith(f"attention: {attentions[0]} in torch, {attentions[1]} in jax; ")
        assert tuple(entry["attention"] for entry in document(comparison)["plans"]) == attentions
    own = compare(resolve_models("decoder:quick", ["jax"]), [load_policy("fsdp")], [8], Workload(1, 16))
    assert not any(line.startswith("attention") for line in notes(own))
    assert document(own)["plans"][0]["attention"] is None


def test_a_policy_is_left_out_where_its_mesh_does_not_fit() -> None:
    fixed = parse_policy(policy("optim", "dp = 4"), "four.toml")
    comparison = compare(
        {"jax": SMALL}, [fixed, parse_policy(policy("optim"), "any.toml")], [4, 6], Workload()
    )
    assert [(p.policy, p.mesh.devices) for p in comparison.plans] == [
        ("four.toml", 4),
        ("any.toml", 4),
        ("any.toml", 6),
    ]
    assert "expected axes of 6 devices" in comparison.refused[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("80 GiB", 80 * 2**30),
        ("1.5kb", 1500),
        ("0.1TB", 10**11),
        ("12B", 12),
        ("7MiB", 7 * 2**20),
    ],
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "80 gigs", "-1GB", "1e3GB", "GB", "1..5GB", "٣GB"])
def test_bad_amounts_of_memory(text: str) -> None:
    with pytest.raises(PlanError, match="memory: expected an amount such as 80GB"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "hint"), [("80", "80GB"), (" 79.5 ", "79.5GB")])
def test_an_amount_of_memory_without_its_unit_is_refused(text: str, hint: str) -> None:
    with pytest.raises(
        PlanError, match=f"memory: expected an amount with its unit, got '{text}'; write {hint}"
    ):
        parse_bytes(text)


def test_shares_of_memory() -> None:
    shares = [parse_share(text) for text in ("10%", " 7.5 %", "0", "0%")]
    assert shares == [Fraction(1, 10), Fraction(3, 40), 0, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10", "a share with its %, got '10'; write 10%"),
        ("100%", "less than 100%, got '100%'"),
        ("-5%", "such as 10%, or 0, got '-5%'"),
        ("8GB", "such as 10%, or 0, got '8GB'"),
    ],
)
def test_bad_shares_of_memory(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"reserve: expected .*{message}"):
        parse_share(text)


def test_numbers_of_devices() -> None:
    assert parse_counts("8, 64,8") == (8, 64)
    for bad in ("", "8,,9", "0", "-8", "8;9", "1e3"):
        with pytest.raises(PlanError, match="devices: expected numbers such as 8,64,512"):
            parse_counts(bad)


LARGE = """
import resource, time
start = time.monotonic()
from bridge.planning import Workload, load_policy, make_plan, resolve_models
(model,) = resolve_models("llama3-405b", ["torch"]).values()
for name in ("fsdp", "zero1"):
    plan = make_plan(model, load_policy(name), 16384, "torch", Workload())
    plan.at_rest.total, plan.traffic.wire_bytes(), plan.peak.total
from tests.support.process_memory import status_bytes
print(status_bytes("VmHWM"), time.monotonic() - start)
"""


def test_a_405b_model_on_16384_devices_plans_in_under_a_gigabyte() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    peak, seconds = map(float, done.stdout.split())
    print(f"405B on 16,384 devices: {peak / 1e6:.0f} MB, {seconds:.1f} s")
    assert peak < 1e9


BOTH = ["torch", "torch_impl", "jax", "jaxlib", "flax", "optax", "orbax", "jax_impl"]
WITHOUT = """
import importlib.util, sys
sys.modules.update(dict.fromkeys({missing!r}))
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {missing!r} else find(name, *rest)
sys.argv = ["twinshard", "plan", "fsdp", "--model", {model!r}]
from bridge.commands.main import main
main()
"""


@pytest.mark.fast_cases(
    "missing0-llama3-8b-0-8,030,261,248 parameters",
    "missing2-decoder:quick-2-the decoder needs PyTorch or JAX, and neither is installed",
)
@pytest.mark.parametrize(
    ("missing", "model", "status", "expected"),
    [
        (BOTH, "llama3-8b", 0, "8,030,261,248 parameters"),
        (BOTH, "deepseek-v3", 0, "parameters"),
        (BOTH, "decoder:quick", 2, "the decoder needs PyTorch or JAX, and neither is installed"),
        (["torch"], "llama3-8b", 0, "parameters"),
        (["jax"], "llama3-8b", 0, "parameters"),
        (["torch"], "decoder:quick", 0, "jax"),
        (["jax"], "decoder:quick", 0, "torch"),
        (["jax"], "tests.planning.test_cost:nothing", 2, "can be imported"),
    ],
)
def test_shapes_need_no_framework_and_the_decoder_needs_one(
    missing: list[str], model: str, status: int, expected: str
) -> None:
    script = WITHOUT.format(missing=missing, model=model)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, done.stderr
    assert expected in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
