"""Inputs that are one tensor have one gradient, whatever it is given as."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from bridge.parity import parity
from bridge.parity.recorded.recording import Rerun
from bridge.parity.stages.backward import _summed, places_in

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x,
        lambda x: x.transpose(1, 0, 2),
        lambda x: x[:, 2:5],
        lambda x: x.reshape(24, 8)[::-1],
        lambda x: np.repeat(x[:1], 3, axis=0),
    ],
    ids=["the same", "transposed", "a slice", "reversed rows", "repeated"],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_the_gradient_of_a_part_goes_to_where_it_is_from(part: Any, zeros: bool) -> None:
    x = np.where(X > 0.5, 0.0, X) if zeros else X.astype(np.float64)
    numbers = np.arange(x.size).reshape(x.shape)
    taken = part(x)
    positions = places_in(x, taken)
    assert positions is not None
    whole = x.size == taken.size and np.array_equal(x, taken)
    clear = np.ones(taken.size, bool) if whole else taken.reshape(-1) != 0
    assert np.array_equal(np.flatnonzero(clear), positions.taken)
    assert np.array_equal(positions.target, part(numbers).reshape(-1)[clear])
    assert (positions.ambiguous.size > 0) == (zeros and not whole)


def test_other_arrays_are_no_part() -> None:
    assert places_in(X, X + 1) is None
    assert places_in(X, np.zeros((2, 3))) is None
    assert places_in(np.where(X > 0, X, 0), np.zeros((2, 3))) is None
    assert places_in(np.arange(6), np.arange(6)) is None
    # Zeros are in many arrays, so that one other number may be there by chance.
    rectified = np.where(X > 0, X, 0)
    assert places_in(rectified, np.array([0, 0, 0, X.max()], X.dtype)) is None


def test_a_gradient_is_unknown_where_a_part_may_be_from_several_places() -> None:
    whole = np.array([0.0, 1.0, 2.0, 0.0, 3.0, 4.0])
    part = whole[1:4]
    both = Rerun({}, input_gradients={"0": np.ones(6), "1": np.array([10.0, 20.0, 30.0])})
    summed = _summed("0", {"0": whole, "1": part}, both, both)
    assert summed.known.tolist() == [False, True, True, False, True, True]
    for total in (summed.high, summed.low):
        assert total is not None
        assert total[summed.known].tolist() == [11, 21, 1, 1]


class Mixer(nn.Module):
    """Reads one tensor under several names. ``way``: how it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, y: Any = None, more: Any = None) -> torch.Tensor:
        other = more["y"] if more is not None else x if y is None else y
        scores = self.q(x) @ self.k(other).transpose(1, 2)
        return torch.tanh(scores / 8) @ other + x


class Around(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.inp, self.mixer, self.out, self.way = nn.Linear(8, 8), Mixer(), nn.Linear(8, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inp(x)
        calls = {
            "once": lambda: self.mixer(y),
            "twice": lambda: self.mixer(y, y),
            "by name": lambda: self.mixer(y, y=y.view_as(y)),
            "in a dict": lambda: self.mixer(y, more={"y": y.clone()}),
        }
        return self.out(calls[self.way]())


class JaxMixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any, y: Any = None) -> Any:
        other = x if y is None else y
        return jax.numpy.tanh(self.q(x) @ self.k(other).swapaxes(1, 2) / 8) @ other + x


class JaxAround(nnx.Module):
    """``stop``: a planted fault, no gradient flows into what the keys and values are made of."""

    def __init__(self, twice: bool, stop: bool) -> None:
        rngs = nnx.Rngs(0)
        self.inp, self.mixer = nnx.Linear(8, 8, rngs=rngs), JaxMixer(rngs)
        self.out, self.twice, self.stop = nnx.Linear(8, 4, rngs=rngs), twice, stop

    def __call__(self, x: Any) -> Any:
        y = self.inp(x)
        again = jax.lax.stop_gradient(y) if self.stop else y
        return self.out(self.mixer(y, again) if self.twice else self.mixer(y))


class Louder(JaxAround):
    """A fault that changes all gradients and is in none of the modules inside."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) * 1.1


RULES = [
    {"torch": f"{a}.{parameter}{axes}", "jax": f"{a.replace('.', '/')}/{twin}"}
    for a in ("inp", "mixer.q", "mixer.k", "out")
    for parameter, twin, axes in (("weight", "kernel : i_ o", " : o i_"), ("bias", "bias", ""))
]


@pytest.mark.parametrize(
    ("way", "twice"), [("twice", False), ("by name", False), ("in a dict", False), ("once", True)]
)
def test_a_right_port_is_the_same_and_a_fault_elsewhere_has_one_place(way: str, twice: bool) -> None:
    torch.manual_seed(0)
    for stop in (False, True) if twice else (False,):
        options: dict[str, Any] = {"mapping": {"name": "m", "rule": RULES}, "weights": "torch", "steps": 0}
        report = parity(Around(way), JaxAround(twice, stop), X, **options)
        assert bool(report) != stop, report.summary()
        # Whose gradient is stopped is seen: what is made of the mixer's input lacks a part.
        assert not stop or report.first_divergence is not None
    own = parity(Around(way), Louder(twice, False), X, **options)
    assert not own
    assert not any(row.verdict == "introduced" and row.stage == "backward" for row in own.rows), own.summary()
