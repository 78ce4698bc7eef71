"""The built-in losses of both sides, and results of ranks joined to those of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge.parity.jax import losses as jax_losses
from bridge.parity.torch import losses as torch_losses
from bridge.parity.torch.ranks import _join, _way

TOKENS = np.array([[1, 3, 0, 2], [2, 2, 1, 0]])
LOGITS = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)


def expected() -> float:
    logs = LOGITS.astype(np.float64)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    return float(-np.take_along_axis(logs, TOKENS[:, 1:, None], -1).mean())


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_loss_of_the_next_token(wrapped: bool) -> None:
    def model(array: Any) -> Any:
        def called(tokens: Any) -> Any:
            np.testing.assert_array_equal(np.asarray(tokens), TOKENS[:, :-1])
            return SimpleNamespace(logits=array) if wrapped else array

        return called

    in_jax = jax_losses.next_token(model(jnp.asarray(LOGITS, "bfloat16")), jnp.asarray(TOKENS))
    assert in_jax.dtype == jnp.float32
    assert float(in_jax) == pytest.approx(expected(), rel=1e-2)
    assert float(jax_losses.next_token(model(jnp.asarray(LOGITS)), jnp.asarray(TOKENS))) == pytest.approx(
        expected(), rel=1e-6
    )
    in_torch: Any = model(torch.from_numpy(LOGITS))
    assert float(torch_losses.next_token_loss(in_torch, torch.from_numpy(TOKENS))) == pytest.approx(
        expected(), rel=1e-6
    )


@pytest.mark.parametrize("batch", [TOKENS.astype(np.float32), TOKENS[0]])
def test_batches_that_are_no_tokens_are_refused(batch: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected a batch of integer tokens"):
        jax_losses.next_token(None, jnp.asarray(batch))
    nothing: Any = None
    with pytest.raises(ValueError, match="expected a batch of integer tokens"):
        torch_losses.next_token_loss(nothing, torch.from_numpy(batch))


def test_parts_of_ranks_are_joined_along_an_axis_or_averaged() -> None:
    parts = [np.float32([[1, 2]]), np.float32([[3, 5]])]
    np.testing.assert_array_equal(_join(parts, 0), np.float32([[1, 2], [3, 5]]))
    np.testing.assert_array_equal(_join(parts, 1), np.float32([[1, 2, 3, 5]]))
    mean = _join(parts, "mean")
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(mean, np.float32([[2, 3.5]]))
    assert _join([parts[0], parts[0].copy()], "mean") is parts[0]


def test_how_leaves_of_ranks_become_one() -> None:
    rows, table = np.arange(6.0).reshape(2, 3), np.ones((4, 3))
    assert _way([rows], 2) == "mean"
    assert _way([rows, rows + 1], 2) == 0
    assert _way([rows, rows.copy()], 2) == 0
    assert _way([table, table.copy()], 2) == "mean"
    assert _way([rows[:1], rows[:1].copy()], 1) == "mean"
    assert _way([np.float32(1), np.float32(2)], 2) == "mean"
    assert _way([np.int32(1), np.int32(2)], 2) is None
    assert _way([rows.T, rows.T + 1], 2) == 1
    assert _way([table, table + 1], 2) == 0
    assert _way([rows[:1], rows], 2) == 0
    assert _way([rows[:, :1], rows], 2) is None
