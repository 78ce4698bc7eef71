"""Causes inside of an attention are found for any size of a head: modules say it, else divisors of the width do."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from bridge.parity import parity
from bridge.parity.recorded.recording import heads_of


class Attention(nn.Module):
    """``order``: in which query, key and value are called for."""

    def __init__(self, width: int, heads: int, says: str, names: str = "qkvo", order: str = "012") -> None:
        super().__init__()
        self.parts, self.names, self.order = [heads], names, order
        if says == "number":
            self.n_heads = heads
        elif says == "size":
            self.head_dim = width // heads
        for name in names:
            setattr(self, name, nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {index: getattr(self, self.names[int(index)])(x) for index in self.order}
        q, k, v = (made[index].unflatten(-1, (self.parts[0], -1)).transpose(1, 2) for index in "012")
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return getattr(self, self.names[3])(mixed.transpose(1, 2).flatten(2))


class JaxAttention(nnx.Module):
    """A planted fault: each token sees the next one."""

    def __init__(self, width: int, heads: int) -> None:
        rngs = nnx.Rngs(0)
        self.parts = heads
        self.q, self.k, self.v, self.o = (nnx.Linear(width, width, rngs=rngs) for _ in range(4))

    def __call__(self, x: Any) -> Any:
        q, k, v = (f(x).reshape(*x.shape[:2], self.parts, -1) for f in (self.q, self.k, self.v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool), 1), scores, -1e30)
        return self.o(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(x.shape))


@pytest.mark.parametrize(
    ("size", "says", "names", "order"),
    [
        (6, "number", "qkvo", "012"),
        (72, "size", "qkvo", "012"),
        (5, "nothing", "qkvo", "012"),
        # Names that say nothing, or the wrong thing, and another order of calls.
        (6, "number", "abco", "210"),
        (6, "number", "abco", "120"),
        (6, "number", "vqko", "012"),
    ],
)
def test_a_wrong_mask_is_named_whatever_the_size_and_the_names(
    size: int, says: str, names: str, order: str
) -> None:
    torch.manual_seed(0)
    rules = [
        {"torch": f"{name}.{parameter}", "jax": f"{twin_name}/{twin}"}
        for name, twin_name in zip(names, "qkvo", strict=True)
        for parameter, twin in (("weight : o i_", "kernel : i_ o"), ("bias", "bias"))
    ]
    x = np.random.default_rng(0).normal(size=(3, 7, 2 * size)).astype(np.float32)
    ours, theirs = Attention(2 * size, 2, says, names, order), JaxAttention(2 * size, 2)
    report = parity(ours, theirs, x, mapping={"rule": rules}, weights="torch", steps=0, scale=4)
    assert not report
    assert "JAX: causal mask that lets the next token through" in report.summary()


def test_modules_and_their_configs_say_their_heads() -> None:
    class Config:
        num_attention_heads = 3

        def __init__(self) -> None:
            self.n_head = 12

    module = nn.Module()
    module.num_heads, module.head_dim, module.config = 4, 8, Config()
    assert heads_of(module) == ((4, 12), (8,))
    assert heads_of(object()) == ((), ())
