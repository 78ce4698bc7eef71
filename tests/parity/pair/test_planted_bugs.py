"""No planted bug is void, each lies where it says, and forward and backward are what they say."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.support.parity.answers import Answers
from tests.support.parity.bugs import BUGS, Bug
from tests.support.parity.pair_tools import Pair, jax_run, torch_run
from tests.support.parity.pairs import build

Run = tuple[float, dict[str, np.ndarray]]
SEED = 3


def run(pair: Pair, side: str, dtype: str) -> Run:
    return torch_run(pair, getattr(torch, dtype)) if side == "torch" else jax_run(pair, getattr(jnp, dtype))


@functools.cache
def unbugged(pair: str, side: str, dtype: str) -> Run:
    return run(build(pair, SEED), side, dtype)


@functools.cache
def answers(pair: str) -> Answers:
    return Answers(build(pair, SEED))


def differences(bug: Bug) -> tuple[float, float]:
    """Of the loss, and the largest of any gradient, by norm; both relative."""
    pair = build(bug.pair, SEED)
    bug.apply(pair)
    loss, gradients = run(pair, bug.side, bug.dtype)
    expected_loss, expected = unbugged(bug.pair, bug.side, bug.dtype)
    assert np.isfinite(loss)
    whole = np.sqrt(sum(np.sum(value**2) for value in expected.values()))
    # What hardly has a gradient has rounding instead.
    changes = [
        float(np.linalg.norm(gradients[name] - value) / max(np.linalg.norm(value), 1e-2 * whole))
        for name, value in expected.items()
    ]
    return abs(loss / expected_loss - 1), max(changes)


def test_names_are_unique_and_there_are_enough() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 60


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_right_answer_is_the_innermost_module_with_a_partner(bug: Bug) -> None:
    assert bug.side == bug.apply.side
    expected = answers(bug.pair).innermost(bug.side, bug.apply.path)
    # Where several torch modules own everything, a fault of the whole JAX model is one of the whole torch model.
    assert bug.module == ("" if not bug.apply.path else expected)
    if bug.parameter is not None:
        assert bug.parameter in answers(bug.pair).tensors
        assert not bug.module or bug.parameter.startswith(f"{bug.module}.")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_no_bug_is_void(bug: Bug) -> None:
    loss, gradients = differences(bug)
    # In one precision a program gives the same result twice, but a changed one may round otherwise.
    least = 1e-3 if bug.dtype == "bfloat16" else 1e-6
    assert max(loss, gradients) > least
    if bug.direction == "backward":
        assert loss < 1e-7
