"""Llama in four forms, moved by the bridge from one to the next, computes the same logits in each.

Hugging Face's class, torchtitan's model, our flax model, a MaxText tree.
"""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from bridge.checkpoints.convert.conversion import convert
from bridge.core.mapping.language.rules import parse_mapping
from bridge.core.mapping.language.table import MappingTable
from tests.support.bridge.family_checkpoints import (
    config_json,
    dcp_tensors,
    flat,
    orbax_tree,
    same_bits,
    save_dcp,
    trained,
)
from tests.support.bridge.family_models import flax_model, flax_weights, hf_logits, tokens
from tests.support.bridge.llama_forms import TorchtitanLlama, maxtext_logits

TOLERANCE = 2e-5  # of the standard deviation of the logits


def family(model: torch.nn.Module, old: str = "", new: str = "") -> MappingTable:
    """The shipped family; with ``old`` and ``new`` swapped, so that every tensor is still matched once."""
    text = (files("bridge.core.mapping") / "families" / "llama.toml").read_text()
    assert old in text
    assert new in text
    if old:
        text = text.replace(old, "\0").replace(new, old).replace("\0", new)
    return parse_mapping(text, "llama").with_axes({"d": model.config.head_dim, "llama3_rope": 1})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """A trained Hugging Face Llama with grouped queries and scaled rotary frequencies, saved with DCP."""
    model, optimizer = trained("llama")
    path = tmp_path_factory.mktemp("llama") / "hf"
    save_dcp(path, model, optimizer)
    return model, path


def error(logits: Any, model: torch.nn.Module) -> float:
    expected = hf_logits(model, tokens())
    return float(np.abs(np.asarray(logits) - expected).max() / expected.std())


def test_hf_to_flax_to_torchtitan_and_back(original, tmp_path: Path) -> None:
    model, hf = original
    convert(hf, tmp_path / "flax", mapping=family(model), into="flax")
    weights = dict(flat(orbax_tree(tmp_path / "flax")["params"]))
    same_bits(weights, flax_weights(model))
    assert error(flax_model(config_json(model), weights)(tokens()), model) < TOLERANCE

    convert(tmp_path / "flax", tmp_path / "titan", mapping=family(model), into="torchtitan")
    titan = TorchtitanLlama(model.config)
    dcp.load(titan.state_dict(), checkpoint_id=tmp_path / "titan", no_dist=True)
    with torch.no_grad():
        assert error(titan(torch.from_numpy(tokens()).long()), model) < TOLERANCE

    # From one PyTorch model to another there is no way round by JAX.
    convert(tmp_path / "titan", tmp_path / "hf2", to="dcp", mapping=family(model), into="hf")
    same_bits(dcp_tensors(tmp_path / "hf2"), dcp_tensors(hf))


def test_hf_to_maxtext_and_back(original, tmp_path: Path) -> None:
    model, hf = original
    convert(hf, tmp_path / "maxtext", mapping=family(model), into="maxtext")
    params = orbax_tree(tmp_path / "maxtext")["params"]["params"]
    assert error(maxtext_logits(params, model.config, tokens()), model) < TOLERANCE
    convert(tmp_path / "maxtext", tmp_path / "hf2", mapping=family(model), into="hf")
    back, original_tensors = dcp_tensors(tmp_path / "hf2"), dcp_tensors(hf)
    assert back.keys() == original_tensors.keys()
    for name, array in original_tensors.items():
        # The square root of the head size, 10, is multiplied away and back.
        np.testing.assert_array_max_ulp(back[name], array, 2 if "q_proj" in name else 0)


def test_a_maxtext_tree_without_the_scale_is_exact(original, tmp_path: Path) -> None:
    model, hf = original
    mapping = family(model).with_axes({"query_scale": 1})
    convert(hf, tmp_path / "maxtext", mapping=mapping, into="maxtext")
    params = orbax_tree(tmp_path / "maxtext")["params"]["params"]
    assert error(maxtext_logits(params, model.config, tokens()), model) > 0.01
    query = params["decoder"]["layers"]["self_attention"]["query"]
    query["kernel"] = np.asarray(query["kernel"]) / np.sqrt(np.float32(model.config.head_dim))
    assert error(maxtext_logits(params, model.config, tokens()), model) < TOLERANCE
    convert(tmp_path / "maxtext", tmp_path / "hf2", mapping=mapping, into="hf")
    same_bits(dcp_tensors(tmp_path / "hf2"), dcp_tensors(hf))


def test_files_of_save_pretrained_to_flax(original, tmp_path: Path) -> None:
    model, _ = original
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "flax", mapping=family(model), into="flax")
    weights = dict(flat(orbax_tree(tmp_path / "flax")["params"]))
    assert error(flax_model(config_json(model), weights)(tokens()), model) < TOLERANCE
    convert(tmp_path / "flax", tmp_path / "back", to="safetensors", mapping=family(model), into="hf")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tmp_path / "hf" / name, tmp_path / "back" / name)
    again = type(model).from_pretrained(tmp_path / "back")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("qkv_linear.wq.weight : (g r interleaved(d)) m", "qkv_linear.wq.weight : (g r d) m"),
        ("qkv_linear.wk.weight : (g interleaved(kd)) m", "qkv_linear.wk.weight : (g kd) m"),
        ("qkv_linear.wk.weight", "qkv_linear.wv.weight"),
        ("feed_forward.w1.weight", "feed_forward.w3.weight"),
        ("attention_norm.weight", "ffn_norm.weight"),
    ],
)
def test_a_wrong_rule_shows_in_the_logits(original, tmp_path: Path, old: str, new: str) -> None:
    model, hf = original
    if "interleaved" in old:
        mapping = parse_mapping(
            (files("bridge.core.mapping") / "families" / "llama.toml").read_text().replace(old, new), "llama"
        ).with_axes({"d": model.config.head_dim, "llama3_rope": 1})
    else:
        mapping = family(model, old, new)
    convert(hf, tmp_path / "titan", to="dcp", mapping=mapping, into="torchtitan")
    titan = TorchtitanLlama(model.config)
    dcp.load(titan.state_dict(), checkpoint_id=tmp_path / "titan", no_dist=True)
    with torch.no_grad():
        assert error(titan(torch.from_numpy(tokens()).long()), model) > 0.1
