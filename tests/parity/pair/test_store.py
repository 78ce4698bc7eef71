"""What a run records is on disk, each array once, and nothing of it is left behind."""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn

from bridge.core.mapping import parse_mapping
from bridge.parity import parity
from bridge.parity.jax import side as jax_side
from bridge.parity.partners.runs import Runs
from bridge.parity.partners.weight_map import WeightMap
from bridge.parity.recorded import store
from bridge.parity.recorded.recording import Recording, Side
from bridge.parity.recorded.store import Store, StoredLeaves, map_together, trim_heap
from bridge.parity.stages import compare as stages
from bridge.parity.stages.compare import rerun_reordered
from bridge.parity.torch import side as torch_side
from tests.support.parity.small_twins import BATCH, MAPPING, JaxMLP, TorchMLP

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def all_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Arrays of any size are stored, in a folder of this test."""
    monkeypatch.setattr(store, "LEAST", 0)
    monkeypatch.setattr(torch_side, "LEAST", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert [name for name in os.listdir(tmp_path) if name.startswith("twinshard")] == []


class Pair(nn.Module):
    """A layer within a module; what the layer returns is what the module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class JaxPair(nnx.Module):
    """Its twin."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def _sides() -> list[Side]:
    return [torch_side.TorchSide(Pair(), "probe"), jax_side.JaxSide(JaxPair(), "probe")]


def _leaves(recording: Recording) -> list[StoredLeaves]:
    stored = [recording.gradients]
    for call in recording.calls:
        stored += [call.inputs, call.outputs, call.gradients]
    assert all(isinstance(leaves, StoredLeaves) for leaves in stored)
    return [leaves for leaves in stored if isinstance(leaves, StoredLeaves)]


@pytest.mark.parametrize(
    "number", [pytest.param(0, id="torch", marks=pytest.mark.slow), pytest.param(1, id="jax")]
)
def test_nothing_recorded_is_in_memory_or_twice_on_disk(number: int) -> None:
    run = _sides()[number].record(X, "float32")
    every = _leaves(run)
    assert (
        sum(len(leaves) for leaves in every) == 2 + 3 * 2
    )  # weight, bias; input, output and gradient of both calls
    assert sum(leaves.resident for leaves in every) == 0
    outer, inner = run.calls
    for group in ("inputs", "outputs", "gradients"):
        outer_leaves, inner_leaves = getattr(outer, group), getattr(inner, group)
        assert [outer_leaves.file_location(name).offset for name in outer_leaves] == [
            inner_leaves.file_location(name).offset for name in inner_leaves
        ]


def _floats_in_memory() -> dict[int, Any]:
    """Arrays and tensors of floats that have elements in memory, by id."""
    gc.collect()
    tensors = [tensor for tensor in gc.get_objects() if issubclass(type(tensor), torch.Tensor)]
    floats = [
        tensor for tensor in tensors if tensor.is_floating_point() and tensor.untyped_storage().nbytes() > 8
    ]
    arrays = [array for array in jax.live_arrays() if array.dtype.kind == "f" and array.size > 1]
    return {id(array): array for array in (*floats, *arrays)}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["torch", "jax"])
def test_nothing_that_a_rerun_needs_is_in_memory(number: int) -> None:
    """Neither the copy's weights nor the arguments of calls."""
    side = _sides()[number]
    before = _floats_in_memory()
    gc.freeze()  # what is there before, a million objects of the frameworks, is not searched again
    try:
        run = side.record(X, "float32")
        left = [array for key, array in _floats_in_memory().items() if key not in before]
    finally:
        gc.unfreeze()
    assert [tuple(array.shape) for array in left] == []
    del left
    again = side.rerun("float32", "linear", 0, {})
    assert np.array_equal(again.outputs[""], run.calls[1].outputs[""])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["own", "torch"])
def test_between_stages_memory_holds_the_models_alone(weights: Any) -> None:
    torch_model, jax_model = TorchMLP().eval(), JaxMLP()

    def size(arrays: dict[int, Any]) -> int:
        return sum(array.nbytes for array in arrays.values())

    parity(torch_model, jax_model, BATCH, mapping=parse_mapping(MAPPING, "small"), steps=1)
    before, sizes = size(_floats_in_memory()), dict[str, int]()
    parity(
        torch_model,
        jax_model,
        BATCH,
        mapping=parse_mapping(MAPPING, "small"),
        weights=weights,
        steps=1,
        progress=lambda text: sizes.update({text: size(_floats_in_memory())}),
    )
    assert len(sizes) == 5
    assert set(sizes.values()) == {before}


class Wide(nn.Module):
    """Twelve parameters of 256 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _wide(parameters: dict[str, Any], x: Any) -> Any:
    for number in range(12):
        x = x @ parameters[f"w{number}"]
    return x


def test_gradients_of_rows_in_another_order_are_compared_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Wide()
    parameters = {
        f"w{number}": parameter.detach().numpy().T.copy()
        for number, parameter in enumerate(model.parameters())
    }
    rules = [
        f'[[rule]]\ntorch = "layers.{number}.weight : o i"\njax = "w{number} : i o"\n' for number in range(12)
    ]
    table = parse_mapping("\n".join(['name = "wide"', *rules]), "wide")
    sides = torch_side.TorchSide(model, "probe"), jax_side.JaxSide((_wide, parameters), "probe")
    relation = WeightMap.of(table, sides[0].weights(), sides[1].weights())
    batch = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    runs = Runs(*sides, batch, "float32")
    peaks: list[int] = []
    real = stages.gap

    def watched(a: np.ndarray, b: np.ndarray) -> float:
        peaks.append(tracemalloc.get_traced_memory()[1])
        return real(a, b)

    monkeypatch.setattr(stages, "gap", watched)
    monkeypatch.setattr(sides[0], "in_order", lambda *_: runs.torch_low)
    monkeypatch.setattr(sides[1], "in_order", lambda *_: runs.jax_low)
    tracemalloc.start()
    try:
        rerun_reordered(runs, batch, relation)
    finally:
        tracemalloc.stop()
    assert len(peaks) == 2 * 13
    # All gradients of the three runs, in float32, float32 and float64, are 12 MB.
    assert max(peaks) < 12 * 2**20 / 3


def test_memory_can_be_given_back() -> None:
    """Where the C library can."""
    trim_heap()
    assert store._trim() is None or store._trim()(0) in (0, 1)


@pytest.mark.parametrize("number", [0, 1], ids=["torch", "jax"])
def test_a_rerun_and_a_training_use_stored_weights(number: int) -> None:
    side = _sides()[number]
    run = side.record(X, "float64")
    again = side.rerun("float64", "linear", 0, {}, cotangents=run.find("linear").gradients)  # type: ignore[union-attr]
    assert np.array_equal(again.outputs[""], run.calls[1].outputs[""])
    for name, gradient in again.gradients.items():
        assert np.array_equal(gradient, run.gradients[name])
    before = {name: array.copy() for name, array in side.weights().items()}
    trained = side.train([X, X], "float32")
    for name, array in side.weights().items():
        assert np.array_equal(array, before[name])
        assert not np.array_equal(trained.first[name], array)
        assert not np.array_equal(trained.last[name], trained.first[name])
    assert isinstance(trained.first, StoredLeaves)
    assert trained.first.resident == 0


@pytest.mark.parametrize("number", [0, 1], ids=["torch", "jax"])
def test_a_rerun_of_many_parameters_opens_few_files(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map holds a file descriptor, of which a process may have 1024."""
    side = _sides()[number]
    run = side.record(X, "float64")
    opened: list[int] = []
    real = mmap.mmap

    def counting(*args: Any, **kwargs: Any) -> mmap.mmap:
        opened.append(1)
        return real(*args, **kwargs)

    inputs = dict(run.calls[0].inputs)
    monkeypatch.setattr(store.mmap, "mmap", counting)
    side.rerun("float64", "", 0, inputs)
    # One for all weights; torch also looks at the shapes of the recorded inputs.
    assert sum(opened) <= 3


def test_an_optimizer_that_keeps_the_weights_trains() -> None:
    """Its state and the step's weights are one array at the first step."""
    keeps = optax.GradientTransformation(
        lambda weights: weights,
        lambda got, state, weights: (jax.tree.map(lambda g, old: 0.1 * (old - g), got, state), weights),
    )
    trained = jax_side.JaxSide(JaxPair(), "probe", optimizer=keeps).train([X, X])
    assert len(trained.losses) == 2


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    kept = Store().leaves({"x": np.ones(9)})
    with pytest.raises(RuntimeError):
        raise RuntimeError(f"{kept['x'].sum()}")
    assert [name for name in os.listdir(tmp_path) if name.startswith("twinshard")] == []


@pytest.mark.parametrize("dtype", ["float64", "float16", "bool", "int64", "complex64", ml_dtypes.bfloat16])
def test_arrays_come_back(dtype: str) -> None:
    array = (np.arange(24).reshape(2, 3, 4) % 5).astype(dtype).transpose(2, 0, 1)
    leaves = Store().leaves({"a": array, "b": array[:, :1], "empty": array[:0]})
    assert np.array_equal(leaves["a"], array)
    assert leaves["a"].dtype == array.dtype
    assert np.array_equal(leaves["b"], array[:, :1])
    assert leaves["empty"].shape == (0, 2, 3)
    with pytest.raises(ValueError, match="read-only"):
        leaves["a"][0] = 0
    for mapped in map_together([leaves.file_location("a"), leaves.file_location("b")]):
        mapped[...] = 0
    assert np.array_equal(leaves["a"], array)


def test_a_full_disk_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=f"{tmp_path}: expected room for 72 more bytes.*TMPDIR"):
        Store().keep(np.ones(9))
