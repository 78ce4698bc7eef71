"""Formulas of activations, held to traces of the code that they count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from bridge.planning.models.activations import SegmentBytes
from bridge.planning.models.decoder_activations import decoder_activations, trace_in_torch
from bridge.planning.models.formulas import Attention, LossSegment
from bridge.planning.models.models import nnx_shapes
from bridge.planning.models.runtimes import abstract_module
from bridge.planning.models.shipped_models import (
    SHIPPED,
    DecoderShape,
    DenseMlp,
    Experts,
    GroupedQueries,
    shape_model,
)
from jax_impl import models
from torch_impl import models as torch_models

SHAPES = {
    "dense": DecoderShape(101, 48, 2, GroupedQueries(6, 2, 10), DenseMlp(96)),
    "experts": DecoderShape(509, 64, 2, GroupedQueries(6, 2, 10), Experts(4, 2, 96)),
    "tied": DecoderShape(101, 48, 2, GroupedQueries(6, 2, 10), DenseMlp(96), tied=True),
}


@pytest.mark.fast_cases("experts")
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_in_jax_are_those_of_causal_lm_and_its_residuals(name: str) -> None:
    shape = SHAPES[name]
    keywords = shape.causal_lm()
    assert keywords is not None
    config = models.CausalLMConfig(**keywords, rotary=models.Rotary(theta=shape.rope_theta))
    parameters, modules = nnx_shapes(
        name, abstract_module(lambda rngs: models.CausalLM(config, rngs=rngs)), ()
    )
    model = shape_model(name, shape, "jax")
    assert model.parameters == parameters
    assert set(model.modules) == set(modules)
    for mine, its in zip(model.activations, decoder_activations("jax", config), strict=True):
        assert mine.path == its.path
        for compute in ("float32", "bfloat16"):
            a, b = (vars(segment.bytes_for(2, 512, compute)) for segment in (mine, its))
            for key in a:
                # Without the scales of norms, rotary tables, and the constants of the loss.
                assert a[key] == pytest.approx(b[key], rel=0.01, abs=2**14), (mine.path, key)


@pytest.mark.parametrize("runtime", ["torch", "jax"])
def test_a_part_of_a_layer_saves_less_than_the_layer(runtime: str) -> None:
    config = {"torch": torch_models.DecoderConfig, "jax": models.DecoderConfig}[runtime]
    sizes = config(vocab_size=101, d_model=48, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=10, d_ff=96)
    layer = next(part for part in decoder_activations(runtime, sizes) if part.path == "layers.0")
    saved = {part.path: part.bytes_for(2, 64, "float32").saved for part in layer.parts}
    assert set(saved) == {"layers.0.attention", "layers.0.mlp"}
    whole = layer.bytes_for(2, 64, "float32").saved
    # Norms and residual sums belong to the layer alone.
    assert sum(saved.values()) < whole < 2 * sum(saved.values())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [64, 1024])
def test_shapes_in_torch_are_those_of_hugging_faces_layer(length: int, compute: str) -> None:
    """With plain attention: on the meta device no fused kernel runs."""
    dtype = getattr(torch, compute)
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=1408
    )
    config._attn_implementation = "eager"

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LlamaDecoderLayer(config, 0)

        def forward(self, x: torch.Tensor) -> Any:
            tables = [torch.empty(1, length, 64, dtype=dtype) for _ in range(2)]
            mask = torch.empty(1, 1, length, length, dtype=dtype)
            return self.layer(x, attention_mask=mask, position_embeddings=tables)

    its = trace_in_torch(lambda: Layer().to(dtype), lambda: torch.empty(1, length, 512, dtype=dtype))
    shape = DecoderShape(101, 512, 1, GroupedQueries(8, 2, 64), DenseMlp(1408))
    segments = {segment.path: segment for segment in shape.torch_activations(Attention.plain)}
    mine = segments["layers.0"].bytes_for(1, length, compute)
    assert mine.saved == pytest.approx(its.saved, rel=0.02)
    assert mine.input == its.input
    assert mine.forward > 0.98 * its.forward
    assert mine.backward == pytest.approx(its.backward, rel=0.15)


def test_fused_attention_keeps_no_scores() -> None:
    shape = SHAPES["dense"]
    for runtime in ("torch", "jax"):
        by_attention: dict[Attention, list[SegmentBytes]] = {
            attention: [
                segment.bytes_for(1, length, "bfloat16")
                for length in (512, 1024)
                for segment in shape_model("x", shape, runtime, attention).activations
                if segment.path == "layers.0"
            ]
            for attention in Attention
        }
        short, long = by_attention[Attention.fused]
        assert long.saved == pytest.approx(2 * short.saved, rel=1e-3)
        short, long = by_attention[Attention.plain]
        # A float32 and a bfloat16 number for each of 6 heads and pair of tokens.
        assert long.saved - 2 * short.saved == pytest.approx(6 * 6 * (1024**2 - 2 * 512**2), rel=1e-3)


@pytest.mark.parametrize(
    ("compute", "saved", "input_bytes", "forward", "backward", "again", "early"),
    [
        ("bfloat16", 4256, 256, 9312, 2912, 10912, 10656),
        ("float32", 4768, 512, 8480, 5280, 11680, 11168),
    ],
)
def test_bytes_of_the_loss_are_those_of_its_formula(
    compute: str, saved: int, input_bytes: int, forward: int, backward: int, again: int, early: int
) -> None:
    # By hand from the docstring, for 8 tokens, 16 hidden features and 100 words.
    expected = SegmentBytes(saved, input_bytes, forward, backward, again, forward, early=early)
    assert LossSegment("head", 16, 100).bytes_for(1, 8, compute) == expected


def test_a_shape_with_latent_attention_or_shared_experts_is_no_causal_lm() -> None:
    mixtral, deepseek = SHIPPED["mixtral-8x7b"](), SHIPPED["deepseek-v3"]()
    assert isinstance(mixtral.mlp, Experts)
    assert mixtral.causal_lm() is not None
    assert replace(mixtral, mlp=replace(mixtral.mlp, shared=1)).causal_lm() is None
    assert replace(mixtral, attention=deepseek.attention).causal_lm() is None
    assert deepseek.causal_lm() is None
