"""Faults inside of a Llama's attentions are named with their cause, one in each layer; an unknown one has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers.models.llama import modeling_llama

from bridge.parity.compare.parity import parity
from jax_impl.models.causal_lm_config import Rotary
from jax_impl.models.causal_lm_layers import rotary_tables, rotate
from tests.support.parity.bug_tools import Planted, call, config, edit, edited, put
from tests.support.parity.causal_pairs import HEAD
from tests.support.parity.llama_bugs import masked
from tests.support.parity.pairs import build

LAYERS = tuple(f"model.layers.{layer}.self_attn" for layer in range(3))


def _of_base(theta: float) -> Callable[[jax.Array, Any], jax.Array]:
    def turned(x: jax.Array, tables: Any) -> jax.Array:
        return rotate(x, rotary_tables(x.shape[1], Rotary(theta=theta), HEAD))

    return turned


def _neighbours(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = tables
    first, second = x[..., ::2], x[..., 1::2]
    return jnp.stack((first * cos - second * sin, second * cos + first * sin), -1).reshape(x.shape)


def _window(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def wrong(mask: torch.Tensor) -> torch.Tensor:
        far = torch.ones(mask.shape[-2:], dtype=torch.bool).tril(-size)
        return mask.masked_fill(far, torch.finfo(mask.dtype).min)

    return wrong


def _sees_one_more(mask: torch.Tensor) -> torch.Tensor:
    return mask.masked_fill(torch.ones(mask.shape[-2:], dtype=torch.bool).tril(1), 0)


_TILED = edited(modeling_llama.eager_attention_forward, repeat_kv=lambda x, times: x.repeat(1, times, 1, 1))
FAULTS: dict[str, tuple[tuple[Planted, ...], tuple[str, str, str]]] = {
    "rotary and heads": (
        (
            edit("jax", "layers/0/attention", rotate=_of_base(600.0)),
            edit("jax", "layers/1/attention", rotate=_neighbours),
            edit("torch", LAYERS[2], eager_attention_forward=_TILED),
        ),
        (
            "torch: rotary base 300; JAX: rotary base 600",
            "torch: rotary embedding of halves; JAX: rotary embedding of neighbours (interleaved)",
            "torch: key heads tiled (query heads share one in turn); "
            "JAX: key heads repeated (neighbouring query heads share one)",
        ),
    ),
    "scales and masks": (
        (
            config("layers/0/attention", attention_scale=1.0),
            put("torch", LAYERS[1], scaling=1 / HEAD),
            call("torch", LAYERS[2], masked(_sees_one_more)),
        ),
        (
            "torch: scores times 1 / sqrt(10); JAX: scores not scaled",
            "torch: scores times 1 / 10; JAX: scores times 1 / sqrt(10)",
            "torch: causal mask that lets the next token through; JAX: causal mask",
        ),
    ),
    "windows, and what is unknown": (
        (
            call("torch", LAYERS[0], masked(_window(5))),
            put("jax", "layers/0/attention", window=6),
            put("jax", "layers/1/attention", window=11),
            edit(
                "jax",
                "layers/2/attention",
                ("jnp.where(seen, scores", "jnp.where(seen, scores + distance**2"),
            ),
        ),
        (
            "torch: window of 5 tokens; JAX: window of 6 tokens",
            "torch: no window; JAX: window of 11 tokens",
            "",
        ),
    ),
    "rotary base of the model": (
        (config("", rotary=Rotary(theta=600.0)),),
        ("torch: rotary base 300; JAX: rotary base 600",) * 3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_causes_inside_of_attentions(what: str) -> None:
    faults, causes = FAULTS[what]
    pair = build("llama", 0)
    for fault in faults:
        fault(pair)
    report = parity(
        pair.torch_model,
        pair.jax_model,
        pair.batch,
        mapping=pair.mapping,
        axes=pair.axes,
        loss=pair.loss,
        steps=0,
    )
    rows = {row.name: row for row in report.stage("forward")}
    assert tuple(rows[name].cause for name in LAYERS) == causes
    assert all(rows[name].local > 4 for name in LAYERS)
