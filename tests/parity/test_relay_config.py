"""What a relay file may say, and the error for what it may not."""

from __future__ import annotations

import copy
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import jax_impl
import torch_impl
from bridge.relay.config import BUILT_IN, LARGEST_BETA, ConfigError, RelayConfig
from jax_impl import main_weight_adamw


def quick() -> dict[str, Any]:
    return tomllib.loads((BUILT_IN / "quick.toml").read_text())


@pytest.mark.parametrize("name", ["default", "bfloat16", "quick"])
def test_built_in_relays_load_by_name(name: str) -> None:
    config = RelayConfig.load(name)
    assert [leg.framework for leg in config.legs] == ["torch", "jax", "torch", "jax"]
    assert {leg.sharding.compute for leg in config.legs} == {"bfloat16" if name == "bfloat16" else "float32"}


def test_the_default_relay_has_the_promised_legs_and_odd_sizes() -> None:
    config = RelayConfig.load("default")
    assert [leg.title for leg in config.legs] == [
        "torch x3 fsdp",
        "jax x4 zero1",
        "torch x4 hsdp",
        "jax x8 hfsdp",
    ]
    assert all(leg.steps >= 10 for leg in config.legs)
    sizes = (config.model.vocab_size, config.model.d_model, config.model.d_ff)
    assert all(size % divisor for size in sizes for divisor in (2, 3, 4, 8))


def test_bfloat16_trains_the_same_model_on_the_same_data_by_the_same_frameworks() -> None:
    default, low = (
        tomllib.loads((BUILT_IN / f"{name}.toml").read_text()) for name in ("default", "bfloat16")
    )
    for table in (default, low):
        table["leg"] = [(leg["framework"], leg["steps"]) for leg in table["leg"]]
    assert low == default


def with_leg(**keys: Any) -> dict[str, Any]:
    """The quick relay with ``keys`` in its second leg in place of its policy."""
    table = quick()
    del table["leg"][1]["policy"]
    table["leg"][1].update(keys)
    return table


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [("no_shard", "no_shard"), ("optim", "zero1"), ("optim_grads", "zero2"), ("optim_grads_params", "fsdp")],
)
def test_a_strategy_is_short_for_the_policy_that_has_it(strategy: str, policy: str) -> None:
    short = RelayConfig.of(with_leg(strategy=strategy)).legs[1].sharding
    for runtime in (torch_impl, jax_impl):
        shipped = runtime.ShardingPolicy.load(policy)
        parsed = runtime.ShardingPolicy.parse(short.text)
        assert (parsed.units, parsed.axes) == (shipped.units, shipped.axes)
        assert parsed.precision.compute_dtype == shipped.precision.compute_dtype == "float32"


def test_precision_and_granularity_are_short_for_what_a_policy_says() -> None:
    leg = RelayConfig.of(with_leg(strategy="optim", precision="bfloat16", granularity="block(8)")).legs[1]
    assert leg.sharding.compute == "bfloat16"
    for runtime in (torch_impl, jax_impl):
        policy = runtime.ShardingPolicy.parse(leg.sharding.text)
        assert policy.precision == runtime.ShardingPolicy.load("fsdp_bf16").precision
        assert {unit.granularity for unit in policy.units} == {"block(8)"}


MINE = """
[precision]
main = "float32"
compute = "float16"
[[unit]]
match = ""
"""


def test_a_policy_file_is_found_from_the_relay_file_and_read_once(tmp_path: Path) -> None:
    (tmp_path / "relays").mkdir()
    (tmp_path / "mine.toml").write_text(MINE)
    text = (BUILT_IN / "quick.toml").read_text().replace('"zero1"', '"../mine.toml"')
    (tmp_path / "relays" / "relay.toml").write_text(text)
    leg = RelayConfig.load(tmp_path / "relays" / "relay.toml").legs[1]
    (tmp_path / "mine.toml").unlink()
    assert leg.title == "jax x4 mine"
    assert leg.sharding.text == MINE
    assert Path(leg.sharding.source).resolve() == (tmp_path / "mine.toml").resolve()
    assert leg.sharding.compute == "float16"


def test_a_shipped_policy_is_called_by_the_name_of_its_file() -> None:
    assert RelayConfig.load("quick").legs[1].sharding.source == "zero1.toml"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("leg", 0, "policy"),
            "zero3",
            r"\[\[leg\]\] policy: expected one of fsdp, .* got 'zero3': No such file",
        ),
        (("leg", 0, "policy"), "", r"\[\[leg\]\] policy: expected one of fsdp, .* got ''"),
        (("leg", 0, "policy"), 3, r"\[\[leg\]\] policy: expected one of fsdp, .* got 3"),
        (
            ("leg", 0, "policy"),
            "..",
            r"\[\[leg\]\] policy: expected one of fsdp, .* got '..': Is a directory",
        ),
        (("leg", 1, "framework"), "mxnet", "framework: expected one of torch, jax, got 'mxnet'"),
        (
            ("leg", 0, "ranks"),
            5,
            r"leg 1 .*ranks x microbatches to divide the global batch of 24 .*5 x 2 = 10",
        ),
        (("leg", 0, "ranks"), 0, r"ranks: expected a whole number >= 1, got 0"),
        (("leg", 2, "steps"), "ten", r"steps: expected a whole number >= 1, got 'ten'"),
        (("leg", 2, "stepz"), 10, r"\[\[leg\]\]: expected only the keys .* got \['stepz'\]"),
        (("model", "d_model"), -3, r"\[model\] d_model: expected a whole number >= 1, got -3"),
        (("optimizer", "betas"), [0.9], r"betas: expected two numbers"),
        (("optimizer", "betas"), 0.9, r"betas: expected two numbers in \[0, 1\), got 0.9"),
        (("optimizer", "betas"), ["a", "b"], r"betas: expected two numbers"),
        (("model", "vocab_size"), 100, r"vocab_size: expected at least 257, got 100"),
        (("model", "head_dim"), 5, r"head_dim: expected an even number, got 5"),
        (("model", "n_heads"), 3, r"n_heads: expected a multiple of n_kv_heads = 2, got 3"),
        (
            ("optimizer", "betas"),
            [0.9, 0.99999999],
            r"betas: expected two numbers up to 0.9999907, got \[0.9, ",
        ),
        (("optimizer", "betas"), [math.nan, 0.9], r"betas: expected two numbers in \[0, 1\), got \[nan"),
        (("optimizer", "lr"), math.inf, r"lr: expected a finite number >= 0, got inf"),
        pytest.param(("optimizer", "lr"), 10**400, r"lr: expected a finite number >= 0", id="huge"),
        (("optimizer", "eps"), math.inf, r"eps: expected a finite number >= 0, got inf"),
        (("optimizer", "weight_decay"), math.nan, r"weight_decay: expected a finite number >= 0, got nan"),
        (("data", "seed"), 10**23, r"seed: expected less than 2\*\*63"),
        (("data", "seed"), 2**63, r"seed: expected less than 2\*\*63, got 9223372036854775808"),
        *(
            (("data", "init_scale"), value, r"init_scale: expected a finite number > 0, got ")
            for value in (0, -1.0, math.nan, math.inf, "8")
        ),
        (("leg",), [], r"at least one \[\[leg\]\]"),
    ],
)
def test_a_wrong_value_is_refused_with_place_expected_and_got(
    path: tuple[Any, ...], value: object, message: str
) -> None:
    table = copy.deepcopy(quick())
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        RelayConfig.of(table)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"\[\[leg\]\]: expected the key policy, or strategy in its place, got 'neither'"),
        ({"precision": "bfloat16"}, r"expected the key policy, or strategy in its place"),
        ({"policy": "zero1", "strategy": "optim"}, r"only policy, which replaces .*, got 'also strategy'"),
        (
            {"policy": "zero1", "precision": "bfloat16", "granularity": "row"},
            r"got 'also precision, granularity'",
        ),
        ({"strategy": "zero3"}, "strategy: expected one of no_shard, optim, .* got 'zero3'"),
        ({"strategy": "hsdp"}, "strategy: expected one of no_shard, optim, .* got 'hsdp'"),
        (
            {"strategy": "optim", "precision": "fp8"},
            "precision: expected one of float32, bfloat16, got 'fp8'",
        ),
        (
            {"strategy": "optim", "granularity": "block(0)"},
            r"granularity: expected row, block\(n\) or tensor, got 'block\(0\)'",
        ),
        (
            {"strategy": "optim", "granularity": 32},
            r"granularity: expected row, block\(n\) or tensor, got 32",
        ),
    ],
)
def test_a_leg_says_its_policy_in_one_way(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RelayConfig.of(with_leg(**keys))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[mesh\n", ": expected a TOML file, got an error at: "),
        (b"\xff", ", line 1: expected a TOML file in UTF-8, got byte 0xff"),
    ],
)
def test_a_policy_file_that_is_not_toml_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "bad.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=rf"'bad.toml': {tmp_path}/bad.toml{message}"):
        RelayConfig.of(with_leg(policy="bad.toml"), tmp_path)


def test_the_largest_beta_is_that_of_the_jax_optimizer() -> None:
    table = quick()
    table["optimizer"]["betas"] = [LARGEST_BETA, LARGEST_BETA]
    assert RelayConfig.of(table).optimizer.betas == (LARGEST_BETA, LARGEST_BETA)
    main_weight_adamw(1e-3, LARGEST_BETA, LARGEST_BETA)
    with pytest.raises(ValueError, match="whose powers vanish"):
        main_weight_adamw(1e-3, b2=LARGEST_BETA + 1e-11)


def test_missing_keys_and_tables_are_named() -> None:
    table = quick()
    del table["leg"][0]["steps"]
    with pytest.raises(ConfigError, match="expected the keys steps"):
        RelayConfig.of(table)
    table = quick()
    del table["data"]
    with pytest.raises(ConfigError, match="expected the tables data, leg, model, optimizer"):
        RelayConfig.of(table)


def test_a_file_that_is_missing_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "no.toml"))):
        RelayConfig.load(tmp_path / "no.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[model\n")
    with pytest.raises(ConfigError, match=f"{bad}: expected a TOML file, got an error at: .*line 1"):
        RelayConfig.load(bad)


def test_repeats_are_none_or_enough_to_show_a_spread() -> None:
    assert (RelayConfig.load("default").repeats, RelayConfig.load("quick").repeats) == (0, 3)
    for wrong, expected in (
        (1, "0, or at least 2, as one shows no spread"),
        *((wrong, "a whole number >= 0") for wrong in (-1, 2.0, True)),
    ):
        with pytest.raises(ConfigError) as caught:
            RelayConfig.of({**quick(), "repeats": wrong})
        assert str(caught.value) == f"repeats: expected {expected}, got {wrong!r}"


def test_a_seed_is_any_number_that_a_checkpoint_holds() -> None:
    table = quick()
    for seed in (0, 2**63 - 1):
        table["data"]["seed"] = seed
        assert RelayConfig.of(table).data.seed == seed


@pytest.mark.parametrize(
    ("precision", "leg", "words"),
    [
        ("", {}, ()),
        ('main = "bfloat16"', {}, ("bfloat16",)),
        ('main = "float32"\ncompute = "bfloat16"\ngather = "bfloat16"', {}, ("bfloat16",)),
        ('gather = "mxfp8"', {"moments": "e4m3fn"}, ("mxfp8 weights", "float8_e4m3fn moments")),
    ],
)
def test_a_leg_names_what_is_coarser_than_float32(
    tmp_path: Path, precision: str, leg: dict[str, Any], words: tuple[str, ...]
) -> None:
    (tmp_path / "mine.toml").write_text(f'[precision]\n{precision}\n[[unit]]\nmatch = ""\n')
    table = with_leg(policy="mine.toml", **leg)
    assert RelayConfig.of(table, tmp_path).legs[1].precision_words == words
