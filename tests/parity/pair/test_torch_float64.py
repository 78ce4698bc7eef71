"""Float64 runs of PyTorch models: nothing is computed in less, whatever the model's code asks for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from bridge.parity.pair.torch_float64 import all_float64
from bridge.parity.pair.torch_side import TorchSide

NARROW = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = np.random.default_rng(0).integers(0, 19, (2, 6))


class Spy(TorchDispatchMode):
    """Notes each operator, also of a backward, that returns a narrow tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.dtype in NARROW:
                self.found.add(str(func))
        return result


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def by_hand(weights: dict[str, np.ndarray], tokens: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """The logits of the model above, in NumPy."""
    weights = {name: one.astype(np.float64) for name, one in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return weights[f"{name}.weight"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T

    batch, length = tokens.shape
    angles = np.arange(length)[:, None] * np.concatenate([frequencies, frequencies])

    def rotated(x: np.ndarray) -> np.ndarray:
        return x * np.cos(angles) + np.concatenate([-x[..., 2:], x[..., :2]], -1) * np.sin(angles)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in ("model.layers.0", "model.layers.1"):
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            linear(h, f"{layer}.self_attn.{one}_proj").reshape(batch, length, -1, 4).swapaxes(1, 2)
            for one in "qkv"
        )
        q, k, v = rotated(q), rotated(k.repeat(2, 1)), v.repeat(2, 1)
        scores = q @ k.swapaxes(2, 3) / 2
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + linear(attended.swapaxes(1, 2).reshape(batch, length, 16), f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(h, f"{layer}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_a_llama_is_computed_in_float64_throughout(attention: str, given: str) -> None:
    model = llama(attention).to(getattr(torch, given))
    side = TorchSide(model, "next_token")
    with Spy() as spy:
        with all_float64():
            pass  # the spy sees what the run itself does, not the copying before
        record = side.record(TOKENS, "float64")
    frequencies = model.model.rotary_emb.inv_freq.double().numpy()
    logits = by_hand(side.weights(), TOKENS[:, :-1], frequencies)
    np.testing.assert_allclose(record.calls[0].outputs["logits"], logits, rtol=1e-11, atol=1e-12)
    likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -np.take_along_axis(likely, TOKENS[:, 1:, None], -1).mean()
    assert record.loss == pytest.approx(loss, rel=1e-13)
    for call in record.calls:
        for place, array in {**call.outputs, **call.gradients}.items():
            # Embeddings are the given weights; the rest has more bits than float32 has.
            if array.dtype.kind == "f" and call.kind != "Embedding":
                assert (array != array.astype(np.float32)).mean() > 0.2, (call.path, place)
    assert spy.calls > 100
