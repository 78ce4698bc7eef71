"""Two independent readers of one policy file must understand it alike, and refuse it in the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bridge
import bridge.sharding.policy
import bridge.sharding.strategy
import jax_impl.policy
import jax_impl.strategy
from tests.sharding.golden import policies as golden

SHIPPED = sorted(
    path.stem for path in (Path(bridge.__file__).parent / "sharding" / "policies").glob("*.toml")
)
# Refused by Placements, of which each package has its own with words of its own.
OWN_WORDS = {"placements_unequal.toml", "placements_outer_only.toml", "placements_order.toml"}


def refusal(module: Any, call: Any) -> str:
    with pytest.raises(module.PolicyError) as caught:
        call()
    return str(caught.value)


def test_every_vector_is_a_file_and_every_file_a_vector() -> None:
    assert {path.name for path in golden.FOLDER.glob("*.toml")} == {*golden.GOOD, *golden.BAD}
    assert set(golden.BAD) >= OWN_WORDS
    assert len(SHIPPED) >= 8


@pytest.mark.parametrize("given", [*SHIPPED, *(golden.FOLDER / file for file in golden.GOOD)], ids=str)
def test_both_packages_read_a_file_alike_and_write_it_alike(given: Any) -> None:
    ours, theirs = (module.ShardingPolicy.load(given) for module in (bridge.sharding.policy, jax_impl.policy))
    assert golden.canonical(ours) == golden.canonical(theirs)
    assert ours.source == theirs.source
    assert ours.to_toml() == theirs.to_toml()
    for devices in range(-2, 25):
        sizes = []
        for module, policy in ((bridge.sharding.policy, ours), (jax_impl.policy, theirs)):
            try:
                sizes.append(list(policy.mesh_sizes(devices).items()))
            except module.PolicyError as error:
                sizes.append(str(error))
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize("file", golden.BAD)
def test_both_packages_refuse_a_file_in_the_same_words(file: str) -> None:
    ours, theirs = (
        refusal(module, lambda module=module: module.ShardingPolicy.load(golden.FOLDER / file))
        for module in (bridge.sharding.policy, jax_impl.policy)
    )
    if file in OWN_WORDS:
        assert ours.split(" expected ")[0].split(": ")[:2] == theirs.split(" expected ")[0].split(": ")[:2]
    else:
        assert ours == theirs


def test_both_packages_say_alike_what_they_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path in ("absent", tmp_path, tmp_path / "bytes", "../policies/fsdp", ""):
        ours, theirs = (
            refusal(module, lambda module=module, path=path: module.ShardingPolicy.load(path))
            for module in (bridge.sharding.policy, jax_impl.policy)
        )
        assert ours == theirs


# Few letters, so that patterns match, match twice and miss.
SEGMENT = st.sampled_from(["a", "b", "ab", "0", "1", "*", "?", "[ab]", "a*", "[!a]"])
PATTERN = st.one_of(
    st.lists(SEGMENT, min_size=1, max_size=3).map(".".join),
    st.text(min_size=1, max_size=8).filter(lambda text: "/" not in text and all(text.split("."))),
)
PATH = st.lists(st.sampled_from(["a", "b", "ab", "0", "1"]), max_size=3).map(".".join)
AXES = st.lists(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True), min_size=1, max_size=2, unique=True
)
DTYPE = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
DEPTHS = [(p, g, o) for o in range(3) for g in range(o + 1) for p in range(g + 1)]


@st.composite
def policies(draw: st.DrawFn, module: Any, placements: type) -> Any:
    """A legal policy of one of the packages."""
    axes = draw(AXES)
    sizes = [draw(st.integers(1, 10**9)) for _ in axes]
    mesh: dict[str, int | str] = dict(zip(axes, sizes, strict=True))
    if draw(st.booleans()):
        mesh[draw(st.sampled_from(axes))] = "all"
    units = []
    patterns = draw(st.lists(PATTERN, max_size=4, unique=True))
    for match in draw(st.permutations(["", *patterns])):
        options: dict[str, Any] = {}
        way = draw(st.sampled_from(["none", "strategy", "placements"]))
        if way == "strategy":
            two = ["hsdp", "hfsdp"] if len(axes) == 2 else []
            known = ["no_shard", "optim", "optim_grads", "optim_grads_params", *two]
            options["strategy"] = draw(st.sampled_from(known))
        elif way == "placements":
            depths = draw(st.sampled_from([d for d in DEPTHS if max(d) <= len(axes)]))
            kept = ("replicate", "partial", "replicate")
            options["placements"] = placements(
                *([word] * (len(axes) - n) + ["shard"] * n for word, n in zip(kept, depths, strict=True))
            )
        grains = st.one_of(st.sampled_from(["row", "tensor"]), st.integers(1, 999).map("block({})".format))
        units.append(
            module.UnitPolicy(match, granularity=draw(grains), recompute=draw(st.booleans()), **options)
        )
    precision = module.PrecisionPolicy(
        draw(st.sampled_from(["float32", "float64"])), *(draw(st.none() | DTYPE) for _ in range(3))
    )
    return module.ShardingPolicy(tuple(units), mesh, precision)


def assert_moves(ours: Any, reader: Any, writer: Any) -> None:
    text = ours.to_toml()
    theirs = reader.ShardingPolicy.parse(text)
    assert golden.canonical(theirs) == golden.canonical(ours)
    assert theirs.to_toml() == text
    assert writer.ShardingPolicy.parse(theirs.to_toml()) == ours


@settings(max_examples=300, deadline=None)
@given(policies(bridge.sharding.policy, bridge.sharding.strategy.Placements))
def test_what_torch_writes_jax_reads(policy: Any) -> None:
    assert_moves(policy, jax_impl.policy, bridge.sharding.policy)


@settings(max_examples=300, deadline=None)
@given(policies(jax_impl.policy, jax_impl.strategy.Placements))
def test_what_jax_writes_torch_reads(policy: Any) -> None:
    assert_moves(policy, bridge.sharding.policy, jax_impl.policy)


def units_or_refusal(policy: Any, error: type[Exception], paths: list[str]) -> Any:
    try:
        return [(path, policy.units.index(unit)) for path, unit in policy.units_of(paths).items()]
    except error as refused:
        return str(refused)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.lists(SEGMENT, min_size=1, max_size=3).map(".".join), max_size=3, unique=True), st.lists(PATH)
)
def test_both_packages_choose_the_same_units(patterns: list[str], paths: list[str]) -> None:
    found = [
        units_or_refusal(
            module.ShardingPolicy(tuple(module.UnitPolicy(match) for match in [*patterns, ""])),
            module.PolicyError,
            paths,
        )
        for module in (bridge.sharding.policy, jax_impl.policy)
    ]
    assert found[0] == found[1]


KEYS = [
    "match",
    "strategy",
    "parameters",
    "gradients",
    "optimizer",
    "granularity",
    "recompute",
    "dp",
    "main",
    "grad",
]
VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-1, 3),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(
            ["", "a", "all", "optim", "hsdp", "row", "block(2)", "shard", "replicate", "float32", "/"]
        ),
    ),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)
TABLE = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)


def toml_of(table: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


@settings(max_examples=1500, deadline=None)
@given(st.none() | TABLE, st.none() | TABLE, st.lists(TABLE, max_size=3))
def test_any_file_is_read_or_refused_alike(mesh: Any, precision: Any, units: list[dict[str, Any]]) -> None:
    text = "" if mesh is None else "[mesh]\n" + toml_of(mesh)
    text += "" if precision is None else "[precision]\n" + toml_of(precision)
    text += "".join("[[unit]]\n" + toml_of(unit) for unit in units) + '[[unit]]\nmatch = ""\n'
    found = []
    for module in (bridge.sharding.policy, jax_impl.policy):
        try:
            found.append(golden.canonical(module.ShardingPolicy.parse(text)))
        except module.PolicyError as error:
            found.append(str(error))
    own = isinstance(found[0], str) and "lacements" in found[0] and found[0] != found[1]
    assert isinstance(found[1], str) if own else found[0] == found[1]
