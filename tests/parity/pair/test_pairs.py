"""The pairs that judge the comparison are themselves equal: losses and gradients agree in float32."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.parity.pair_tools import jax_run, torch_run, translated
from tests.support.parity.pairs import FURTHER, PAIRS, build


@pytest.mark.fast_cases("lstm-0")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*PAIRS, *FURTHER])
def test_a_correct_pair_has_equal_losses_and_gradients(name: str, seed: int) -> None:
    pair = build(name, seed)
    expected_loss, gradients = torch_run(pair)
    loss, jax_gradients = jax_run(pair)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    expected = translated(gradients, pair.mapping, pair.axes)
    assert sorted(jax_gradients) == sorted(expected)
    whole = np.sqrt(sum(np.sum(value**2) for value in expected.values()))
    for path, value in expected.items():
        # The same vector added to all keys changes no weight: its gradient is rounding.
        norm = max(np.linalg.norm(value), (0.1 if path.endswith("key/bias") else 1e-3) * whole)
        assert np.linalg.norm(jax_gradients[path] - value) <= 1e-5 * norm, path
