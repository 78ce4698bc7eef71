"""Plans on meshes with model axes: the bytes and collectives of what the runtimes store and issue."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_impl
from bridge.core.sharding import ParallelPolicy, PrecisionPolicy, ShardingPolicy
from bridge.planning import PlanError, Workload, load_policy, make_plan, parse_policy, resolve_models
from bridge.planning.answers.comparison import compare
from bridge.planning.answers.document import document
from bridge.planning.answers.report import notes, overview
from bridge.planning.cost.adapt import with_node
from bridge.planning.cost.at_rest import at_rest
from bridge.planning.cost.mesh import MeshShape
from bridge.planning.cost.optimizers import Optimizer
from bridge.planning.models.model import Model, Parameter
from bridge.planning.models.shipped_models import shipped_model
from jax_impl.models import decoder as jax_decoder
from tests.planning.test_plan_jax import counted, expected
from tests.planning.test_plan_torch import PART, assert_collectives, model_of, policy_text
from tests.support.parity.plan_runs import KINDS, Spec, train, train_decoder
from tests.support.ranks import RankGroup

SIZES = {
    "vocab_size": 258,
    "d_model": 10,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 4,
    "d_ff": 6,
}
TWO = {"dp": 2, "tp": 2}


def fsdp_tp(**mesh: Any) -> ShardingPolicy:
    return replace(load_policy("fsdp_tp"), mesh=mesh)


def decoder(runtime: str, folder: Path) -> Model:
    lines = [f"{key} = {value}" for key, value in SIZES.items()]
    (folder / "sizes.toml").write_text("\n".join(["[model]", *lines]))
    return resolve_models(f"decoder:{folder / 'sizes.toml'}", [runtime])[runtime]


def assert_same(planned: Any, record: dict[str, Any]) -> None:
    memory, rest = record["memory"], planned.at_rest
    assert memory.main_weights == rest.main_weights.allocated
    assert memory.moments == rest.moments.allocated
    assert memory.gradients == rest.gradients.allocated
    assert memory.compute_weights == rest.compute_weights.allocated
    assert memory.total == rest.total
    assert_collectives(planned, record)
    layouts = [
        group.layout.fingerprint for unit in planned.units for _ in unit.paths for group in unit.groups
    ]
    assert sorted(record["fingerprints"]) == sorted(layouts)


@pytest.mark.fast_cases("mesh3-hfsdp")
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (TWO, "optim_grads_params"),
        (TWO, "no_shard"),
        ({"outer": 2, "dp": 1, "tp": 2}, "hsdp"),
        ({"outer": 1, "dp": 2, "tp": 2}, "hfsdp"),
    ],
)
def test_the_decoder_in_pytorch(
    ranks: RankGroup, tmp_path: Path, mesh: dict[str, int], strategy: str
) -> None:
    policy = load_policy("fsdp_tp")
    units = tuple(replace(unit, strategy=strategy) for unit in policy.units)
    policy = replace(policy, mesh=mesh, units=units)
    for rank, record in enumerate(ranks.run(4, train_decoder, policy.to_toml(), SIZES, 2)):
        planned = make_plan(decoder("torch", tmp_path), policy, 4, "torch", Workload(2, 5, 2), device=rank)
        assert_same(planned, {**record, "groups": None})
        # Ranks along the data-parallel axes are two apart.
        for axis, groups in (("tp", ((0, 1), (2, 3))), (planned.mesh.names[-1], ((0, 2), (1, 3)))):
            for collective in KINDS:
                measured = sum(
                    calls
                    for key, calls in record["groups"].items()
                    if key[0] == collective and key[1] in groups
                )
                among = (axis,) if axis == "tp" else planned.mesh.names
                assert measured == sum(planned.traffic.count(collective, name) for name in among)


ENDS = {"colwise": "rowwise", "rowwise": "colwise"}


@pytest.mark.fast_cases("colwise-True")
@pytest.mark.parametrize(("ends", "recompute"), [(None, False), ("colwise", True), ("rowwise", False)])
def test_what_the_decoder_exchanges_over_a_model_axis(
    ranks: RankGroup, tmp_path: Path, ends: str | None, recompute: bool
) -> None:
    policy = load_policy("fsdp_tp")
    units = (replace(policy.units[0], recompute=recompute), policy.units[1])
    policy = replace(policy, mesh=TWO, units=units, precision=PrecisionPolicy(compute="bfloat16"))
    if ends is not None:
        head, embed = ParallelPolicy(("lm_head",), "tp", ends), ParallelPolicy(("embed",), "tp", ENDS[ends])
        policy = replace(policy, parallel=(*policy.parallel, head, embed))
    record = ranks.run(4, train_decoder, policy.to_toml(), SIZES, 2)[0]
    planned = make_plan(decoder("torch", tmp_path), policy, 4, "torch", Workload(2, 5, 2))
    calls, nbytes, traffic = record["calls"], record["bytes"], planned.traffic
    for collective in KINDS:
        assert calls.get(("activations", collective), 0) == traffic.count(collective, "tp"), collective
        assert nbytes.get(("activations", collective), 0) == traffic.nbytes(collective, "tp"), collective
    assert planned.traffic.count("all_reduce", "tp") >= 2 * 4 * SIZES["n_layers"]


def test_parameters_of_any_shapes_in_pytorch(ranks: RankGroup) -> None:
    parts, own = [[Spec((4, 5)), Spec((3,)), Spec((6, 2, 3))], [Spec((2,)), Spec((7, 4), narrow=True)]], PART
    text = policy_text((2,), "optim", "optim_grads_params", {"compute": "bfloat16", "reduce": "float32"})
    text = text.replace("[precision]", "tp = 2\n[precision]")
    for path, dimension in (("parts.0.p0", 0), ("parts.0.p2", 1), ("parts.1.p1", 1)):
        text += f'\n[[parallel]]\nmatch = "{path}"\naxis = "tp"\ndimension = {dimension}'
    for rank, record in enumerate(ranks.run(4, train, text, parts, own, 2)):
        planned = make_plan(
            model_of(parts, own), parse_policy(text, "test"), 4, "torch", Workload(1, 3, 2), device=rank
        )
        assert_same(planned, {**record, "groups": None})


def test_all_places_together_hold_every_part_once_and_the_rest_on_each(tmp_path: Path) -> None:
    model, policy = decoder("torch", tmp_path), fsdp_tp(dp=3, tp=2)
    plan = make_plan(model, policy, 6, "torch", Workload())
    held = [
        sum(unit.count * at_rest(unit.groups, "torch", device).main_weights.real for unit in plan.units)
        for device in range(6)
    ]
    layers = [
        weight for weight in model.parameters if weight.path.endswith(("wq.weight", "wk.weight", "wv.weight"))
    ]
    layers += [
        weight
        for weight in model.parameters
        if weight.path.endswith(("wo.weight", "w13.weight", "w2.weight"))
    ]
    cut = sum(weight.numel for weight in layers)
    assert sum(held) == 4 * (cut + 2 * (model.numel - cut))
    assert held[0::2] == held[1::2]


def test_devices_of_one_place_follow_each_other() -> None:
    mesh = MeshShape.of({"outer": 2, "dp": 3, "tp": 2})
    assert (mesh.names, mesh.sizes, mesh.model, mesh.devices) == (("outer", "dp"), (2, 3), (("tp", 2),), 12)
    assert str(mesh) == "outer 2 x dp 3 x tp 2"
    alone = MeshShape.of({"outer": 2, "dp": 3})
    for axes in (0, 1, 2):
        assert np.array_equal(mesh.shard_by_device(axes), np.repeat(alone.shard_by_device(axes), 2))


def test_a_model_of_another_kind_of_module_is_refused_as_the_runtime_does() -> None:
    parameters = (Parameter("norm.weight", (4,), kind="other"), Parameter("up.weight", (4, 6), kind="linear"))
    model = Model.of("m", parameters)
    for entry, message in (
        (
            ParallelPolicy(("norm",), "tp", "colwise"),
            "norm.weight: expected a parameter of nn.Linear or nn.Embedding",
        ),
        (ParallelPolicy(("up",), "tp", dimension=2), r"nothing|got 2 dimensions"),
        (
            ParallelPolicy(("up.weight",), "tp", dimension=2),
            "expected a parameter with dimension 2, to cut it over",
        ),
        (
            ParallelPolicy(("up",), "tp", "colwise", fused=(1, 2)),
            "up.weight .4, 6.: expected dimension 0 to hold",
        ),
        (ParallelPolicy(("down",), "tp", "colwise"), "modules or parameters that 'down' matches, got none"),
    ):
        policy = replace(parse_policy('[mesh]\ndp = 2\ntp = 2\n[[unit]]\nmatch = ""', "p"), parallel=(entry,))
        if entry.dimension == 2 and entry.match == ("up",):
            assert make_plan(model, policy, 4, "torch", Workload()).numel == model.numel
            continue
        with pytest.raises(PlanError, match=message):
            make_plan(model, policy, 4, "torch", Workload())
    bare = parse_policy('[mesh]\ndp = 8\ntp = 8\n[[unit]]\nmatch = ""', "p")
    with pytest.raises(PlanError, match=r"p: \[mesh\] tp: nothing is cut over 'tp'"):
        make_plan(model, bare, 64, "torch", Workload())


def test_a_published_shape_on_data_and_tensor_parallel_axes() -> None:
    model, policy = shipped_model("llama3-70b"), fsdp_tp(dp=8, tp=8)
    plans = {runtime: make_plan(model, policy, 64, runtime, Workload()) for runtime in ("torch", "jax")}
    whole = 2 * 128256 * 8192 + 8192 + 80 * 2 * 8192
    for plan in plans.values():
        assert plan.numel == whole + (model.numel - whole) // 8
        assert plan.mesh.devices == 64
        assert plan.traffic.nbytes("reduce_scatter", "dp") == pytest.approx(4 * plan.numel, rel=1e-3)
    # Two sums forward and two backward of a layer's tokens.
    assert plans["torch"].traffic.nbytes("all_reduce", "tp") == 80 * 4 * 4096 * 8192 * 4
    models = {"torch": model, "jax": model}
    comparison = compare(models, [policy, load_policy("fsdp")], [64], Workload(), 10**12)
    headings, rows = overview(comparison)
    at = headings.index("peak")
    assert [row[at].startswith("< ") for row in rows] == [True, True, False, False]
    lines = "\n".join(notes(comparison))
    assert "jax: traffic over model axes (activations and their gradients) is not counted" in lines
    assert "torch: traffic" not in lines
    assert "is the cheapest that fits, by what is counted" in lines
    assert "peak: counts whole activations although model axes cut some, so it is an upper bound" in lines
    listed = json.loads(json.dumps(document(comparison), default=list))["plans"]
    assert [plan["mesh"] for plan in listed] == [{"dp": 8, "tp": 8}] * 2 + [{"dp": 64}] * 2
    assert [plan["peak"]["upper_bound"] for plan in listed] == [True, True, False, False]
    assert [plan["model_axes_counted"] for plan in listed] == [True, False, True, True]


def test_an_upper_bound_answers_yes_or_unknown_and_no_only_below_the_bytes_at_rest() -> None:
    model, policy = shipped_model("llama3-8b"), fsdp_tp(dp=4, tp=2)
    plan = make_plan(model, policy, 8, "torch", Workload())
    total, least = plan.peak.total, plan.at_rest.total
    for memory, answer in ((total, True), (total - 1, None), (least, None), (least - 1, False)):
        comparison = compare({"torch": model}, [policy], [8], Workload(), memory, reserve=0)
        assert comparison.fits(comparison.plans[0]) is answer


def test_a_node_has_the_model_axes_and_the_inner_data_parallel_one() -> None:
    policy = parse_policy('[mesh]\nouter = "all"\ndp = 2\ntp = 2\n[[unit]]\nmatch = ""', "p")
    (with_nodes,) = with_node([policy], 8, [16])
    assert with_nodes.mesh == {"outer": "all", "dp": 4, "tp": 2}
    with pytest.raises(
        PlanError, match="--node: expected a multiple of the 2 devices on model axes of p, got"
    ):
        with_node([policy], 3, [15])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (TWO, "optim_grads_params"),
        pytest.param(TWO, "no_shard", marks=pytest.mark.slow),
        ({"outer": 2, "dp": 2, "tp": 2}, "hfsdp"),
    ],
)
def test_the_decoder_in_jax(tmp_path: Path, mesh: dict[str, int], strategy: str) -> None:
    policy = load_policy("fsdp_tp")
    units = tuple(replace(unit, strategy=strategy) for unit in policy.units)
    policy = replace(
        policy, mesh=mesh, units=units, precision=PrecisionPolicy(compute="bfloat16", reduce="float32")
    )
    world = math.prod(mesh.values())
    config = jax_decoder.DecoderConfig(**SIZES)
    plan, weights = jax_impl.fully_shard(
        jax_decoder.Decoder(config, rngs=nnx.Rngs(0)),
        jax_impl.data_parallel_mesh(mesh),
        jax_impl.ShardingPolicy.parse(policy.to_toml()),
    )
    state = jax_impl.init_state(plan, weights, jax_impl.main_weight_adamw(1e-3))
    for device, memory in enumerate(jax_impl.memory_report(plan, state).devices):
        model = decoder("jax", tmp_path)
        planned = make_plan(model, policy, world, "jax", Workload(1, 3, 2), device=device)
        rest = planned.at_rest
        assert (memory.main_weights, memory.moments) == (rest.main_weights.real, rest.moments.real)
        assert memory.padding == rest.padding
        assert memory.total - memory.other == rest.total

    def loss(model: Any, tokens: jax.Array) -> jax.Array:
        return jax_decoder.next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    gradients = jax_impl.make_gradients(plan, loss, 2)
    rows = jax.ShapeDtypeStruct((world, 4), jnp.int32)
    assert Counter(dict(counted(jax.make_jaxpr(gradients)(weights, rows).jaxpr))) == expected(planned)
    # Parts, not whole parameters, and of two groups: those of the axis and the rest.
    assert {len(unit.groups) for unit in planned.units if unit.paths != ("",)} == {2}


def test_shares_of_the_state_in_cpu_memory_in_jax(tmp_path: Path) -> None:
    policy, model = fsdp_tp(**TWO), decoder("jax", tmp_path)
    plan, weights = jax_impl.fully_shard(
        jax_decoder.Decoder(jax_decoder.DecoderConfig(**SIZES), rngs=nnx.Rngs(0)),
        jax_impl.data_parallel_mesh(TWO),
        jax_impl.ShardingPolicy.parse(policy.to_toml()),
    )
    hosts = set()
    # Of 2, 26, 74 and 98 % others would be picked, were parts counted instead of all that an array has.
    for percent in (0, 2, 26, 50, 74, 98, 100):
        offload = jax_impl.Offload(percent / 100)
        state = jax_impl.init_state(plan, weights, jax_impl.main_weight_adamw(1e-3), offload=offload)
        chosen = Optimizer(offload=Fraction(percent, 100))
        for device, memory in enumerate(jax_impl.memory_report(plan, state).devices):
            rest = make_plan(model, policy, 4, "jax", Workload(), device=device, optimizer=chosen).at_rest
            assert (memory.host, memory.moments) == (rest.host, rest.moments.real), percent
            hosts.add(rest.host)
    assert len(hosts) > 3


def test_convolutions_of_jax_are_cut_over_their_last_dimensions() -> None:
    model = Model.of("m", [Parameter("conv.kernel", (3, 3, 4, 8), kind="convolution")])
    for style, part in (("colwise", (3, 3, 4, 4)), ("rowwise", (3, 3, 2, 8))):
        entry = ParallelPolicy(("conv",), "tp", style)
        policy = replace(parse_policy('[mesh]\ndp = 2\ntp = 2\n[[unit]]\nmatch = ""', "p"), parallel=(entry,))
        plan = make_plan(model, policy, 4, "jax", Workload())
        assert plan.units[0].groups[0].shape.shapes == (part,)
    (described,) = resolve_models("tests.planning.test_plan_model_axes:convolution").values()
    assert {parameter.path: parameter.kind for parameter in described.parameters} == {
        "bias": "",
        "kernel": "convolution",
    }


def convolution(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Conv(4, 8, (3, 3), rngs=rngs)
