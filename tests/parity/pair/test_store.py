"""What a run records is on disk, each array once, and nothing of it is left behind."""

from __future__ import annotations

import mmap
import os
import tempfile
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

from bridge.parity.pair import jax_side, store, torch_side
from bridge.parity.pair.recording import Recording, Side
from bridge.parity.pair.store import Store, StoredLeaves, mapped_together

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
    found = [recording.gradients]
    for call in recording.calls:
        found += [call.inputs, call.outputs, call.gradients]
    assert all(isinstance(one, StoredLeaves) for one in found)
    return [one for one in found if isinstance(one, StoredLeaves)]


@pytest.mark.parametrize("number", [0, 1], ids=["torch", "jax"])
def test_nothing_recorded_is_in_memory_or_twice_on_disk(number: int) -> None:
    run = _sides()[number].record(X, "float32")
    every = _leaves(run)
    assert (
        sum(len(one) for one in every) == 2 + 3 * 2
    )  # weight, bias; input, output and gradient of both calls
    assert sum(one.resident for one in every) == 0
    outer, inner = run.calls
    for group in ("inputs", "outputs", "gradients"):
        one, two = getattr(outer, group), getattr(inner, group)
        assert [one.stored(name).offset for name in one] == [two.stored(name).offset for name in two]


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

    given = dict(run.calls[0].inputs)
    monkeypatch.setattr(store.mmap, "mmap", counting)
    side.rerun("float64", "", 0, given)
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
    for one in mapped_together([leaves.stored("a"), leaves.stored("b")]):
        one[...] = 0
    assert np.array_equal(leaves["a"], array)


def test_a_full_disk_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=f"{tmp_path}: expected room for 72 more bytes.*TMPDIR"):
        Store().keep(np.ones(9))
