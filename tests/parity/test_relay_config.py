"""What a relay file may say, and the error for what it may not."""

from __future__ import annotations

import copy
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bridge.parity.config import BUILT_IN, LARGEST_BETA, ConfigError, RelayConfig
from jax_impl import main_weight_adamw


def quick() -> dict[str, Any]:
    return tomllib.loads((BUILT_IN / "quick.toml").read_text())


@pytest.mark.parametrize("name", ["default", "bfloat16", "quick"])
def test_built_in_relays_load_by_name(name: str) -> None:
    config = RelayConfig.load(name)
    assert [leg.framework for leg in config.legs] == ["torch", "jax", "torch", "jax"]
    assert {leg.precision for leg in config.legs} == {"bfloat16" if name == "bfloat16" else "float32"}


def test_the_default_relay_has_the_promised_legs_and_odd_sizes() -> None:
    config = RelayConfig.load("default")
    assert [(leg.ranks, leg.strategy) for leg in config.legs] == [
        (3, "optim_grads_params"),
        (4, "optim"),
        (2, "optim_grads"),
        (8, "optim_grads_params"),
    ]
    assert all(leg.steps >= 10 for leg in config.legs)
    sizes = (config.model.vocab_size, config.model.d_model, config.model.d_ff)
    assert all(size % divisor for size in sizes for divisor in (2, 3, 4, 8))


def test_bfloat16_differs_from_the_default_in_precision_alone() -> None:
    default, low = (
        tomllib.loads((BUILT_IN / f"{name}.toml").read_text()) for name in ("default", "bfloat16")
    )
    for leg in low["leg"]:
        assert leg.pop("precision") == "bfloat16"
    assert low == default


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("leg", 0, "strategy"), "zero3", "strategy: expected one of no_shard, optim, .* got 'zero3'"),
        (("leg", 1, "framework"), "mxnet", "framework: expected one of torch, jax, got 'mxnet'"),
        (("leg", 1, "precision"), "fp8", "precision: expected one of float32, bfloat16, got 'fp8'"),
        (
            ("leg", 0, "ranks"),
            5,
            r"leg 1 .*ranks x microbatches to divide the global batch of 24 .*5 x 2 = 10",
        ),
        (
            ("leg", 1, "granularity"),
            "block(0)",
            r"granularity: expected row, block\(n\) or tensor, got 'block\(0\)'",
        ),
        (("leg", 1, "granularity"), 32, r"granularity: expected row, block\(n\) or tensor, got 32"),
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
    with pytest.raises(ConfigError, match="not a TOML file"):
        RelayConfig.load(bad)
