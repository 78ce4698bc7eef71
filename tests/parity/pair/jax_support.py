"""A small model for the tests of ``JaxSide``, and what they ask of its records."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.parity.recorded.recording import Recording

BATCH = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 4) -> None:
        self.up = nnx.Linear(4, width, rngs=rngs)
        self.down = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def paths(recording: Recording) -> list[tuple[str, int, str | None]]:
    calls = recording.calls
    return [(c.path, c.number, None if c.parent is None else calls[c.parent].path) for c in calls]


def close(left: Any, right: Any, tolerance: float = 1e-6) -> None:
    assert np.shape(left) == np.shape(right)
    np.testing.assert_allclose(
        np.asarray(left, np.float64), np.asarray(right, np.float64), tolerance, tolerance
    )
