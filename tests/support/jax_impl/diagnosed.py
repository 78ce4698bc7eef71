"""A small model of units over a pytree, as a list of layers and as a stack. Its rows can be made to overflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import call_unit

LAYERS, WIDTH = 3, 5


def parameters(stacked: bool = False) -> dict[str, Any]:
    """Sizes without a common divisor, and equal values in both forms."""
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    layers = [
        {"mlp": {"w": values(WIDTH, WIDTH), "b": values(WIDTH)}, "scale": values()} for _ in range(LAYERS)
    ]
    layers = jax.tree.map(lambda *x: np.stack(x), *layers) if stacked else layers
    return jax.tree.map(jnp.asarray, {"embed": values(WIDTH, WIDTH), "layers": layers})


def mlp(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w"] + params["b"])


def layer(params: Any, x: jax.Array) -> jax.Array:
    return x + params["scale"] * call_unit(mlp, params["mlp"], x)


def loss(params: Any, rows: jax.Array) -> jax.Array:
    x = rows @ params["embed"]
    if isinstance(params["layers"], list):
        for unit in params["layers"]:
            x = call_unit(layer, unit, x)
    else:
        x, _ = jax.lax.scan(lambda x, unit: (call_unit(layer, unit, x), None), x, params["layers"])
    return jnp.mean(x**2)


def rows(count: int) -> np.ndarray:
    """``[count, WIDTH]``, each row different."""
    return np.random.default_rng(1).standard_normal((count, WIDTH)).astype(np.float32)
