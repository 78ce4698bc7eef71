"""Policies: what a file may say, and which modules of a model it makes units."""

from __future__ import annotations

import copy
import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bridge.core.sharding.policy.policy
from bridge.core.sharding import (
    STRATEGIES,
    Placements,
    PolicyError,
    PrecisionPolicy,
    ShardingPolicy,
    UnitPolicy,
)
from bridge.core.sharding.policy.recompute import RECOMPUTE_WORDS, SELECTIVE, why_not_around
from tests.sharding.golden import policies as golden
from tests.support.examples import examples

ROOT = UnitPolicy("")
SHIPPED = sorted(
    path.stem for path in (Path(bridge.core.sharding.__file__).parent / "policies").glob("*.toml")
)


def test_every_vector_is_a_file_and_every_file_a_vector() -> None:
    assert {path.name for path in golden.FOLDER.glob("*.toml")} == {*golden.GOOD, *golden.BAD}
    assert len(SHIPPED) >= 8


@pytest.mark.parametrize("file", golden.GOOD)
def test_good_files_are_read_as_the_vectors_say(file: str) -> None:
    policy = ShardingPolicy.load(str(golden.FOLDER / file))
    assert golden.canonical(policy) == golden.GOOD[file]
    again = ShardingPolicy.parse(policy.to_toml(), "again")
    assert again == policy
    assert again.source == "again"


@pytest.mark.parametrize("file", golden.BAD)
def test_bad_files_are_refused_with_what_the_vectors_say(file: str) -> None:
    with pytest.raises(PolicyError) as caught:
        ShardingPolicy.load(golden.FOLDER / file)
    message = str(caught.value)
    assert message.startswith(f"{golden.FOLDER / file}: ")
    assert [part for part in golden.BAD[file] if part not in message] == [], message


@pytest.mark.parametrize("case", golden.UNITS, ids=str)
def test_units_are_those_of_the_vectors(case: golden.UnitsCase) -> None:
    policy = ShardingPolicy.load(golden.FOLDER / case.file)
    if case.error:
        with pytest.raises(PolicyError) as caught:
            policy.units_of(case.paths)
        assert [part for part in case.error if part not in str(caught.value)] == [], str(caught.value)
    else:
        units = policy.units_of(iter(case.paths))
        assert [[path, unit.match] for path, unit in units.items()] == case.units


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_policies_are_read_by_name_and_written_as_they_are(name: str) -> None:
    policy = ShardingPolicy.load(name)
    assert policy.source == f"{name}.toml"
    assert ShardingPolicy.parse(policy.to_toml()) == policy


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: UnitPolicy("a..b"), 'match: expected a dotted path as in "layers.*", or "", got \'a..b\''),
        (lambda: UnitPolicy(".a"), "match: expected a dotted path"),
        (lambda: UnitPolicy(None), "match: expected a dotted path"),
        (lambda: UnitPolicy("", strategy="zero9"), "strategy: expected one of no_shard, optim"),
        (lambda: UnitPolicy("", strategy=3), "strategy: expected a name, got 3"),
        (lambda: UnitPolicy("", strategy=["optim"]), "strategy: expected a name, got ['optim']"),
        (lambda: UnitPolicy("", placements="shard"), "placements: expected Placements"),
        (lambda: UnitPolicy("", placements=("shard",)), "placements: expected Placements of this package"),
        (
            lambda: UnitPolicy("", "optim", Placements("shard", "shard", "shard")),
            "expected strategy or placements (parameters, gradients, optimizer), got both, strategy 'optim'",
        ),
        (lambda: UnitPolicy("", granularity="block"), "granularity: expected row, tensor or block(n)"),
        (lambda: UnitPolicy("", granularity="block(-1)"), "granularity: expected row, tensor or block(n)"),
        (lambda: UnitPolicy("", recompute=1), f"recompute: expected {RECOMPUTE_WORDS}, got 1"),
        (lambda: UnitPolicy("", recompute="yes"), f"recompute: expected {RECOMPUTE_WORDS}, got 'yes'"),
        (
            lambda: PrecisionPolicy(main="int8"),
            "main: expected one of float32, float64, bfloat16, float16, given, got 'int8'",
        ),
        (lambda: PrecisionPolicy(main=None), "bfloat16, float16, given, got None"),
        (lambda: PrecisionPolicy(compute="given"), "compute: expected one of float32, bfloat16"),
        (lambda: PrecisionPolicy(grad="fp8"), "grad: expected one of float32, bfloat16"),
        (lambda: ShardingPolicy(()), "policy: [[unit]]: expected at least one"),
        (lambda: ShardingPolicy([UnitPolicy("a")], source="s"), "s: [[unit]]: expected one for the root"),
        (lambda: ShardingPolicy((ROOT,), {"dp": 0}), "policy: [mesh] dp: expected a size >= 1"),
        (lambda: ShardingPolicy((ROOT,), {"dp": -1}), "policy: [mesh] dp: expected a size >= 1"),
        (lambda: ShardingPolicy((ROOT,), {"dp": True}), 'expected a size >= 1 or "all", got True'),
        (lambda: ShardingPolicy((ROOT,), {3: 1}), "[mesh]: expected axis names of letters"),
        (
            lambda: ShardingPolicy((ROOT,), {"dp": 2, "Stage": 4}, source="m"),
            "m: [mesh]: axis 'Stage' is named for context or pipeline parallelism, which is not supported",
        ),
        (lambda: ShardingPolicy((ROOT,), prefetch=True), "[mesh] prefetch: expected 0 or 1, got True"),
        (lambda: ShardingPolicy((ROOT,), prefetch=-1), "[mesh] prefetch: expected 0 or 1, got -1"),
        (
            lambda: ShardingPolicy((ROOT,), {"prefetch": 2}),
            "[mesh]: expected axes of other names than align and prefetch, got 'prefetch'",
        ),
        (lambda: ShardingPolicy((ROOT,), "dp"), "[mesh]: expected a table of axes, got 'dp'"),
        (lambda: ShardingPolicy((ROOT,), ["dp"]), "[mesh]: expected a table of axes, got ['dp']"),
        (lambda: ShardingPolicy((ROOT,), precision={}), "policy: precision: expected a PrecisionPolicy"),
        (lambda: ShardingPolicy((ROOT,), precision="float32"), "precision: expected a PrecisionPolicy"),
        (lambda: ShardingPolicy("a"), "policy: units: expected UnitPolicy items, got 'a'"),
        (lambda: ShardingPolicy(("",)), "units: expected UnitPolicy items, got (''"),
        (lambda: ShardingPolicy(ROOT), "units: expected UnitPolicy items"),
    ],
)
def test_policies_built_in_code_are_checked_as_those_of_files(build: Any, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        build()
    assert message in str(caught.value)


def test_equal_policies_have_the_same_axes_in_the_same_order() -> None:
    mesh = {"outer": 2, "inner": "all"}
    policy = ShardingPolicy([ROOT], mesh, source="one")
    mesh["outer"] = 8
    assert policy.mesh == {"outer": 2, "inner": "all"}
    assert policy == ShardingPolicy((UnitPolicy(""),), {"outer": 2, "inner": "all"}, source="elsewhere")
    assert policy != ShardingPolicy((ROOT,), {"inner": "all", "outer": 2})
    assert len({policy, copy.deepcopy(policy)}) == 1


def test_all_takes_what_the_other_axis_leaves() -> None:
    for mesh, devices, sizes in (
        ({"dp": "all"}, 5, [5]),
        ({"outer": "all", "inner": 2}, 6, [3, 2]),
        ({"outer": 3, "inner": "all"}, 6, [3, 2]),
        ({"outer": 2, "inner": 2}, 4, [2, 2]),
    ):
        mesh_sizes = ShardingPolicy((ROOT,), mesh).mesh_sizes(devices)
        assert list(mesh_sizes.items()) == list(zip(mesh, sizes, strict=True))
    for mesh, devices, axes in (
        ({"dp": "all"}, 0, 'dp = "all"'),
        ({"dp": "all"}, -4, 'dp = "all"'),
        ({"dp": 4}, 8, "dp = 4"),
        ({"outer": "all", "inner": 4}, 2, 'outer = "all" x inner = 4'),
        ({"o": 3, "i": "all"}, 4, 'o = 3 x i = "all"'),
    ):
        with pytest.raises(PolicyError) as caught:
            ShardingPolicy((ROOT,), mesh, source="m.toml").mesh_sizes(devices)
        assert str(caught.value) == f"m.toml: [mesh]: expected axes of {devices} devices in all, got {axes}"


def test_what_cannot_be_read_is_an_error_that_names_the_examples(tmp_path: Path) -> None:
    for source, reason in (
        ("absent", "No such file"),
        (tmp_path, "Is a directory"),
        ("../policies/fsdp", "No such file"),
        ("", "Is a directory"),
    ):
        message = f"expected a TOML file or one of {', '.join(SHIPPED)}, got: {reason}"
        with pytest.raises(PolicyError, match=message) as caught:
            ShardingPolicy.load(source)
        assert str(caught.value).startswith(f"{source}: ")
    (tmp_path / "bytes.toml").write_bytes(b"# \xe9")
    with pytest.raises(PolicyError, match="line 1: expected a TOML file in UTF-8, got byte 0xe9"):
        ShardingPolicy.load(tmp_path / "bytes.toml")


# Few letters, so that patterns match, match twice and miss.
SEGMENT = st.sampled_from(["a", "b", "ab", "0", "1", "*", "?", "[ab]", "a*", "[!a]"])
PATTERN = st.one_of(
    st.lists(SEGMENT, min_size=1, max_size=3).map(".".join),
    st.text(min_size=1, max_size=8).filter(lambda text: "/" not in text and all(text.split("."))),
)
PATH = st.lists(st.sampled_from(["a", "b", "ab", "0", "1"]), max_size=3).map(".".join)
# None of them is a word, which could be named for model parallelism.
AXIS = st.from_regex(r"[A-Za-z_]|[A-Za-z_][A-Za-z0-9_]{0,4}[0-9_]", fullmatch=True)
ALIGN = st.just("auto") | st.integers(1, 10**6)
AXES = st.lists(AXIS, min_size=1, max_size=2, unique=True)
DTYPE = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
GATHER = st.sampled_from(["mxfp8", "float8_e4m3fn"])
DEPTHS = [(p, g, o) for o in range(3) for g in range(o + 1) for p in range(g + 1)]


@st.composite
def policies(draw: st.DrawFn) -> ShardingPolicy:
    """A legal policy."""
    axes = draw(AXES)
    mesh: dict[str, int | str] = {axis: draw(st.integers(1, 10**9)) for axis in axes}
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
            options["placements"] = Placements(
                *([word] * (len(axes) - n) + ["shard"] * n for word, n in zip(kept, depths, strict=True))
            )
        grains = st.one_of(st.sampled_from(["row", "tensor"]), st.integers(1, 999).map("block({})".format))
        options["align"] = draw(st.none() | ALIGN)
        units.append(UnitPolicy(match, granularity=draw(grains), recompute=draw(st.booleans()), **options))
    main = draw(st.sampled_from(["float32", "float64", "bfloat16", "float16", "given"]))
    gather = draw(st.none() | GATHER) if main == "float32" else None
    precision = PrecisionPolicy(main, *(draw(st.none() | DTYPE) for _ in range(3)), gather)
    prefetch = draw(st.sampled_from([None, 0, 1]))
    return ShardingPolicy(tuple(units), mesh, precision, align=draw(ALIGN), prefetch=prefetch)


@examples(600)
@given(policies())
def test_any_policy_is_read_as_it_was_written(policy: ShardingPolicy) -> None:
    again = ShardingPolicy.parse(policy.to_toml())
    assert again == policy
    assert golden.canonical(again) == golden.canonical(policy)
    assert again.to_toml() == policy.to_toml()


@examples(500)
@given(
    st.lists(st.lists(SEGMENT, min_size=1, max_size=3).map(".".join), max_size=3, unique=True), st.lists(PATH)
)
def test_every_module_is_a_unit_of_the_first_pattern_that_matches_it(
    patterns: list[str], paths: list[str]
) -> None:
    first: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        for pattern in patterns if path else ():
            parts, wanted = path.split("."), pattern.split(".")
            if len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
                first.setdefault(path, pattern)
    policy = ShardingPolicy(tuple(UnitPolicy(match) for match in [*patterns, ""]))
    if unused := [number for number, pattern in enumerate(patterns, 1) if pattern not in first.values()]:
        with pytest.raises(
            PolicyError, match=re.escape(f"policy: [[unit]] {unused[0]}: match: expected modules")
        ):
            policy.units_of(paths)
    else:
        matches = {path: unit.match for path, unit in policy.units_of(paths).items()}
        assert list(matches.items()) == [*first.items(), ("", "")]


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
# Tables that are nearly right, so that many files are legal and most others have one mistake.
UNIT = st.fixed_dictionaries(
    {"match": st.sampled_from(["a", "b", "c", ""])},
    optional={
        "strategy": st.sampled_from(["optim", "hsdp", "fsdp"]),
        "granularity": st.sampled_from(["row", "block(2)", "block(0)"]),
        "recompute": st.sampled_from([True, False, 1]),
        "align": st.sampled_from([1, 128, "auto", 0]),
    },
)
PLACED = st.fixed_dictionaries(
    {
        "match": st.sampled_from(["d", "e"]),
        **dict.fromkeys(
            ("parameters", "optimizer"),
            st.lists(st.sampled_from(["replicate", "shard"]), min_size=1, max_size=2),
        ),
        "gradients": st.lists(st.sampled_from(["partial", "shard"]), min_size=1, max_size=2),
    }
)
PRECISION = st.fixed_dictionaries(
    {},
    optional={
        "main": DTYPE | st.just("given"),
        "compute": DTYPE,
        "grad": DTYPE,
        "gather": GATHER,
        "store_param_remainders": st.sampled_from([True, False, 1]),
    },
)
MESH = st.dictionaries(st.sampled_from(["dp", "outer"]), st.sampled_from([1, 4, "all"]), min_size=1)


def is_legal(mesh: Any, precision: Any, units: list[dict[str, Any]]) -> bool:
    """Whether a file of these tables, and one for the root after them, is a policy; from the words of its page."""
    axes = 1 if mesh is None else len(mesh)
    sizes = [] if mesh is None else list(mesh.values())
    matches = [unit.get("match") for unit in units]
    return (
        axes in (1, 2)
        and all(size == "all" or (type(size) is int and size >= 1) for size in sizes)
        and sizes.count("all") <= 1
        and is_legal_precision(precision or {})
        and all(is_legal_unit(unit, axes) for unit in units)
        and len(set(map(str, [*matches, ""]))) == len(units) + 1
    )


def is_legal_precision(precision: dict[str, Any]) -> bool:
    dtypes = {"float32", "bfloat16", "float16", "float64"}
    choices = {"main": {*dtypes, "given"}, "gather": {"mxfp8", "float8_e4m3fn"}}
    remainders = precision.get("store_param_remainders", False)
    main, compute = precision.get("main", "float32"), precision.get("compute")
    return (
        isinstance(remainders, bool)
        and all(
            key in ("main", "compute", "reduce", "grad", "gather")
            and isinstance(value, str)
            and value in choices.get(key, dtypes)
            for key, value in precision.items()
            if key != "store_param_remainders"
        )
        # Only float32 main weights are quantized, or stored as remainders.
        and ("gather" not in precision or main == "float32")
        and (not remainders or (main == "float32" and compute == "bfloat16" and "gather" not in precision))
    )


def is_legal_unit(unit: dict[str, Any], axes: int) -> bool:
    unsharded = {"parameters": "replicate", "gradients": "partial", "optimizer": "replicate"}
    match, strategy = unit.get("match"), unit.get("strategy", "optim")
    placed = [key for key in unsharded if key in unit]
    if placed:
        words = [unit.get(key) for key in unsharded]
        if "strategy" in unit or not all(
            isinstance(placement, list) and len(placement) == axes for placement in words
        ):
            return False
        depths = [placement.count("shard") for placement in words]
        # The sharded axes are the innermost ones.
        if words != [
            [word] * (axes - n) + ["shard"] * n for word, n in zip(unsharded.values(), depths, strict=True)
        ]:
            return False
        if depths != sorted(depths):
            return False
    return (
        set(unit) <= {"match", "strategy", *unsharded, "granularity", "recompute", "align"}
        and is_legal_align(unit.get("align", 1))
        and isinstance(match, str)
        and "/" not in match
        and isinstance(strategy, str)
        and strategy in STRATEGIES
        and (axes == 2 or strategy not in ("hsdp", "hfsdp"))
        and unit.get("granularity", "row") in ("row", "tensor", "block(2)")
        and isinstance(unit.get("recompute", False), bool)
    )


def is_legal_align(value: Any) -> bool:
    return value == "auto" if isinstance(value, str) else type(value) is int and value >= 1


def toml_of(table: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


@examples(2000)
@given(
    st.none() | MESH | TABLE,
    st.none() | PRECISION | TABLE,
    st.lists(UNIT | PLACED | TABLE, max_size=3),
    st.none() | ALIGN | st.sampled_from([0, -1, 1.5, True, "all"]),
    st.none() | st.sampled_from([0, 1, 2, 1.0, False, "1"]),
)
def test_any_file_is_read_or_refused_as_the_readme_says(
    mesh: Any, precision: Any, units: list[dict[str, Any]], align: Any, prefetch: Any
) -> None:
    options = {"align": align, "prefetch": prefetch}
    keys = {key: value for key, value in options.items() if value is not None}
    text = "" if mesh is None and not keys else "[mesh]\n" + toml_of(mesh or {})
    if keys:
        text += toml_of(keys)
        mesh = mesh or None
    text += "" if precision is None else "[precision]\n" + toml_of(precision)
    text += "".join("[[unit]]\n" + toml_of(unit) for unit in units) + '[[unit]]\nmatch = ""\n'
    legal = align is None or is_legal_align(align)
    legal &= prefetch is None or (type(prefetch) is int and prefetch < 2)
    if not is_legal(mesh, precision, units) or not legal:
        with pytest.raises(PolicyError, match=r"^policy: .*expected .*got "):
            ShardingPolicy.parse(text)
        return
    policy = ShardingPolicy.parse(text)
    assert dict(policy.axes) == (mesh or {"dp": "all"})
    assert [unit.match for unit in policy.units] == [*(unit["match"] for unit in units), ""]
    for unit, table in zip(policy.units, units, strict=False):
        words = [table.get(key) for key in ("parameters", "gradients", "optimizer")]
        chosen = STRATEGIES[table.get("strategy", "optim_grads_params")]
        depths = (
            [placement.count("shard") for placement in words]
            if all(words)
            else [chosen.parameters, chosen.gradients, chosen.optimizer]
        )
        assert [unit.chosen.parameters, unit.chosen.gradients, unit.chosen.optimizer] == depths
        assert unit.granularity == table.get("granularity", "row")
        assert unit.recompute == table.get("recompute", False)
        assert policy.align_of(unit) == table.get("align", policy.align)
    assert align is None or policy.align == align
    assert policy.prefetch == prefetch
    assert policy.precision == PrecisionPolicy(**(precision or {}))


@pytest.mark.parametrize("recompute", [False, True, *SELECTIVE])
def test_recomputation_survives_a_file(recompute: bool | str) -> None:
    policy = ShardingPolicy((UnitPolicy("layers.*", recompute=recompute), UnitPolicy("")))
    assert ShardingPolicy.parse(policy.to_toml()) == policy


@pytest.mark.parametrize("name", SELECTIVE)
def test_a_name_is_for_units_without_units_inside(name: str) -> None:
    assert why_not_around(True, "layers.0", "layers.0.mlp") is None
    assert f"got {name!r} around 'layers.0.mlp'" in (why_not_around(name, "layers.0", "layers.0.mlp") or "")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "compute = 'bfloat16'\nstore_param_remainders = 1",
            "store_param_remainders: expected true or false, got 1",
        ),
        ("store_param_remainders = true", 'expected main = "float32", compute = "bfloat16" and no gather'),
        (
            "compute = 'bfloat16'\ngather = 'mxfp8'\nstore_param_remainders = true",
            "no gather with it, got {'main': 'float32', 'compute': 'bfloat16', 'gather': 'mxfp8'}",
        ),
    ],
)
def test_remainders_need_float32_main_and_bfloat16_compute_weights(lines: str, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)) as raised:
        ShardingPolicy.parse(f"[precision]\n{lines}\n[[unit]]\nmatch = ''\n", "mine.toml")
    assert str(raised.value).startswith("mine.toml: [precision]: store_param_remainders: ")


def test_remainders_are_written_where_they_are_asked_for() -> None:
    text = "[precision]\ncompute = 'bfloat16'\nstore_param_remainders = true\n[[unit]]\nmatch = ''\n"
    policy = ShardingPolicy.parse(text, "mine.toml")
    assert "store_param_remainders = true" in policy.to_toml()
    assert ShardingPolicy.parse(policy.to_toml(), "again") == policy
    assert "remainders" not in ShardingPolicy.parse("[[unit]]\nmatch = ''\n", "x").to_toml()
