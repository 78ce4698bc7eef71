"""What ``fully_shard`` accepts by keywords and by a policy, and what it refuses before anything is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import (
    Placements,
    PolicyError,
    ShardingPolicy,
    UnitPolicy,
    data_parallel_mesh,
    fully_shard,
    init_state,
    make_train_step,
    plan_sharding,
    unshard,
    variable_leaves,
)
from jax_impl.models import Decoder
from tests.support.jax_impl.tiny import CONFIG, decoder, loss, tokens

MIXED = """
[mesh]
dp_outer = 2
dp = 2
[precision]
compute = "bfloat16"
reduce = "float32"
[[unit]]
match = "layers.*.mlp"
strategy = "hfsdp"
granularity = "block(2)"
recompute = true
[[unit]]
match = "layers.*"
parameters = ["replicate", "replicate"]
gradients = ["partial", "shard"]
optimizer = ["shard", "shard"]
[[unit]]
match = ""
strategy = "no_shard"
"""


def stacked() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(1), stacked=True)


def test_a_policy_gives_each_unit_its_own_options():
    policy = ShardingPolicy.parse(MIXED)
    plan, weights = policy.apply(decoder(), mesh=data_parallel_mesh({"dp_outer": 2, "dp": 2}))
    assert list(plan.units) == ["layers/0", "layers/0/mlp", "layers/1", "layers/1/mlp", ""]
    levels = {
        path: (u.strategy.parameters, u.strategy.gradients, u.strategy.optimizer)
        for path, u in plan.units.items()
    }
    assert levels["layers/0/mlp"] == (1, 1, 2)
    assert levels["layers/1"] == (0, 1, 2)
    assert levels[""] == (0, 0, 0)
    assert plan.units["layers/0/mlp"].recompute
    assert not plan.units["layers/0"].recompute
    assert {slot.block for slot in plan.units["layers/1/mlp"].layout.slots} == {2}
    assert plan.units["layers/1/mlp"].layout.num_shards == 4
    assert plan.units[""].layout.num_shards == 1
    wire = plan.arrays["layers/0"].wire
    assert (wire.main, wire.compute, wire.reduce, wire.grad) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
        jnp.float32,
    )
    assert {array.dtype for array in weights.values()} == {jnp.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("model", [decoder, stacked])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_a_policy_of_mixed_strategies_trains_as_one_strategy_does(engine, model):
    text = MIXED.replace('compute = "bfloat16"', "").replace('reduce = "float32"', "")
    batch, results = tokens(8), []
    for policy in (ShardingPolicy.parse(text), "fsdp"):
        mesh = data_parallel_mesh({"dp_outer": 2, "dp": 2} if policy != "fsdp" else 4)
        plan, weights = fully_shard(
            model(), mesh, policy, engine=engine, stacked=["layers"] if model is stacked else []
        )
        step = make_train_step(plan, loss, optax.sgd(0.5), microbatches=2)
        state, losses = init_state(plan, weights, optax.sgd(0.5)), []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        results.append(losses)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)
    assert results[0][2] < results[0][0]


def test_the_mesh_of_a_policy_is_made_over_all_devices_where_none_is_given():
    plan = plan_sharding(decoder(), policy="hsdp")
    assert dict(plan.mesh.shape) == {"dp_outer": 4, "dp": 2}


def test_axes_may_have_any_names_and_the_keywords_any_placements():
    mesh = jax.make_mesh((2, 4), ("hosts", "chips"))
    plan = plan_sharding(
        decoder(),
        mesh,
        placements=Placements(("replicate", "shard"), ("shard", "shard"), ("shard", "shard")),
        grad_dtype="bfloat16",
    )
    strategy = plan.units["layers/0"].strategy
    assert (strategy.parameters, strategy.gradients, strategy.optimizer) == (1, 2, 2)
    assert plan.arrays["layers/0"].wire.grad == jnp.bfloat16
    assert plan.sharding("").spec == jax.sharding.PartitionSpec(("chips", "hosts"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": ["layers/*", "layers/*"]}, r"each pattern once, got \['layers/\*', 'layers/\*'\]"),
        ({"units": ["layers"]}, r"'layers' matches none of .*'layers/0'"),
        ({"units": ["blocks/*"]}, r"'blocks/\*' matches none"),
        ({"strategy": "hfsdp"}, r"'hfsdp': expected a mesh of two axes \(outer, inner\), got 1"),
        (
            {"placements": Placements(("shard", "shard"), ("shard", "shard"), ("shard", "shard"))},
            "one entry for each of the 1 mesh axes, got 2",
        ),
        (
            {"strategy": "optim", "placements": Placements("shard", "shard", "shard")},
            "strategy or placements, got both",
        ),
        ({"engine": "gspmd"}, "engine: expected one of shard_map, pjit, got 'gspmd'"),
        ({"frozen": ["embedding/*"]}, r"frozen: .*'embedding/\*' matches none of \['embed/embedding'"),
        (
            {"frozen": nnx.LoRAParam},
            r"frozen: .*LoRAParam'> matches none of \['embed/embedding'.* to choose none",
        ),
        ({"replicated": lambda path, _: "emb" in path}, r"replicated: .*lambda.* matches none of \['embed"),
        ({"stacked": ["blocks"]}, "stacked: expected paths of submodules, got 'blocks'"),
        ({"grad_dtype": "int8"}, "grad_dtype: expected None or one of"),
    ],
)
def test_wrong_keywords_are_refused_with_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        fully_shard(decoder(), data_parallel_mesh(2), **options)


def test_unknown_keywords_and_keywords_beside_a_policy_are_refused():
    with pytest.raises(TypeError, match=r"expected keywords among \['strategy'.*got \['param_type'\]"):
        fully_shard(decoder(), data_parallel_mesh(2), param_type="bfloat16")
    with pytest.raises(ValueError, match=r"a policy or keywords, got a policy and \['strategy'\]"):
        fully_shard(decoder(), data_parallel_mesh(2), "fsdp", strategy="optim")
    with pytest.raises(ValueError, match="expected a mesh, or a policy with a mesh"):
        fully_shard(decoder())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("layers.*.mlp", "blocks.*"), r"blocks\.\*"),
        (("dp = 2", "dp = 3"), r"\[mesh\].*dp"),
        (
            ("[precision]", '[precision]\nmain = "float64"'),
            "main: expected .*float64 main weights, got float32",
        ),
        (('strategy = "no_shard"', 'stratgey = "no_shard"'), "stratgey"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_with_file_and_key(tmp_path, edit, message):
    file = tmp_path / "mine.toml"
    file.write_text(MIXED.replace(*edit))
    with pytest.raises(PolicyError, match=message) as caught:
        fully_shard(decoder(), data_parallel_mesh({"dp_outer": 2, "dp": 2}), file)
    assert "mine.toml" in str(caught.value)


def test_a_mesh_of_other_axes_than_the_policys_is_refused():
    policy = ShardingPolicy.parse(MIXED, "mine")
    message = r"mine: .*expected a mesh of \{'dp_outer': 2, 'dp': 2\}, got \{'a': 2, 'b': 2\}"
    with pytest.raises(PolicyError, match=message):
        policy.apply(decoder(), mesh=data_parallel_mesh({"a": 2, "b": 2}))


def test_layers_of_a_stack_must_have_one_policy():
    policy = ShardingPolicy((UnitPolicy("layers.0"), UnitPolicy("")))
    message = r"one policy for all layers of the stack 'layers'.*'layers.0'.*no unit for 'layers.1'"
    with pytest.raises(ValueError, match=message):
        policy.apply(stacked(), mesh=data_parallel_mesh(2), stacked=["layers"])
    plan, _ = policy.apply(decoder(), mesh=data_parallel_mesh(2))
    assert list(plan.units) == ["layers/0", ""]


def test_a_step_refuses_what_belongs_to_another_mesh_before_it_compiles():
    optimizer = optax.sgd(0.1)
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4))
    other, others = fully_shard(decoder(), data_parallel_mesh({"outer": 2, "inner": 2}), strategy="hfsdp")
    step = make_train_step(plan, loss, optimizer)
    message = r"array 'layers/0': expected shape .* over 4 devices \{'dp': 4\}, got .*"
    with pytest.raises(ValueError, match=message):
        step(init_state(other, others, optimizer), tokens(4))
    with pytest.raises(ValueError, match=r"positive multiple of 4 \(4 devices x 1 microbatches\)"):
        step(init_state(plan, weights, optimizer), tokens(6))
    with pytest.raises(ValueError, match="expected weights"):
        step.gradients({"layers/0": weights["layers/0"]}, tokens(4))


def test_missing_and_wrong_variables_are_named():
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(self.linear(x))

    model, optimizer = Model(), optax.sgd(0.1)
    plan, weights = fully_shard(model, data_parallel_mesh(2), units=["linear"])
    shapes_only = plan_sharding(model, data_parallel_mesh(2), units=["linear"])
    with pytest.raises(ValueError, match=r"missing \['norm/mean', 'norm/var'\].*variable_leaves\(model\)"):
        init_state(shapes_only, weights, optimizer)
    with pytest.raises(
        ValueError, match=r"other variables; missing \['norm/mean', 'norm/var'\].*unshard\(plan, state\)"
    ):
        shapes_only.merge(unshard(shapes_only, weights))
    wrong = {**variable_leaves(model), "norm/mean": jnp.zeros(3)}
    with pytest.raises(
        ValueError, match=r"'norm/mean': expected float32 of shape \(2,\), got float32 of shape \(3,\)"
    ):
        init_state(plan, weights, optimizer, wrong)
    step = make_train_step(plan, lambda m, x: m(x).mean(), optimizer)
    with pytest.raises(
        ValueError, match=r"expected the model's variables \['norm/mean', 'norm/var'\], got \[\]"
    ):
        step.gradients(weights, np.ones((2, 2), np.float32))


def test_a_plan_knows_the_variables_of_its_model():
    model = nnx.Dict(norm=nnx.BatchNorm(2, rngs=nnx.Rngs(0)), dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    model["norm"].mean[...] = jnp.float32([1, 2])
    optimizer = optax.sgd(0.1)
    plan, weights = fully_shard(model, data_parallel_mesh(1), units=[])
    # A program of the whole step uses up all of the state that it gets, but not what the plan knows.
    step = jax.jit(
        make_train_step(plan, lambda m, x: m["norm"](m["dropout"](x)).mean(), optimizer), donate_argnums=0
    )
    for _ in range(2):
        state = init_state(plan, {key: jnp.copy(array) for key, array in weights.items()}, optimizer)
        np.testing.assert_array_equal(state.variables["norm/mean"], [1, 2])
        state, _ = step(state, np.float32([[1, 2], [3, 4]]))
    with pytest.warns(
        RuntimeWarning, match=r"\['norm/mean', 'norm/var'\] have the values of the original model"
    ):
        old = plan.merge(unshard(plan, state.weights))
    np.testing.assert_array_equal(old["norm"].mean[...], [1, 2])
    new = plan.merge(unshard(plan, state))
    np.testing.assert_array_equal(new["norm"].mean[...], state.variables["norm/mean"])
    assert not np.array_equal(new["norm"].mean[...], [1, 2])
    assert plan == plan_sharding(model, data_parallel_mesh(1), units=[])


def test_parameters_that_the_pjit_engine_cannot_cut_are_reported():
    with pytest.warns(
        RuntimeWarning, match=r"2 of 2 parameters \(100% of the elements\).*\('bias', 'kernel'\)"
    ):
        plan = plan_sharding(
            nnx.Linear(3, 5, rngs=nnx.Rngs(0)), data_parallel_mesh(4), engine="pjit", units=[]
        )
    assert plan.whole_parameters == ("bias", "kernel")
    cut = plan_sharding(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), data_parallel_mesh(4), engine="pjit", units=[])
    assert cut.whole_parameters == ()
    assert cut.sharding("kernel").spec == jax.sharding.PartitionSpec(None, "dp")
    flat = plan_sharding(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), data_parallel_mesh(4), units=[])
    assert flat.whole_parameters == ()


def test_a_star_of_a_pattern_does_not_cross_a_slash():
    plan = plan_sharding(decoder(), data_parallel_mesh(2), units=["layers/*", "*/0/mlp"])
    assert list(plan.units) == ["layers/0", "layers/0/mlp", "layers/1", ""]


@pytest.mark.parametrize("recompute", ["everything_saveable", 1, None])
def test_recompute_is_a_bool_or_a_known_name(recompute):
    with pytest.raises(
        ValueError, match=f"recompute: expected True, False or one of dots.*, got {recompute!r}"
    ):
        plan_sharding(decoder(), data_parallel_mesh(2), recompute=recompute)


def test_a_name_is_for_units_without_units_inside():
    units = ["layers/*", "layers/*/mlp"]
    with pytest.raises(ValueError, match=r"unit 'layers/0': recompute: .* around 'layers/0/mlp'"):
        plan_sharding(decoder(), data_parallel_mesh(2), units=units, recompute="dots_saveable")
    plan_sharding(decoder(), data_parallel_mesh(2), units=units, recompute=True)


def test_units_beside_a_policy_take_the_place_of_its_patterns():
    model = nnx.Dict(blocks=nnx.List(decoder().layers), head=decoder().embed)
    with pytest.raises(PolicyError, match=r"'layers.\*' matches, got none.*units=\[\"blocks/\*\"\] with"):
        plan_sharding(model, policy="zero2", mesh=data_parallel_mesh(4))
    policy = ShardingPolicy(
        (UnitPolicy("layers.*", "optim_grads", recompute=True), UnitPolicy("", "no_shard"))
    )
    plan = plan_sharding(model, policy=policy, mesh=data_parallel_mesh(4), units=["blocks/*"])
    assert list(plan.units) == ["blocks/0", "blocks/1", ""]
    assert [unit.strategy.name for unit in plan.units.values()] == ["optim_grads", "optim_grads", "no_shard"]
    assert [unit.recompute for unit in plan.units.values()] == [True, True, False]
    with pytest.raises(
        PolicyError, match=r"mixture.toml: expected one kind of \[\[unit\]\].*got 3 kinds, for 'layers"
    ):
        plan_sharding(model, policy="mixture", mesh=data_parallel_mesh(4), units=["blocks/*"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"])
def test_dtypes_are_names_or_dtypes(dtype):
    plan = plan_sharding(
        decoder(), data_parallel_mesh(4), param_dtype=dtype, reduce_dtype=np.float32, grad_dtype=dtype
    )
    wire = plan.arrays["layers/0"].wire
    assert (wire.compute, wire.reduce, wire.grad) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.int8, np.complex64, object(), "bf17"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"reduce_dtype: expected None or one of .*'bfloat16'"):
        plan_sharding(decoder(), data_parallel_mesh(4), reduce_dtype=dtype)
