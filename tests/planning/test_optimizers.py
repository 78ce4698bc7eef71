"""State of every optimizer at rest, to the byte what each runtime keeps, and what a runtime cannot run."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import pytest
from flax import nnx

import jax_impl
import jax_impl.models
from bridge.compiling import compiled_leg
from bridge.compiling.compiled import check_compiled
from bridge.compiling.target_step import StepRequest
from bridge.planning import PlanError, Workload, load_policy, make_plan, parse_policy, resolve_models
from bridge.planning.answers.comparison import compare
from bridge.planning.answers.document import document
from bridge.planning.answers.report import notes, overview
from bridge.planning.cost.adapt import with_frozen
from bridge.planning.cost.moments import staged
from bridge.planning.cost.optimizers import CONSTANTS, NAMES, OF_MAIN_WEIGHTS, Optimizer, parse_optimizer
from bridge.planning.models.model import Model, Parameter
from bridge.planning.models.shipped_models import shipped_model
from tests.planning.test_plan_jax import Whole, frozen_paths
from tests.planning.test_plan_peak import WITHIN, policy
from tests.planning.test_plan_torch import model_of, policy_text
from tests.support.parity.optimizer_runs import peak_bytes, state_bytes, update_bytes
from tests.support.parity.plan_runs import Spec
from tests.support.ranks import RankGroup

# Matrices that Adafactor factors in both runtimes and such that optax does not, a stack, a row, a vector, a frozen one.
PART = [
    Spec((130, 128)),
    Spec((12, 5)),
    Spec((2, 3, 8)),
    Spec((1, 9)),
    Spec((7,)),
    Spec((5, 7), frozen=True),
]
OWN = [Spec((9, 4)), Spec((2, 144, 132))]
MESHES = [
    ((2, 2), "hfsdp"),
    *(
        pytest.param(mesh, strategy, marks=pytest.mark.slow)
        for mesh, strategy in (((3,), "optim_grads_params"), ((2, 2), "hsdp"), ((2,), "no_shard"))
    ),
]


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
@pytest.mark.parametrize(
    ("name", "dtypes", "offload"),
    [
        ("adamw", ("float32", "float32"), 0.0),
        ("adamw", ("bfloat16", "bfloat16"), 0.0),
        ("adamw", ("float16", "float8_e4m3fn"), 0.0),
        ("adamw", ("float32", "float32"), 1.0),
        ("adamw", ("bfloat16", "float32"), 0.3),
        ("sgd", ("float32", "float32"), 0.0),
        ("sgd-momentum", ("float32", "float32"), 0.0),
        ("sgd-momentum", ("float8_e4m3fn", "float32"), 0.3),
        ("muon", ("float32", "float32"), 0.0),
        ("muon", ("bfloat16", "float8_e5m2"), 0.0),
        ("muon", ("float8_e4m3fn", "float16"), 0.3),
        ("adafactor", ("float32", "float32"), 0.0),
    ],
)
def test_state_at_rest_in_torch(
    ranks: RankGroup,
    mesh: tuple[int, ...],
    strategy: str,
    name: str,
    dtypes: tuple[str, str],
    offload: float,
) -> None:
    assert_state_in_torch(ranks, mesh, policy_text(mesh, strategy, strategy, {}), name, dtypes, offload)


@pytest.mark.parametrize(
    ("name", "dtypes", "offload"),
    [
        ("adamw", ("float32", "float32"), 0.0),
        ("adamw", ("bfloat16", "float8_e4m3fn"), 0.3),
        ("sgd-momentum", ("float32", "float32"), 0.0),
        ("muon", ("bfloat16", "float32"), 0.0),
        ("adafactor", ("float32", "float32"), 0.0),
    ],
)
def test_state_at_rest_of_bfloat16_main_weights_in_torch(
    ranks: RankGroup, name: str, dtypes: tuple[str, str], offload: float
) -> None:
    text = policy_text((2,), "optim_grads_params", "optim", {"main": "bfloat16"})
    assert_state_in_torch(ranks, (2,), text, name, dtypes, offload)


def assert_state_in_torch(
    ranks: RankGroup,
    mesh: tuple[int, ...],
    text: str,
    name: str,
    dtypes: tuple[str, str],
    offload: float,
) -> None:
    world = math.prod(mesh)
    chosen = Optimizer(name, dtypes, Fraction(offload))
    measured = ranks.run(world, state_bytes, text, [PART, PART], OWN, name, dtypes, offload)
    for rank, nbytes in enumerate(measured):
        plan = make_plan(
            model_of([PART, PART], OWN),
            parse_policy(text, "test"),
            world,
            "torch",
            Workload(),
            device=rank,
            optimizer=chosen,
        )
        rest = plan.at_rest
        assert (rest.moments.allocated, rest.host) == (nbytes["device"], nbytes["host"])
        assert (rest.moments.allocated, rest.host) == (nbytes["report"], nbytes["report host"])
        assert (rest.host > 0) == (offload > 0)


def held(tree: Any, device: jax.Device) -> tuple[int, int]:
    """Bytes on the device and in the host's memory; counters and constants are left out."""
    on_device_and_host = [0, 0]
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not jax.tree_util.keystr(path).endswith(CONSTANTS):
            for shard in leaf.addressable_shards:
                if shard.device == device:
                    on_device_and_host[leaf.sharding.memory_kind == "pinned_host"] += shard.data.nbytes
    return on_device_and_host[0], on_device_and_host[1]


@pytest.mark.each_value
@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
@pytest.mark.parametrize(
    ("name", "dtypes", "offload"),
    [
        ("adamw", ("bfloat16", None), 0),
        ("adamw", ("float8_e5m2", "float8_e4m3fn"), 0),
        ("adamw", ("float16", "bfloat16"), 0.4),
        ("adamw", (None, None), 1),
        ("adamw", (None, None), 0.5),
        ("sgd", (None, None), 0),
        ("sgd-momentum", (None, None), 0),
        ("sgd-momentum", ("bfloat16", None), 0),
        ("sgd-momentum", ("float8_e4m3fn", None), 0.3),
        ("lion", ("bfloat16", None), 0),
        ("lion", (None, None), 1),
        ("adafactor", (None, None), 0),
        ("muon", (None, None), 0),
        ("muon", ("bfloat16", None), 1),
        ("muon", ("float8_e4m3fn", "float16"), 0.3),
        ("muon", ("float32", "float8_e5m2"), 0),
    ],
)
def test_state_at_rest_in_jax(
    mesh: tuple[int, ...], strategy: str, name: str, dtypes: tuple[str | None, str | None], offload: float
) -> None:
    text = policy_text(mesh, strategy, strategy, {})
    chosen = Optimizer(name, dtypes, Fraction(offload))
    plan, weights = jax_impl.fully_shard(
        Whole([PART, PART, PART], OWN),
        jax_impl.data_parallel_mesh({f"axis{number}": size for number, size in enumerate(mesh)}),
        jax_impl.ShardingPolicy.parse(text, "test"),
        frozen=frozen_paths([PART, PART, PART], OWN),
    )
    state = jax_impl.init_state(
        plan, weights, chosen.transformation(), offload=jax_impl.Offload(offload) if offload else None
    )
    report = jax_impl.memory_report(plan, state).devices
    for number, device in enumerate(plan.mesh.devices.flat):
        planned = make_plan(
            model_of([PART, PART, PART], OWN),
            parse_policy(text, "test"),
            math.prod(mesh),
            "jax",
            Workload(),
            device=number,
            optimizer=chosen,
        ).at_rest
        assert (planned.moments.allocated, planned.host) == held(state.opt_state, device)
        assert (planned.host > 0) == (offload > 0)
        if name in OF_MAIN_WEIGHTS:
            assert planned.host == report[number].host
            assert planned.moments.real == report[number].moments
            padding = planned.main_weights.padding + planned.moments.padding
            assert padding == report[number].padding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "length"),
    [
        ("adamw", "bfloat16", 16),
        *(
            pytest.param(name, dtype, length, marks=pytest.mark.slow)
            for name, dtype, length in (
                ("adamw", "float8_e4m3fn", 16),
                ("adamw", "bfloat16", 256),
                ("sgd", "float32", 16),
                ("sgd-momentum", "float32", 256),
                ("sgd-momentum", "float8_e4m3fn", 16),
                ("muon", "float32", 16),
                ("muon", "float8_e4m3fn", 16),
                ("adafactor", "float32", 256),
            )
        ),
    ],
)
def test_peak_of_the_decoder_in_torch(ranks: RankGroup, name: str, dtype: str, length: int) -> None:
    text = policy("optim_grads_params", "float32", False)
    chosen = Optimizer(name, (dtype, dtype) if name in OF_MAIN_WEIGHTS else (None, None))
    model = resolve_models("decoder:default", ["torch"])["torch"]
    plan = make_plan(model, parse_policy(text, "test"), 2, "torch", Workload(1, length), optimizer=chosen)
    peaks = ranks.run(2, peak_bytes, text, name, dtype, [], 1, length)
    assert plan.peak.total == pytest.approx(max(peaks), rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "dtypes", "offload"),
    [
        ("optim_grads_params", ("float32", "float32"), 0.0),
        pytest.param("optim_grads_params", ("float32", "float32"), 1.0, marks=pytest.mark.slow),
        pytest.param("optim_grads_params", ("float8_e4m3fn", "float32"), 0.0, marks=pytest.mark.slow),
        pytest.param("no_shard", ("float32", "float32"), 0.0, marks=pytest.mark.slow),
    ],
)
def test_matrices_that_an_update_of_muon_brings_together_in_torch(
    ranks: RankGroup, strategy: str, dtypes: tuple[str, str], offload: float
) -> None:
    text = policy_text((2,), strategy, strategy, {})
    # More than one round of large and small ones, on two ranks.
    parts = [[Spec((1536, 1024))] * 3, [Spec((1536, 1024))] * 3, [Spec((3, 512, 700)), Spec((1024,))]]
    chosen = Optimizer("muon", dtypes, Fraction(offload))
    plan = make_plan(
        model_of(parts, []), parse_policy(text, "test"), 2, "torch", Workload(), optimizer=chosen
    )
    measured = max(ranks.run(2, update_bytes, text, parts, "muon", dtypes, offload))
    assert staged(chosen, plan.placed(), "torch", 0) == pytest.approx(measured, rel=WITHIN)


@pytest.mark.slow
def test_the_peak_of_frozen_layers_is_an_upper_bound(ranks: RankGroup) -> None:
    text = policy("optim_grads_params", "float32", False)
    model = resolve_models("decoder:default", ["torch"])["torch"]
    whole, part = (
        make_plan(variant, parse_policy(text, "test"), 2, "torch", Workload(8, 64)).peak.total
        for variant in (model, with_frozen(model, ["layers.*"]))
    )
    peaks = ranks.run(2, peak_bytes, text, "adamw", "float32", ["layers."], 8, 64)
    assert max(peaks) < part < whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "lion" else name for name in NAMES]
)
def test_the_plan_agrees_with_what_xla_compiles(name: str) -> None:
    chosen = parse_policy(policy("optim", "float32", False), "test")
    check = check_compiled("decoder:default", chosen, 4, Workload(8, 64), optimizer=Optimizer(name))
    assert {line.what: (line.planned, line.compiled) for line in check.lines if line.agrees is False} == {}
    agreed = {line.what for line in check.lines if line.agrees}
    assert "moments, step counter" in agreed
    # What an update holds that looks at shapes is XLA's choice, beside what it brings together.
    assert ("peak" in agreed) == (name not in ("adafactor", "muon"))
    peak = next(line for line in check.lines if line.what == "peak")
    assert peak.planned <= (1 + WITHIN) * peak.compiled


@pytest.mark.parametrize("name", ["sgd-momentum", "muon"])
def test_state_of_scanned_layers_at_rest_in_jax(name: str) -> None:
    moments = ("float8_e4m3fn", "float16")
    chosen = Optimizer(name, moments)
    text = policy("optim_grads_params", "float32", False)
    model = StepRequest("decoder:quick", Workload(1, 16), ("layers",)).abstract_model()
    mesh = jax_impl.data_parallel_mesh({"dp": 4})
    sharding = jax_impl.ShardingPolicy.parse(text, "test")
    plan = jax_impl.plan_sharding(model, mesh, sharding, stacked=("layers",))
    state = jax_impl.abstract_state(plan, chosen.transformation())
    counters = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state.opt_state)
        if jax.tree_util.keystr(path).endswith(CONSTANTS)
    ]
    planned = make_plan(
        resolve_models("decoder:quick", ["jax"], ("layers",))["jax"],
        parse_policy(text, "test"),
        4,
        "jax",
        Workload(),
        optimizer=chosen,
    )
    held = compiled_leg.held(jax.tree.leaves(state.opt_state)) - compiled_leg.held(counters)
    assert planned.at_rest.moments.allocated == held


def test_a_state_in_cpu_memory_is_no_part_of_the_device_s() -> None:
    models = {runtime: shipped_model("llama3-8b") for runtime in ("torch", "jax")}
    plain, moved = (
        compare(models, [load_policy("fsdp")], [2], Workload(1, 16), optimizer=optimizer)
        for optimizer in (Optimizer(), Optimizer(offload=Fraction(1)))
    )
    for here, there in zip(plain.plans, moved.plans, strict=True):
        assert here.at_rest.host == there.at_rest.moments.allocated == 0
        assert there.at_rest.host == here.at_rest.moments.allocated
        assert here.at_rest.total == there.at_rest.total + there.at_rest.host
    torch_plan, jax_plan = moved.plans
    # Of three of 33 units at most there are moments on the device.
    largest = max(2 * 4 * group.size(1) for unit in jax_plan.units for group in unit.groups)
    assert largest < staged(jax_plan.optimizer, jax_plan.placed(), "jax", 0) <= 2.5 * largest
    assert jax_plan.peak.total < plain.plans[1].peak.total
    headings, rows = overview(moved)
    assert {row[headings.index("in CPU memory")] for row in rows} == {"32.1 GB"}
    assert "in CPU memory" not in overview(plain)[0]
    described = document(moved)
    assert described["plans"][0]["host"] == torch_plan.at_rest.host
    assert described["optimizer"] == {"name": "adamw", "moments": [None, None], "offload": 1.0}


def test_jax_brings_stacks_and_what_sees_parameters_at_once() -> None:
    model = shipped_model("llama3-8b")
    scanned = replace(model, stacks=("layers",))
    for variant, name, whole in ((model, "adamw", False), (scanned, "adamw", True), (model, "muon", True)):
        chosen = Optimizer(name, offload=Fraction(1))
        plan = make_plan(variant, load_policy("fsdp"), 8, "jax", Workload(1, 16), optimizer=chosen)
        staged_bytes = staged(chosen, plan.placed(), "jax", 0)
        assert (staged_bytes > 0.8 * plan.at_rest.host) == whole
        assert staged_bytes <= plan.at_rest.host


def test_a_share_of_a_stack_is_all_or_nothing_of_it_in_jax() -> None:
    scanned = replace(shipped_model("llama3-8b"), stacks=("layers",))
    for share, expected in ((Fraction(1, 10), 0), (Fraction(6, 10), 1)):
        chosen = Optimizer(offload=share)
        plan = make_plan(scanned, load_policy("fsdp"), 8, "jax", Workload(1, 16), optimizer=chosen)
        layers = [unit for unit in plan.units if unit.paths[0]]
        assert {bool(unit.on_host) for unit in layers} == {bool(expected)}


def test_pytorch_stages_two_batches_of_a_state_in_cpu_memory() -> None:
    layers = [Parameter(f"layers.{k}.weight", (1536, 2048)) for k in range(8)]
    model = Model.of("m", layers)
    for moments, offload, each in (
        ((None, None), 1, 2 * 8),
        # The moments that travel are converted to the dtype of the weights.
        (("bfloat16", "bfloat16"), 1, 2 * 4 + 8),
        (("bfloat16", "float32"), 0, 4),
        ((None, None), 0, 0),
    ):
        chosen = Optimizer("adamw", moments, Fraction(offload))
        plan = make_plan(
            model, parse_policy('[[unit]]\nmatch = ""\n', "x"), 1, "torch", Workload(), optimizer=chosen
        )
        # A batch has 2^20 elements of the tensors, which have more.
        assert staged(chosen, plan.placed(), "torch", 0) == each << 20


@pytest.mark.parametrize(
    ("name", "moments", "each"),
    [
        # AdamW's kernel takes bfloat16 if weights, gradients and moments have it.
        ("adamw", "bfloat16", 0),
        # Weights and gradients are converted.
        ("adamw", "float32", 4 + 4),
        # Momentum, too.
        ("sgd-momentum", "bfloat16", 4 + 4 + 4),
    ],
)
def test_pytorch_converts_a_batch_of_bfloat16_main_weights(name: str, moments: str, each: int) -> None:
    model = Model.of("m", [Parameter("weight", (1536, 2048))])
    chosen = Optimizer(name, (moments, moments))
    policy = parse_policy('[precision]\nmain = "bfloat16"\ngrad = "bfloat16"\n[[unit]]\nmatch = ""\n', "x")
    plan = make_plan(model, policy, 1, "torch", Workload(), optimizer=chosen)
    # A batch has 2^20 elements.
    assert staged(chosen, plan.placed(), "torch", 0) == each << 20


def test_rows_with_a_scale_that_lie_together_make_a_larger_batch_in_pytorch() -> None:
    # 16 rows of odd length are the fewest whose elements fill vector registers.
    model = Model.of("m", [Parameter("weight", (64, 100_001))])
    chosen = Optimizer("adamw", ("float8_e4m3fn", None))
    plan = make_plan(
        model, parse_policy('[[unit]]\nmatch = ""\n', "x"), 1, "torch", Workload(), optimizer=chosen
    )
    assert staged(chosen, plan.placed(), "torch", 0) == 4 * 16 * 100_001


def test_a_share_of_the_state_splits_equal_units() -> None:
    plan = make_plan(
        shipped_model("llama3-8b"),
        load_policy("fsdp"),
        8,
        "torch",
        Workload(),
        optimizer=Optimizer(offload=Fraction(1, 2)),
    )
    whole = make_plan(shipped_model("llama3-8b"), load_policy("fsdp"), 8, "torch", Workload())
    assert sum(unit.count for unit in plan.units) == 33
    assert plan.at_rest.host + plan.at_rest.moments.allocated == whole.at_rest.moments.allocated
    # To within one tensor, of 8 bytes an element on 8 devices.
    largest = max(parameter.numel for parameter in plan.model.parameters)
    assert abs(plan.at_rest.host - whole.at_rest.moments.allocated / 2) <= 1.01 * largest


@pytest.mark.parametrize(
    ("optimizer", "runtime", "reason"),
    [
        (Optimizer("lion"), "torch", "torch: lion: torch.optim has none"),
        (
            Optimizer("adafactor", ("bfloat16", None)),
            "torch",
            "torch: --moments: adafactor keeps its state",
        ),
        (Optimizer("sgd", offload=Fraction(1)), "torch", "torch: --offload: only the state of adamw"),
        (Optimizer("adafactor", ("bfloat16", None)), "jax", "jax: --moments: adafactor has no first moment"),
        (
            Optimizer("lion", ("float8_e5m2", None)),
            "jax",
            "jax: --moments: optax has no scales for float8_e5m2",
        ),
        (Optimizer("sgd", ("bfloat16", None)), "jax", "jax: --moments: sgd has no first moment"),
    ],
)
def test_what_a_runtime_cannot_run_is_left_out_with_the_reason(
    optimizer: Optimizer, runtime: str, reason: str
) -> None:
    models = {runtime: shipped_model("llama3-8b") for runtime in ("torch", "jax")}
    with pytest.raises(PlanError, match=re.escape(reason)):
        compare({runtime: models[runtime]}, [load_policy("fsdp")], [8], Workload(), optimizer=optimizer)
    if optimizer.why_not("torch" if runtime == "jax" else "jax") is None:
        comparison = compare(models, [load_policy("fsdp")], [8], Workload(), optimizer=optimizer)
        assert {plan.runtime for plan in comparison.plans} == {"torch", "jax"} - {runtime}
        assert any(line.startswith(reason) for line in notes(comparison))


def test_refusals_are_true() -> None:
    """A test that goes red when a runtime learns what a plan refuses."""
    import torch

    assert not hasattr(torch.optim, "Lion")


def test_an_optimizer_that_looks_at_shapes_gives_a_lower_bound_in_jax() -> None:
    models = {runtime: shipped_model("llama3-8b") for runtime in ("torch", "jax")}
    comparison = compare(
        models, [load_policy("fsdp")], [8], Workload(), 10**12, optimizer=Optimizer("adafactor")
    )
    assert {plan.runtime: comparison.fits(plan) for plan in comparison.plans} == {"torch": True, "jax": None}
    assert any(line.startswith("jax: adafactor looks at shapes") for line in notes(comparison))
    with pytest.raises(PlanError, match="plan it without --stacked"):
        make_plan(
            replace(models["jax"], stacks=("layers",)),
            load_policy("fsdp"),
            8,
            "jax",
            Workload(),
            optimizer=Optimizer("adafactor"),
        )


@pytest.mark.parametrize("chosen", [Optimizer("adafactor"), Optimizer("adamw", ("float16", None))])
def test_a_state_by_rows_of_parameters_that_a_model_axis_cuts_is_refused(chosen: Optimizer) -> None:
    model = shipped_model("llama3-8b")
    with pytest.raises(
        PlanError, match=r"fsdp_tp.toml: expected an optimizer that treats all elements alike, .* tp"
    ):
        make_plan(model, load_policy("fsdp_tp"), 8, "torch", Workload(1, 16), optimizer=chosen)
    make_plan(model, load_policy("fsdp_tp"), 8, "torch", Workload(1, 16), optimizer=Optimizer("sgd-momentum"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("lion", None, None), Optimizer("lion")),
        (("adamw", "bfloat16", None), Optimizer("adamw", ("bfloat16", "bfloat16"))),
        (
            ("adamw", "float16, float8_e4m3fn", "12.5%"),
            Optimizer("adamw", ("float16", "float8_e4m3fn"), Fraction(1, 8)),
        ),
        (("adamw", None, "0"), Optimizer()),
    ],
)
def test_words_of_the_command(words: tuple[str, str | None, str | None], expected: Optimizer) -> None:
    assert parse_optimizer(*words) == expected
    assert Optimizer.from_json(expected.to_json()) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("adam", None, None), "--optimizer: expected one of adamw, sgd, .* got 'adam'"),
        (("adamw", "int8", None), "--moments: expected one of float32, .* got 'int8'"),
        (("adamw", "float32,float32,float32", None), "--moments: expected one or two dtypes"),
        (("adamw", None, "50"), "--offload: expected a share of the state such as 50% or 100%, got '50'"),
        (("adamw", None, "150%"), "--offload: expected 0 to 100%, got 150%"),
    ],
)
def test_bad_words_of_the_command(words: tuple[str, str | None, str | None], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_optimizer(*words)


def test_only_moments_that_an_optimizer_has_are_named() -> None:
    assert str(Optimizer("sgd-momentum", ("bfloat16", "bfloat16"))) == "sgd-momentum, moments in bfloat16"
    assert str(Optimizer("adamw", ("bfloat16", "float32"))) == "adamw, moments in bfloat16 and float32"


def test_frozen_patterns_are_those_of_the_runtime() -> None:
    model = resolve_models("decoder:quick", ["jax"])["jax"]
    nnx_model = jax_impl.models.Decoder(jax_impl.models.DecoderConfig(), rngs=nnx.Rngs(0))
    for pattern in ("layers.*", "embed.*", "*norm*", "layers.0.*"):
        plan = jax_impl.plan_sharding(
            nnx_model, jax_impl.data_parallel_mesh({"dp": 1}), frozen=[pattern.replace(".", "/")]
        )
        frozen = {
            path.replace("/", ".") for path, parameter in plan.parameters.items() if not parameter.trainable
        }
        ours = {
            parameter.path
            for parameter in with_frozen(model, [pattern]).parameters
            if not parameter.trainable
        }
        assert ours == {path for path in frozen if path in {parameter.path for parameter in model.parameters}}
        assert ours
    with pytest.raises(
        PlanError, match=r"--frozen: expected patterns of parameter paths, but 'head.*' matches none"
    ):
        with_frozen(model, ["head.*"])
    with pytest.raises(PlanError, match="--frozen: expected some parameters to train, got none left"):
        with_frozen(model, ["*"])


def test_float8_groups_of_a_unit_are_offloaded_each_by_itself() -> None:
    text = policy_text((4,), "optim_grads_params", "optim_grads_params", {"gather": "mxfp8"})
    chosen = Optimizer("adamw", ("float32", "float32"), Fraction(1, 2))
    plan, weights = jax_impl.fully_shard(
        Whole([PART, PART, PART], OWN),
        jax_impl.data_parallel_mesh({"axis0": 4}),
        jax_impl.ShardingPolicy.parse(text, "test"),
        frozen=frozen_paths([PART, PART, PART], OWN),
    )
    offload = jax_impl.Offload(0.5)
    state = jax_impl.init_state(plan, weights, chosen.transformation(), offload=offload)
    model, policy = model_of([PART, PART, PART], OWN), parse_policy(text, "test")
    for number, device in enumerate(plan.mesh.devices.flat):
        rest = make_plan(model, policy, 4, "jax", Workload(), device=number, optimizer=chosen).at_rest
        assert (rest.moments.allocated, rest.host) == held(state.opt_state, device)


def test_remainders_are_adamw_s_in_pytorch_and_nothing_in_jax() -> None:
    text = "[precision]\ncompute = 'bfloat16'\nstore_param_remainders = true\n"
    text += "[[unit]]\nmatch = ''\nstrategy = 'optim'\n"
    models = {runtime: shipped_model("llama3-8b") for runtime in ("torch", "jax")}
    policy, plain = (parse_policy(toml, "mine") for toml in (text, text.replace("= true", "= false")))
    comparison, expected = (compare(models, [chosen], [8], Workload(1, 16)) for chosen in (policy, plain))
    (here, jax_plan), (there, jax_plain) = comparison.plans, expected.plans
    saved = there.at_rest.main_weights.allocated - here.at_rest.main_weights.allocated
    assert saved * 2 == there.at_rest.main_weights.allocated
    assert there.at_rest.total - here.at_rest.total == saved
    assert (jax_plan.at_rest, jax_plan.peak) == (jax_plain.at_rest, jax_plain.peak)
    assert any(line.startswith("jax: store_param_remainders has no effect") for line in notes(comparison))
    with pytest.raises(PlanError, match="store_param_remainders: expected --optimizer adamw"):
        compare(models, [policy], [8], Workload(), optimizer=Optimizer("muon"))
    compare({"jax": models["jax"]}, [policy], [8], Workload(), optimizer=Optimizer("muon"))
