"""Shipped policies on the decoder; what a policy may say is tested in ``tests/sharding/test_policy.py``."""

from __future__ import annotations

import pytest
from flax import nnx

from jax_impl import PolicyError, ShardingPolicy, UnitPolicy, data_parallel_mesh, plan_sharding
from jax_impl.models import Decoder, DecoderConfig

LAYERS = ["layers.0", "layers.1"]


def abstract_decoder() -> Decoder:
    return nnx.eval_shape(lambda: Decoder(DecoderConfig(n_layers=2), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("name", "axes", "units"),
    [
        *((name, ["dp"], [*LAYERS, ""]) for name in ("no_shard", "zero1", "zero2", "fsdp", "fsdp_bf16")),
        *((name, ["dp_outer", "dp"], [*LAYERS, ""]) for name in ("hsdp", "hfsdp")),
        ("mixture", ["dp"], ["embed", "layers.0.mlp", "layers.0", "layers.1.mlp", "layers.1", ""]),
    ],
)
def test_shipped_policies_fit_the_decoder(name: str, axes: list[str], units: list[str]) -> None:
    modules = nnx.iter_modules(abstract_decoder())
    paths = [".".join(map(str, key)) for key, module in modules if not isinstance(module, nnx.List)]
    policy = ShardingPolicy.load(name)
    assert policy.source == f"{name}.toml"
    assert list(policy.units_of(paths)) == units
    for devices in (2, 4):
        assert list(policy.mesh_sizes(devices)) == axes


def test_a_policy_shards_a_model_as_fully_shard_does_by_it() -> None:
    model = Decoder(DecoderConfig(n_layers=2), rngs=nnx.Rngs(0))
    policy = ShardingPolicy.load("mixture")
    plan, weights = policy.apply(model, mesh=data_parallel_mesh(2), frozen=["embed/*"])
    assert set(plan.units) == {"embed", "layers/0/mlp", "layers/0", "layers/1/mlp", "layers/1", ""}
    assert plan.units["embed"].strategy.name == "optim"
    assert weights.keys() == plan.arrays.keys()
    assert "embed (frozen)" in weights
    with pytest.raises(
        PolicyError, match=r"policy: \[\[unit\]\] 1: match: expected modules that 'blocks' matches"
    ):
        ShardingPolicy((UnitPolicy("blocks"), UnitPolicy(""))).apply(model, mesh=data_parallel_mesh(2))


def test_remainders_change_nothing_where_nothing_is_stored_twice() -> None:
    text = "[precision]\ncompute = 'bfloat16'\n[[unit]]\nmatch = ''\nstrategy = 'optim'\n"
    asked = text.replace("[[unit]]", "store_param_remainders = true\n[[unit]]")
    plans = [
        plan_sharding(abstract_decoder(), data_parallel_mesh(2), ShardingPolicy.parse(toml, "mine"))
        for toml in (text, asked)
    ]
    assert plans[0] == plans[1]
    assert str(plans[0]) == str(plans[1])
