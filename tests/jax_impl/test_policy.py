"""Policies: what a file may say, and which modules of a model it makes units. No array is made."""

from __future__ import annotations

import ast
import copy
import sys
from pathlib import Path

import pytest
from flax import nnx

import jax_impl.policy
from jax_impl.models import Decoder, DecoderConfig
from jax_impl.policy import PolicyError, PrecisionPolicy, ShardingPolicy, UnitPolicy
from jax_impl.strategy import Placements
from tests.sharding.golden import policies as golden

ROOT = UnitPolicy("")


@pytest.mark.parametrize("file", golden.GOOD)
def test_good_files_are_read_as_the_vectors_say(file):
    policy = ShardingPolicy.load(str(golden.FOLDER / file))
    assert golden.canonical(policy) == golden.GOOD[file]
    again = ShardingPolicy.parse(policy.to_toml(), "again")
    assert again == policy
    assert again.source == "again"


@pytest.mark.parametrize("file", golden.BAD)
def test_bad_files_are_refused_with_what_the_vectors_say(file):
    with pytest.raises(PolicyError) as caught:
        ShardingPolicy.load(golden.FOLDER / file)
    for part in (f"{golden.FOLDER / file}: ", *golden.BAD[file]):
        assert part in str(caught.value)


@pytest.mark.parametrize("case", golden.UNITS, ids=str)
def test_units_are_those_of_the_vectors(case):
    policy = ShardingPolicy.load(golden.FOLDER / case.file)
    if not case.error:
        units = policy.units_of(iter(case.paths))
        assert [[path, unit.match] for path, unit in units.items()] == case.units
        return
    with pytest.raises(PolicyError) as caught:
        policy.units_of(case.paths)
    for part in case.error:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: UnitPolicy(".a"), "match: expected a dotted path"),
        (lambda: UnitPolicy(None), "match: expected a dotted path"),
        (lambda: UnitPolicy("", strategy="fsdp"), "strategy: expected one of no_shard, optim"),
        (lambda: UnitPolicy("", strategy=["optim"]), "strategy: expected a name, got ['optim']"),
        (lambda: UnitPolicy("", placements=("shard",)), "placements: expected Placements of this package"),
        (
            lambda: UnitPolicy("", "optim", Placements("shard", "shard", "shard")),
            "expected strategy or placements (parameters, gradients, optimizer), got both",
        ),
        (lambda: UnitPolicy("", granularity="block(-1)"), "granularity: expected row, tensor or block(n)"),
        (lambda: UnitPolicy("", recompute="yes"), "recompute: expected true or false, got 'yes'"),
        (lambda: PrecisionPolicy(main="bfloat16"), "main: expected one of float32, float64, got 'bfloat16'"),
        (lambda: PrecisionPolicy(main=None), "main: expected one of float32, float64, got None"),
        (lambda: PrecisionPolicy(grad="fp8"), "grad: expected one of float32, bfloat16"),
        (lambda: ShardingPolicy([]), "policy: [[unit]]: expected at least one"),
        (lambda: ShardingPolicy([UnitPolicy("a")], source="s"), "s: [[unit]]: expected one for the root"),
        (lambda: ShardingPolicy([ROOT], {"dp": -1}), "policy: [mesh] dp: expected a size >= 1"),
        (lambda: ShardingPolicy([ROOT], {3: 1}), "[mesh]: expected axis names of letters"),
        (
            lambda: ShardingPolicy([ROOT], {"dp": 2, "TP": 4}, source="m"),
            "m: [mesh]: axis 'TP' is named for model parallelism, expected data-parallel axes only",
        ),
        (lambda: ShardingPolicy([ROOT], ["dp"]), "[mesh]: expected a table of axes, got ['dp']"),
        (lambda: ShardingPolicy([ROOT], precision={}), "policy: precision: expected a PrecisionPolicy"),
        (lambda: ShardingPolicy("a"), "policy: units: expected UnitPolicy items, got 'a'"),
    ],
)
def test_what_is_built_in_code_is_checked_too(build, message):
    with pytest.raises(PolicyError) as caught:
        build()
    assert message in str(caught.value)


def test_policies_are_compared_by_what_they_say_and_cannot_be_changed():
    mesh = {"a": "all", "b": 2}
    policy = ShardingPolicy([ROOT], mesh, source="one")
    mesh["b"] = 4
    assert policy == ShardingPolicy((UnitPolicy(""),), {"a": "all", "b": 2}, source="two")
    assert policy != ShardingPolicy((ROOT,), {"b": 2, "a": "all"})
    assert len({policy, copy.deepcopy(policy)}) == 1


def test_mesh_sizes_use_every_device():
    policy = ShardingPolicy([ROOT], {"outer": "all", "inner": 4}, source="m")
    assert list(policy.mesh_sizes(12).items()) == [("outer", 3), ("inner", 4)]
    assert ShardingPolicy([ROOT]).mesh_sizes(7) == {"dp": 7}
    for devices in (2, 6, 0, -4):
        with pytest.raises(
            PolicyError, match=rf'm: \[mesh\]: .* {devices} devices in all, got outer = "all" x inner'
        ):
            policy.mesh_sizes(devices)
    with pytest.raises(PolicyError, match="expected axes of 4 devices in all, got dp = 2"):
        ShardingPolicy([ROOT], {"dp": 2}).mesh_sizes(4)


def test_a_file_that_cannot_be_read_is_named_with_the_examples_there_are(tmp_path: Path):
    (tmp_path / "latin").write_bytes(b"# \xe9")
    for given, reason in ((tmp_path, "got: Is a directory"), (tmp_path / "no", "got: No such file")):
        with pytest.raises(
            PolicyError, match=f"one of fsdp, fsdp_bf16, hfsdp, .*, {reason}|zero2, {reason}"
        ) as caught:
            ShardingPolicy.load(given)
        assert str(caught.value).startswith(f"{given}: ")
    with pytest.raises(PolicyError, match="other bytes than UTF-8"):
        ShardingPolicy.load(tmp_path / "latin")


LAYERS = ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("name", "axes", "units"),
    [
        *((name, ["dp"], [*LAYERS, ""]) for name in ("no_shard", "zero1", "zero2", "fsdp", "fsdp_bf16")),
        *((name, ["dp_outer", "dp"], [*LAYERS, ""]) for name in ("hsdp", "hfsdp")),
        ("mixture", ["dp"], ["embed", "layers.0.mlp", "layers.0", "layers.1.mlp", "layers.1", ""]),
    ],
)
def test_shipped_policies_fit_the_decoder(name: str, axes: list[str], units: list[str]):
    model = nnx.eval_shape(lambda: Decoder(DecoderConfig(n_layers=2), rngs=nnx.Rngs(0)))
    paths = [".".join(map(str, key)) for key, m in nnx.iter_modules(model) if not isinstance(m, nnx.List)]
    policy = ShardingPolicy.load(name)
    assert policy.source == f"{name}.toml"
    assert list(policy.units_of(paths)) == units
    for devices in (2, 4):
        assert list(policy.mesh_sizes(devices)) == axes


def test_reading_a_policy_needs_nothing_of_jax():
    tree = ast.parse(Path(jax_impl.policy.__file__).read_text(encoding="utf-8"))
    named = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    named |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    own = {"bridge.sharding.mesh_axes", "jax_impl.granularity", "jax_impl.strategy"}
    assert {name for name in named if name.split(".")[0] not in sys.stdlib_module_names} <= own
