"""Small models whose sizes 2 and 4 divide, their cuts over model axes, and their unsharded training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from jax_impl.models import Decoder
from tests.support.jax_impl.tiny import CONFIG, named
from tests.support.jax_impl.zoo import Chain

LR, B1, B2, EPS, DECAY = 1e-2, 0.8, 0.9, 1e-3, 0.1
EVEN = dataclasses.replace(
    CONFIG, d_model=12, n_heads=8, n_kv_heads=4, head_dim=2, d_ff=24, vocab_size=24, n_layers=2
)
DECODER = {
    **{f"layers/*/attention/{name}": "colwise" for name in ("query", "key", "value")},
    "layers/*/attention/out": "rowwise",
    **{f"layers/*/mlp/{name}": "colwise" for name in ("gate", "up")},
    "layers/*/mlp/down": "rowwise",
    # Of the vocabulary.
    "embed": "rowwise",
    "lm_head/kernel": PartitionSpec(None, "tp"),
}
EXPERTS = {"layers/*/w_in": "expert", "layers/*/w_out": "expert"}
EXPERTS_AND_TENSORS = {
    "layers/*/w_in": PartitionSpec("ep", None, "tp"),
    "layers/*/w_out": PartitionSpec("ep", "tp"),
    "layers/*/router": PartitionSpec(None, "ep"),
}


def decoder(stacked: bool = False) -> Decoder:
    """A float64 model with larger weights than at initialization, so that every parameter affects the loss."""
    model = Decoder(EVEN, rngs=nnx.Rngs(1), dtype=jnp.float64, stacked=stacked)
    graphdef, state = nnx.split(model)
    flat = [
        (path, value if path[-1] == "scale" else jax.tree.map(lambda x: 10 * x, value))
        for path, value in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


class Experts(nnx.Module):
    """Two of four experts for each row, ``x [rows, 8]``; weights of all experts are stacked."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def normal(*shape: int) -> nnx.Param[Any]:
            return nnx.Param(0.5 * jax.random.normal(rngs.params(), shape, jnp.float64))

        self.router, self.w_in, self.w_out = normal(8, 4), normal(4, 8, 12), normal(4, 12, 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores, chosen = jax.lax.top_k(jax.nn.softmax(x @ self.router[...]), 2)
        share = (jax.nn.one_hot(chosen, 4) * scores[..., None]).sum(-2)
        hidden = jnp.tanh(jnp.einsum("bd,edf->ebf", x, self.w_in[...]))
        return jnp.einsum("ebf,efd,be->bd", hidden, self.w_out[...], share)


def expert_net() -> Chain:
    rngs = nnx.Rngs(0)
    return Chain([Experts(rngs), Experts(rngs)], residual=True)


def expert_rows(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(8, 8))


def expert_loss(model: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - 1) ** 2)


def trained(
    model: nnx.Module, loss: Callable[..., jax.Array], batches: Sequence[np.ndarray]
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses and gradient norms of each step, and last weights, of AdamW on whole batches."""
    graphdef, state = nnx.split(model)
    optimizer = optax.adamw(LR, B1, B2, EPS, weight_decay=DECAY)
    opt_state = optimizer.init(state)
    gradients_of = jax.jit(jax.value_and_grad(lambda s, rows: loss(nnx.merge(graphdef, s), rows)))
    losses, norms = [], []
    for rows in batches:
        value, gradients = gradients_of(state, rows)
        losses.append(float(value))
        norms.append(float(np.sqrt(sum(np.vdot(x, x) for x in jax.tree.leaves(gradients)))))
        updates, opt_state = optimizer.update(gradients, opt_state, state)
        state = optax.apply_updates(state, updates)
    return losses, norms, {path: np.asarray(x) for path, x in named(state).items()}
