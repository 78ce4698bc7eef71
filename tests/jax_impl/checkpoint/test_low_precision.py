"""Checkpoints of moments in low precision: bytes and scales are kept on any devices, or converted where asked."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from bridge.core.formats import CheckpointError, open_checkpoint
from jax_impl import (
    abstract_state,
    load_checkpoint,
    main_weight_adamw,
    main_weight_muon,
    memory_report,
    save_checkpoint,
)
from tests.support.jax_impl import checkpoint_runs as runs

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")

FORMATS = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
# Devices, strategy, engine, model, devices that share each parameter.
CASES: list[Any] = [
    (4,),
    (3, "optim"),
    (2, runs.DEFAULT, "pjit"),
    ((2, 2), "hfsdp"),
    (2, runs.DEFAULT, "shard_map", "decoder", 2),
    (2, runs.DEFAULT, "pjit", "decoder", 2),
]


@functools.cache
def optimizer(mu: str | None, nu: str | None = None) -> Any:
    return main_weight_adamw(1e-2, weight_decay=0.1, mu_dtype=mu, nu_dtype=nu or mu)


def trained(case: Any, mu: str | None, nu: str | None = None, count: int = 2) -> Any:
    made = optimizer(mu, nu)
    return runs.train(runs.fresh(*case, optimizer=made), *case, first=0, count=count, optimizer=made)[0]


def read(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.mark.fast_cases("5-bfloat16")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("other", range(1, len(CASES)))
def test_payload_and_scales_are_the_same_bytes_on_other_devices(
    tmp_path: Path, other: int, dtype: str
) -> None:
    here, there = CASES[0], CASES[other]
    plan, target = runs.plan_of(*here), runs.plan_of(*there)
    state = trained(here, dtype)
    save_checkpoint(tmp_path / "a", plan, state)
    loaded = load_checkpoint(tmp_path / "a", target, optimizer(dtype)).state
    save_checkpoint(tmp_path / "b", target, loaded)
    runs.assert_same_bits(read(tmp_path / "b"), read(tmp_path / "a"))
    for leaf, expected in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(abstract_state(target, optimizer(dtype))), strict=True
    ):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (
            expected.shape,
            expected.dtype,
            expected.sharding,
        )
    # All that a device has, padding and rows that several devices have too.
    back = load_checkpoint(tmp_path / "b", plan, optimizer(dtype)).state
    for leaf, expected in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()
    # It is ready to train.
    runs.train(loaded, *there, first=2, count=1, optimizer=optimizer(dtype))


@pytest.mark.slow
def test_stacks_and_their_vectors_are_kept(tmp_path: Path) -> None:
    dtype, here, there = (
        "float8_e4m3fn",
        (2, runs.DEFAULT, "shard_map", "stacked"),
        (3, "optim", "pjit", "stacked"),
    )
    state = trained(here, dtype)
    save_checkpoint(tmp_path / "a", runs.plan_of(*here), state)
    loaded = load_checkpoint(tmp_path / "a", runs.plan_of(*there), optimizer(dtype)).state
    save_checkpoint(tmp_path / "b", runs.plan_of(*there), loaded)
    tensors = read(tmp_path / "a")
    runs.assert_same_bits(read(tmp_path / "b"), tensors)
    norm = "opt_state/mu/layers/attention_norm/scale"
    assert norm.replace("mu/", "mu_scale/") not in tensors, sorted(tensors)
    assert tensors[norm].dtype == np.float32


def test_stock_orbax_reads_values_and_scales_under_their_names(tmp_path: Path) -> None:
    plan = runs.plan_of(*CASES[0])
    state = trained(CASES[0], "float8_e4m3fn")
    save_checkpoint(tmp_path / "a", plan, state)
    restored = ocp.StandardCheckpointer().restore(tmp_path / "a")
    for path, info in plan.parameters.items():
        node, scale = restored["opt_state"]["nu"], restored["opt_state"]["nu_scale"]
        for name in path.split("/"):
            node, scale = node[name], scale.get(name) if scale is not None else None
        scaled = len(info.shape) > 1
        assert node.shape == info.shape
        assert str(node.dtype) == ("float8_e4m3fn" if scaled else "float32")
        if scaled:
            assert scale.shape == (*info.shape[:-1], 1)
            # The largest element of each row is the largest number.
            assert np.max(np.asarray(node, np.float32), -1).min() == 448
        else:
            assert scale is None


@pytest.mark.parametrize(("dtype", "size"), [(None, 12), ("bfloat16", 8), ("float8_e4m3fn", 6)])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_bytes_at_rest(engine: str, dtype: str | None, size: int) -> None:
    """Of weights and moments 4 bytes and twice those of the format an element, but of vectors; 8 of scales a row."""
    case = (2, runs.DEFAULT, engine)
    plan = runs.plan_of(*case)
    state = runs.fresh(*case, optimizer=optimizer(dtype))
    devices = memory_report(plan, state).devices
    total = sum(sum(x.data.nbytes for x in leaf.addressable_shards) for leaf in jax.tree.leaves(state))
    assert sum(device.total for device in devices) == total
    held = sum(device.main_weights + device.moments for device in devices)
    shapes = {path: info.shape for path, info in plan.parameters.items()}
    copies = {path: 2 if path in plan.whole_parameters else 1 for path in shapes}
    expected = 0
    for path, shape in shapes.items():
        vectors = dtype == "float8_e4m3fn" and len(shape) == 1
        rows = 0 if dtype != "float8_e4m3fn" or vectors else math.prod(shape[:-1])
        # Of rows that the pjit engine cuts, each device has all scales.
        whole = engine == "pjit" and plan.logical[path].dimension in (None, len(shape) - 1)
        expected += copies[path] * math.prod(shape) * (12 if vectors else size) + 8 * rows * (
            2 if whole else 1
        )
    assert held == expected


@pytest.mark.fast_cases("True-before0-after0-shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((None, None), ("float8_e4m3fn", "float8_e5m2")),
        (("float8_e5m2", "float16"), (None, None)),
        (("bfloat16", "float8_e4m3fn"), ("float16", "bfloat16")),
        (("float8_e4m3fn", "bfloat16"), ("float8_e4m3fn", "float16")),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_moments_of_another_format_are_refused_or_converted(
    tmp_path: Path, before: Any, after: Any, engine: str, strict: bool
) -> None:
    here, there = (3,), (2, runs.DEFAULT, engine)
    plan, target = runs.plan_of(*here), runs.plan_of(*there)
    save_checkpoint(tmp_path / "a", plan, trained(here, *before))
    with pytest.raises(CheckpointError, match='moments="convert"'):
        load_checkpoint(tmp_path / "a", target, optimizer(*after))
    loaded = load_checkpoint(tmp_path / "a", target, optimizer(*after), moments="convert", strict=strict)
    assert not loaded.fresh
    save_checkpoint(tmp_path / "b", target, loaded.state)
    saved, converted = read(tmp_path / "a"), read(tmp_path / "b")
    assert converted["opt_state/count"] == 2
    for name, (old, new) in {"mu": (before[0], after[0]), "nu": (before[1], after[1])}.items():
        for path in plan.parameters:
            key = f"opt_state/{name}/{path}"
            if old == new:
                assert converted[key].tobytes() == saved[key].tobytes()
            # Rows of a float8 moment are within a spacing of their largest element's.
            exact, stored = (decoded(arrays, name, path) for arrays in (saved, converted))
            spacing = {"float8_e4m3fn": 2**-3, "float8_e5m2": 2**-2, "bfloat16": 2**-8}.get(new, 2**-10)
            least = np.abs(exact).max(-1, keepdims=True) * 2.0**-14
            assert np.all(np.abs(stored - exact) <= spacing * np.maximum(np.abs(exact), least)), key
    runs.train(loaded.state, *there, first=2, count=1, optimizer=optimizer(*after))


def decoded(arrays: Any, name: str, path: str) -> np.ndarray:
    values = np.asarray(arrays[f"opt_state/{name}/{path}"], np.float64)
    return values * arrays.get(f"opt_state/{name}_scale/{path}", 1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:shard_map engine")
@pytest.mark.parametrize(
    ("engine", "before", "after"), [("shard_map", None, "float8_e4m3fn"), ("pjit", "float16", None)]
)
def test_muons_moments_are_converted(tmp_path: Path, before: Any, after: Any, engine: str) -> None:
    def muon(dtype: Any) -> Any:
        return main_weight_muon(1e-2, momentum_dtype=dtype, mu_dtype=dtype, nu_dtype=dtype)

    here: Any = (2, runs.DEFAULT, engine)
    plan = runs.plan_of(*here)
    state = runs.fresh(*here, optimizer=muon(before))
    state, _ = runs.train(state, *here, first=0, count=1, optimizer=muon(before))
    save_checkpoint(tmp_path / "a", plan, state)
    loaded = load_checkpoint(tmp_path / "a", plan, muon(after), moments="convert")
    assert not loaded.fresh
    save_checkpoint(tmp_path / "b", plan, loaded.state)
    saved, converted = read(tmp_path / "a"), read(tmp_path / "b")
    traces = [name.removeprefix("opt_state/trace/") for name in saved if name.startswith("opt_state/trace/")]
    assert traces
    for path in traces:
        exact, stored = (decoded(arrays, "trace", path) for arrays in (saved, converted))
        largest = np.abs(exact).max(-1, keepdims=True)
        assert np.all(largest > 0)
        np.testing.assert_allclose(stored / largest, exact / largest, atol=2**-4 if after else 1e-6)
    runs.train(loaded.state, *here, first=1, count=1, optimizer=muon(after))


@pytest.mark.slow
def test_a_chains_moments_with_scales_are_kept_or_refused(tmp_path: Path) -> None:
    def chain(dtype: Any) -> Any:
        return optax.chain(optax.clip(1.0), main_weight_adamw(1e-2, mu_dtype=dtype, nu_dtype=dtype))

    case: Any = (2, runs.DEFAULT, "pjit")
    plan = runs.plan_of(*case)
    for dtype in (None, "float8_e4m3fn"):
        state = runs.fresh(*case, optimizer=chain(dtype))
        save_checkpoint(tmp_path / str(dtype), plan, state)
    loaded = load_checkpoint(tmp_path / "float8_e4m3fn", plan, chain("float8_e4m3fn"), moments="convert")
    assert not loaded.fresh
    for strict in (True, False):
        with pytest.raises(
            CheckpointError, match=r'moments="convert": expected mu, nu .* not a part of another'
        ):
            load_checkpoint(tmp_path / "None", plan, chain("float8_e4m3fn"), moments="convert", strict=strict)
    loaded = load_checkpoint(tmp_path / "float8_e4m3fn", plan, chain("bfloat16"), moments="convert")
    assert not loaded.fresh


@pytest.mark.slow
def test_without_strictness_moments_of_another_format_are_fresh(tmp_path: Path) -> None:
    case = (2,)
    plan = runs.plan_of(*case)
    save_checkpoint(tmp_path / "a", plan, trained(case, "float16"))
    # The same dtype without scales would be other numbers.
    plain = optax.adamw(1e-2, mu_dtype=np.float16)
    loaded = load_checkpoint(tmp_path / "a", plan, plain, strict=False)
    matrices = {path for path, info in plan.parameters.items() if len(info.shape) > 1}
    assert {name for name in loaded.fresh if "/mu/" in name} >= {
        f"opt_state/0/mu/{path}" for path in matrices
    }
    loaded = load_checkpoint(tmp_path / "a", plan, optimizer("float8_e4m3fn"), strict=False)
    assert {name for name in loaded.fresh if "/mu/" in name} == {f"opt_state/mu/{path}" for path in matrices}
    # Where there is another chain of moments, too, they are found and converted.
    loaded = load_checkpoint(tmp_path / "a", plan, optax.adamw(1e-2), strict=False, moments="convert")
    save_checkpoint(tmp_path / "b", plan, loaded.state)
    saved, converted = read(tmp_path / "a"), read(tmp_path / "b")
    for path in plan.parameters:
        np.testing.assert_allclose(converted[f"opt_state/0/nu/{path}"], decoded(saved, "nu", path), rtol=1e-6)
    assert not {name for name in loaded.fresh if "/mu/" in name or "/nu/" in name}


def test_another_word_for_moments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='moments: expected "same" or "convert"'):
        load_checkpoint(tmp_path / "a", runs.plan_of(2), optimizer(None), moments="float32")
