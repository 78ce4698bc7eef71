"""Llama in four forms, moved by the bridge from one to the next, computes the same logits in each.

Hugging Face's class, torchtitan's model, our flax model, a MaxText tree. The rotary layouts are index arithmetic: a
head is ``(r f)``, two halves of ``f`` frequencies, in transformers and flax, and ``(f r)``, pairs, in the other two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from bridge.convert import convert
from bridge.mapping.rules import MappingTable, parse_mapping
from tests.bridge.family_checkpoints import (
    config_json,
    dcp_tensors,
    flat,
    orbax_tree,
    same_bits,
    save_dcp,
    trained,
)
from tests.bridge.family_models import flax_model, flax_weights, hf_logits, tokens
from tests.bridge.llama_forms import TorchtitanLlama, maxtext_logits

TOLERANCE = 2e-5  # of the standard deviation of the logits

# Path and axes of every tensor in each form; {i} and the axes mean the same in all of them.
FORMS: dict[str, list[str]] = {
    "hf": [
        "model.embed_tokens.weight : v m",
        "model.layers.{i}.input_layernorm.weight : m",
        "model.layers.{i}.self_attn.q_proj.weight : (h r f) m",
        "model.layers.{i}.self_attn.k_proj.weight : (h r f) m",
        "model.layers.{i}.self_attn.v_proj.weight : (h r f) m",
        "model.layers.{i}.self_attn.o_proj.weight : m (h r f)",
        "model.layers.{i}.post_attention_layernorm.weight : m",
        "model.layers.{i}.mlp.gate_proj.weight : n m",
        "model.layers.{i}.mlp.up_proj.weight : n m",
        "model.layers.{i}.mlp.down_proj.weight : m n",
        "model.norm.weight : m",
        "lm_head.weight : v m",
    ],
    "torchtitan": [
        "tok_embeddings.weight : v m",
        "layers.{i}.attention_norm.weight : m",
        "layers.{i}.attention.wq.weight : (h f r) m",
        "layers.{i}.attention.wk.weight : (h f r) m",
        "layers.{i}.attention.wv.weight : (h r f) m",
        "layers.{i}.attention.wo.weight : m (h r f)",
        "layers.{i}.ffn_norm.weight : m",
        "layers.{i}.feed_forward.w1.weight : n m",
        "layers.{i}.feed_forward.w3.weight : n m",
        "layers.{i}.feed_forward.w2.weight : m n",
        "norm.weight : m",
        "output.weight : v m",
    ],
    "flax": [
        "embed/embedding : v m",
        "layers/{i}/attention_norm/scale : m",
        "layers/{i}/attention/query/kernel : m h (r f)",
        "layers/{i}/attention/key/kernel : m h (r f)",
        "layers/{i}/attention/value/kernel : m h (r f)",
        "layers/{i}/attention/out/kernel : h (r f) m",
        "layers/{i}/mlp_norm/scale : m",
        "layers/{i}/mlp/gate/kernel : m n",
        "layers/{i}/mlp/up/kernel : m n",
        "layers/{i}/mlp/down/kernel : n m",
        "norm/scale : m",
        "lm_head/kernel : m v",
    ],
    "maxtext": [
        "token_embedder/embedding : v m",
        "decoder/layers/pre_self_attention_layer_norm/scale : m {i}",
        "decoder/layers/self_attention/query/kernel : m {i} h (f r)",
        "decoder/layers/self_attention/key/kernel : m {i} h (f r)",
        "decoder/layers/self_attention/value/kernel : m {i} h (r f)",
        "decoder/layers/self_attention/out/kernel : h {i} (r f) m",
        "decoder/layers/post_self_attention_layer_norm/scale : m {i}",
        "decoder/layers/mlp/wi_0/kernel : m {i} n",
        "decoder/layers/mlp/wi_1/kernel : m {i} n",
        "decoder/layers/mlp/wo/kernel : n {i} m",
        "decoder/decoder_norm/scale : m",
        "decoder/logits_dense/kernel : m v",
    ],
}


def table(torch_form: str, jax_form: str, head_dim: int) -> MappingTable:
    """The mapping between two forms."""
    pairs = zip(FORMS[torch_form], FORMS[jax_form], strict=True)
    rules = [f'[[rule]]\ntorch = "{one}"\njax = "{other}"' for one, other in pairs]
    axes = f'name = "llama"\n[axes]\nr = 2\nf = {head_dim // 2}'
    return parse_mapping("\n".join([axes, *rules]), f"{torch_form} and {jax_form}")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """A trained Hugging Face Llama with grouped queries and scaled rotary frequencies, saved with DCP."""
    model, optimizer = trained("llama")
    path = tmp_path_factory.mktemp("llama") / "hf"
    save_dcp(path, model, optimizer)
    return model, path


def error(found: Any, model: torch.nn.Module) -> float:
    expected = hf_logits(model, tokens())
    return float(np.abs(np.asarray(found) - expected).max() / expected.std())


def test_hf_to_flax_to_torchtitan_and_back(original, tmp_path: Path) -> None:
    model, hf = original
    head_dim = model.config.head_dim
    convert(hf, tmp_path / "flax", mapping=table("hf", "flax", head_dim))
    weights = dict(flat(orbax_tree(tmp_path / "flax")["params"]))
    same_bits(weights, flax_weights(model))
    assert error(flax_model(config_json(model), weights)(tokens()), model) < TOLERANCE

    convert(tmp_path / "flax", tmp_path / "titan", mapping=table("torchtitan", "flax", head_dim))
    titan = TorchtitanLlama(model.config)
    state = {"model": titan.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    with torch.no_grad():
        assert error(titan(torch.from_numpy(tokens()).long()), model) < TOLERANCE

    convert(tmp_path / "titan", tmp_path / "flax2", mapping=table("torchtitan", "flax", head_dim))
    convert(tmp_path / "flax2", tmp_path / "hf2", mapping=table("hf", "flax", head_dim))
    same_bits(dcp_tensors(tmp_path / "hf2"), dcp_tensors(hf))


def test_hf_to_maxtext_and_back(original, tmp_path: Path) -> None:
    model, hf = original
    mapping = table("hf", "maxtext", model.config.head_dim)
    convert(hf, tmp_path / "maxtext", mapping=mapping)
    params = orbax_tree(tmp_path / "maxtext")["params"]
    query = params["decoder"]["layers"]["self_attention"]["query"]
    query["kernel"] = np.asarray(query["kernel"]) / np.sqrt(np.float32(model.config.head_dim))
    assert error(maxtext_logits(params, model.config, tokens()), model) < TOLERANCE
    convert(tmp_path / "maxtext", tmp_path / "hf2", mapping=mapping)
    same_bits(dcp_tensors(tmp_path / "hf2"), dcp_tensors(hf))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("attention.wq.weight : (h f r) m", "attention.wq.weight : (h r f) m"),
        ("attention.wk.weight : (h f r) m", "attention.wk.weight : (h r f) m"),
        ("feed_forward.w1.weight", "feed_forward.w3.weight"),
        ("attention_norm.weight", "ffn_norm.weight"),
    ],
)
def test_a_wrong_rule_shows_in_the_logits(original, tmp_path: Path, monkeypatch, old: str, new: str) -> None:
    model, hf = original
    # Swapped, so that every tensor is still matched once.
    swapped = {old: new, new: old}
    changed = [
        next((text.replace(one, other) for one, other in swapped.items() if one in text), text)
        for text in FORMS["torchtitan"]
    ]
    assert changed != FORMS["torchtitan"]
    monkeypatch.setitem(FORMS, "torchtitan", changed)
    head_dim = model.config.head_dim
    convert(hf, tmp_path / "flax", mapping=table("hf", "flax", head_dim))
    convert(tmp_path / "flax", tmp_path / "titan", mapping=table("torchtitan", "flax", head_dim))
    titan = TorchtitanLlama(model.config)
    dcp.load({"model": titan.state_dict()}, checkpoint_id=tmp_path / "titan", no_dist=True)
    with torch.no_grad():
        assert error(titan(torch.from_numpy(tokens()).long()), model) > 0.1
