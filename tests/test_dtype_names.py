"""Names of dtypes as people type them, wherever a dtype is given by name."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bridge.checkpoints.ground.outputs import parse_casts
from bridge.compiling.target_step import load_batch_shapes
from bridge.core.dtype_names import full_name, hint
from bridge.core.formats.tensors.base import DTYPES, CheckpointError, dtype_from_name
from bridge.core.sharding import PolicyError, PrecisionPolicy, ShardingPolicy
from bridge.parity.recorded.recording import checked_dtype
from bridge.planning.cost.optimizers import parse_optimizer
from bridge.planning.models.errors import PlanError
from bridge.relay.config import Leg
from jax_impl.optimizer.moments import MomentFormat
from jax_impl.runtime.groups.precision import Precision

MEANT = {
    "bfloat16": "bf16 BF16 bfloat16 torch.bfloat16 jnp.bfloat16 ml_dtypes.bfloat16",
    "float16": "fp16 f16 F16 half float16 torch.half",
    "float32": "fp32 f32 F32 float single Float32 np.float32",
    "float64": "fp64 f64 double",
    "float8_e4m3fn": "f8e4m3 F8_E4M3 fp8_e4m3 fp8_e4m3fn e4m3 float8_e4m3 float8e4m3fn f8E4M3FN",
    "float8_e5m2": "f8e5m2 F8_E5M2 fp8_e5m2 e5m2 float8_e5m2",
    "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e8m0fnu": "f8_e8m0 e8m0",
    "int64": "i64 I64 long",
    "uint8": "u8 U8 byte",
    "complex64": "c64 cfloat",
    "bool": "BOOL boolean torch.bool",
}


@pytest.mark.parametrize(("name", "typed"), MEANT.items(), ids=MEANT)
def test_short_names_mean_what_frameworks_mean(name: str, typed: str) -> None:
    assert {text: full_name(text, DTYPES) for text in typed.split()} == dict.fromkeys(typed.split(), name)


@pytest.mark.parametrize("text", ["fp8", "int", "bf", "x", "", "e5m9", "float7", "f", "fp", "bool8"])
def test_what_means_no_dtype_or_several_stays_as_it_is(text: str) -> None:
    assert full_name(text, DTYPES) == text


def test_an_exact_name_wins() -> None:
    assert full_name("float8_e4m3", ("float8_e4m3", "float8_e4m3fn")) == "float8_e4m3"


def test_casts_take_short_names() -> None:
    expected = {"a": np.dtype(ml_dtypes.bfloat16), "*=b": np.dtype(ml_dtypes.float8_e4m3fn)}
    assert parse_casts(["a=bf16", "*=b=F8_E4M3"]) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*=fp8", "got 'fp8'; did you mean float8_e4m3fn or float8_e5m2?"),
        ("*=flaot32", "got 'flaot32'; did you mean float32"),
        ("*=banana", r"float32, .*bf16, fp16, .*got 'banana'$"),
    ],
)
def test_a_wrong_cast_names_what_is_near(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message.replace("?", r"\?")):
        parse_casts([text])
    assert hint("banana", DTYPES) == ""


def test_files_of_checkpoints_have_full_names_only() -> None:
    with pytest.raises(CheckpointError, match="got 'bf16'"):
        dtype_from_name("bf16")


def test_policies_take_short_names_in_files_and_in_programs(tmp_path: Path) -> None:
    text = "[precision]\nmain = 'fp32'\ncompute = 'bf16'\nreduce = 'float'\ngather = 'f8e4m3'\n"
    (tmp_path / "mine.toml").write_text(text + "[[unit]]\nmatch = ''\nstrategy = 'optim'\n")
    policy = ShardingPolicy.load(tmp_path / "mine.toml").precision
    assert policy == PrecisionPolicy("float32", "bfloat16", "float32", None, "float8_e4m3fn")
    assert PrecisionPolicy(compute="half").compute_dtype == "float16"
    with pytest.raises(PolicyError, match="got 'bf17'"):
        PrecisionPolicy(compute="bf17")


def test_a_plan_takes_short_names_of_moments_and_batches(tmp_path: Path) -> None:
    assert parse_optimizer("adamw", "bf16,fp32", None).moments == ("bfloat16", "float32")
    assert parse_optimizer("adamw", "f8e4m3", None).moments == ("float8_e4m3fn",) * 2
    with pytest.raises(PlanError, match=r"--moments: expected one of float32, .* got 'fp8'"):
        parse_optimizer("adamw", "fp8", None)
    (tmp_path / "batch.toml").write_text(
        'x = { shape = [2], dtype = "bf16" }\ny = { shape = [2], dtype = "i32" }\n'
    )
    assert [array.dtype for array in load_batch_shapes(tmp_path / "batch.toml").values()] == [
        "bfloat16",
        "int32",
    ]


def test_parity_and_relays_take_short_names() -> None:
    assert checked_dtype("bf16", 0) == "bfloat16"
    with pytest.raises(ValueError, match="got 'float64'"):
        checked_dtype("double", 0)
    leg = Leg("torch", 2, "optim", steps=1, precision="bf16", moments="half")
    assert (leg.precision, leg.moments) == ("bfloat16", "float16")


def test_the_jax_runtime_takes_short_names() -> None:
    assert Precision.of("bf16", "float", None, "f8e4m3") == Precision(
        "bfloat16", "float32", None, "float8_e4m3fn", "float32"
    )
    assert MomentFormat.of("mu_dtype", "bf16").dtype == ml_dtypes.bfloat16
    assert MomentFormat.of("mu_dtype", "F8_E5M2").dtype == ml_dtypes.float8_e5m2
