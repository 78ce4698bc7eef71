"""GPT-OSS: transformers' class, whose experts' gates and ups alternate, through a JAX tree and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from bridge.checkpoints.convert.conversion import convert
from tests.support.bridge.family_checkpoints import (
    dcp_tensors,
    flat,
    load_dcp,
    optimizer_of,
    orbax_tree,
    same_bits,
    save_dcp,
    train_step,
)
from tests.support.bridge.family_models import hf_logits, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
SIZES |= {"num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 64, "num_local_experts": 5}
SIZES |= {"num_experts_per_tok": 2, "sliding_window": 7, "pad_token_id": 0, "eos_token_id": 1}


def gpt_oss(seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Float32; every parameter is random, biases and sinks included."""
    config = transformers.GptOssConfig(**(SIZES | changes))
    config._attn_implementation = "eager"
    model = transformers.GptOssForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


def jax_weights(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By hand: experts as the class takes gates and ups apart, `[..., ::2]` and `[..., 1::2]`."""
    weights = {
        "embed/embedding": state["model.embed_tokens.weight"],
        "norm/scale": state["model.norm.weight"],
    }
    weights["lm_head/kernel"] = state["lm_head.weight"].T
    for i in range(3):
        at, to = f"model.layers.{i}.", f"layers/{i}/"
        weights[to + "attention_norm/scale"] = state[at + "input_layernorm.weight"]
        weights[to + "mlp_norm/scale"] = state[at + "post_attention_layernorm.weight"]
        weights[to + "attention/sinks"] = state[at + "self_attn.sinks"]
        for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
            kernel, bias = (state[f"{at}self_attn.{part}_proj.{leaf}"] for leaf in ("weight", "bias"))
            weights[f"{to}attention/{name}/kernel"] = kernel.T.reshape(32, -1, 10)
            weights[f"{to}attention/{name}/bias"] = bias.reshape(-1, 10)
        weights[to + "attention/out/kernel"] = state[at + "self_attn.o_proj.weight"].T.reshape(6, 10, 32)
        weights[to + "attention/out/bias"] = state[at + "self_attn.o_proj.bias"]
        weights[to + "mlp/router/kernel"] = state[at + "mlp.router.weight"].T
        weights[to + "mlp/router/bias"] = state[at + "mlp.router.bias"]
        for theirs, ours in (("", "kernel"), ("_bias", "bias")):
            both = state[f"{at}mlp.experts.gate_up_proj{theirs}"]
            weights[f"{to}mlp/gate/{ours}"], weights[f"{to}mlp/up/{ours}"] = both[..., ::2], both[..., 1::2]
            weights[f"{to}mlp/down/{ours}"] = state[f"{at}mlp.experts.down_proj{theirs}"]
    return weights


def test_a_trained_model_and_its_moments_are_taken_apart_and_come_back(tmp_path: Path) -> None:
    model = gpt_oss()
    optimizer = optimizer_of(model)
    for step in range(2):
        train_step(model, optimizer, step)
    save_dcp(tmp_path / "dcp", model, optimizer)
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping="gpt_oss", axes={"d": 10})
    tree = orbax_tree(tmp_path / "orbax")
    adam = tree["opt_state"]
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    same_bits(dict(flat(tree["params"])), jax_weights(state))
    for key, section in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        moments = {name: optimizer.state[p][key].numpy() for name, p in model.named_parameters()}
        same_bits(dict(flat(adam[section])), jax_weights(moments))
    convert(tmp_path / "orbax", tmp_path / "back", to="dcp", mapping="gpt_oss")
    same_bits(dcp_tensors(tmp_path / "back"), dcp_tensors(tmp_path / "dcp"))
    other = gpt_oss(seed=1)
    its = optimizer_of(other)
    train_step(other, its, 0)
    load_dcp(tmp_path / "back", other, its)
    assert np.array_equal(hf_logits(other, tokens()), hf_logits(model, tokens()))
    assert [train_step(other, its, seed) for seed in (2, 3)] == [
        train_step(model, optimizer, seed) for seed in (2, 3)
    ]


@pytest.mark.slow
def test_files_of_save_pretrained_become_a_tree_and_what_from_pretrained_reads(tmp_path: Path) -> None:
    model = gpt_oss()
    model.save_pretrained(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "orbax", mapping="gpt_oss")
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    same_bits(dict(flat(orbax_tree(tmp_path / "orbax")["params"])), jax_weights(state))
    convert(tmp_path / "orbax", tmp_path / "back", to="safetensors", mapping="gpt_oss")
    same_bits(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(tmp_path / "hub" / "model.safetensors")
    )
    shutil.copy(tmp_path / "hub" / "config.json", tmp_path / "back")
    again = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert np.array_equal(hf_logits(again.eval(), tokens()), hf_logits(model, tokens()))
