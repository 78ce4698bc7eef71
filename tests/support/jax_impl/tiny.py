"""A decoder that compiles in a second. Its sizes have no common divisor."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_impl.models import Decoder, DecoderConfig, next_token_loss

CONFIG = DecoderConfig(
    vocab_size=23, d_model=13, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=19, rope_theta=100
)


def decoder(config: DecoderConfig = CONFIG, dtype: Any = jnp.float32) -> Decoder:
    """Weights larger than at initialization, so that every parameter affects the loss."""
    model = Decoder(config, rngs=nnx.Rngs(1), dtype=dtype)
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x if x.ndim == 1 else 10 * x, state))


def tokens(rows: int, length: int = 7, seed: int = 0) -> np.ndarray:
    """Int32 ``[rows, length]``, each row different."""
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, length)).astype(np.int32)


def loss(model: Decoder, rows: jax.Array) -> jax.Array:
    """Mean loss of predicting each token of ``rows [B, T]`` from those before it."""
    return next_token_loss(model(rows[:, :-1]), rows[:, 1:])


def named(state: Any) -> dict[str, jax.Array]:
    """A model's state as ``{path: value}``."""
    return {"/".join(map(str, key)): variable.get_raw_value() for key, variable in nnx.to_flat_state(state)}
