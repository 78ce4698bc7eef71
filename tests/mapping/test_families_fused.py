"""Families with fused projections and experts: real models of transformers, trained, split and put together again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from bridge.core.mapping import MappingError
from tests.support.bridge.family_checkpoints import (
    dcp_tensors,
    flat,
    head_dim,
    load_dcp,
    orbax_tree,
    same_bits,
    save_dcp,
    train_step,
    trained,
)
from tests.support.bridge.family_models import hf_logits, hf_model, tokens

Arrays = Mapping[str, np.ndarray]
Split = Callable[[Any, Arrays], dict[str, np.ndarray]]


def _heads(kernel: np.ndarray, heads: int) -> np.ndarray:
    """``[rows, in]`` of torch -> ``[in, heads, head]``."""
    return kernel.T.reshape(kernel.shape[1], heads, -1)


def _next(model: Any, state: Arrays) -> dict[str, np.ndarray]:
    """Layer 0 by the class's own way to take projections apart: a kernel's columns in place of tokens."""
    layer = model.model.layers[0].linear_attn
    fused = [state[f"model.layers.0.linear_attn.in_proj_{part}.weight"].T[None] for part in ("qkvz", "ba")]
    parts = layer.fix_query_key_value_ordering(*map(torch.from_numpy, fused))
    names = ("query", "key", "value", "gate", "beta", "decay")
    width, groups = model.config.hidden_size, layer.num_k_heads
    # Of values and all that goes by value heads: those of a key head side by side.
    shapes = [(width, groups, -1)] * 2 + [(width, groups, 3, 10)] * 2 + [(width, groups, 3)] * 2
    tensors = {
        f"layers/0/delta_net/{name}/kernel": part[0].numpy().reshape(shape)
        for name, part, shape in zip(names, parts, shapes, strict=True)
    }
    conv = state["model.layers.0.linear_attn.conv1d.weight"].transpose(2, 1, 0)
    cuts = np.split(conv, [layer.key_dim, 2 * layer.key_dim], axis=2)
    tensors |= {
        f"layers/0/delta_net/{name}_conv/kernel": part.reshape(4, 1, *shape[1:])
        for name, part, shape in zip(names, cuts, shapes, strict=False)
    }
    # Attention's queries and gates, as its forward takes them apart.
    config = model.config
    both = state["model.layers.1.self_attn.q_proj.weight"].T.reshape(
        config.hidden_size, -1, 2 * config.head_dim
    )
    query, gate = torch.chunk(torch.from_numpy(both), 2, dim=-1)
    tensors |= {
        "layers/1/attention/query/kernel": query.numpy(),
        "layers/1/attention/gate/kernel": gate.numpy(),
    }
    gate, up = np.split(state["model.layers.1.mlp.experts.gate_up_proj"], 2, axis=1)
    return tensors | {
        "layers/1/moe/gate/kernel": gate.swapaxes(1, 2),
        "layers/1/moe/up/kernel": up.swapaxes(1, 2),
        "layers/2/mlp/up/kernel": state["model.layers.2.mlp.up_proj.weight"].T,
    }


def _deepseek(model: Any, state: Arrays) -> dict[str, np.ndarray]:
    config, at, to = model.config, "model.layers.1.self_attn.", "layers/1/attention/"
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    up = _heads(state[at + "q_b_proj.weight"], heads)
    down = state[at + "kv_a_proj_with_mqa.weight"].T
    kv = _heads(state[at + "kv_b_proj.weight"], heads)
    experts = np.split(state["model.layers.1.mlp.experts.gate_up_proj"], 2, axis=1)
    return {
        to + "query_down/kernel": state[at + "q_a_proj.weight"].T,
        to + "query_up/kernel": up[..., :nope],
        to + "query_up_rope/kernel": up[..., nope:],
        to + "latent/kernel": down[:, :rank],
        to + "key_rope/kernel": down[:, rank:],
        to + "key_up/kernel": kv[..., :nope],
        to + "value_up/kernel": kv[..., nope:],
        "layers/1/moe/up/kernel": experts[1].swapaxes(1, 2),
        "layers/1/shared_experts/down/kernel": state["model.layers.1.mlp.shared_experts.down_proj.weight"].T,
        "layers/0/mlp/gate/kernel": state["model.layers.0.mlp.gate_proj.weight"].T,
    }


def _moe(model: Any, state: Arrays) -> dict[str, np.ndarray]:
    gate, up = np.split(state["model.layers.2.mlp.experts.gate_up_proj"], 2, axis=1)
    return {
        "layers/2/attention/key/kernel": _heads(state["model.layers.2.self_attn.k_proj.weight"], 2),
        "layers/2/mlp/gate/kernel": gate.swapaxes(1, 2),
        "layers/2/mlp/up/kernel": up.swapaxes(1, 2),
        "layers/2/mlp/down/kernel": state["model.layers.2.mlp.experts.down_proj"].swapaxes(1, 2),
        "layers/2/mlp/router/kernel": state["model.layers.2.mlp.gate.weight"].T,
    }


AXES = {
    "qwen3_moe": {"d": 10, "r": 3},
    "qwen3_next": {"d": 8, "g": 2, "q": 6, "r": 3, "v": 10},
    "deepseek_v3": {"nope": 7, "rope": 4, "v": 5},
}
CASES: dict[str, Split] = {"qwen3_moe": _moe, "qwen3_next": _next, "deepseek_v3": _deepseek}
TREES = {"params": ("model.", ""), "opt_state/0/mu": ("optimizer.state.", ".exp_avg")}
TREES |= {"opt_state/0/nu": ("optimizer.state.", ".exp_avg_sq"), "opt_state/mu": TREES["opt_state/0/mu"]}
TREES |= {"opt_state/nu": TREES["opt_state/0/nu"]}


@pytest.mark.fast_cases("qwen3_next", "deepseek_v3")
@pytest.mark.parametrize("family", CASES)
def test_a_trained_model_is_split_as_its_class_does_it_and_comes_back(tmp_path: Path, family: str) -> None:
    model, optimizer = trained(family, tie_word_embeddings=False)
    save_dcp(tmp_path / "dcp", model, optimizer)
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping=family, axes=AXES[family])
    expected = dcp_tensors(tmp_path / "dcp")
    tree = orbax_tree(tmp_path / "orbax")
    converted = dict(flat(tree))
    assert {"params", "mu", "nu"} <= {part for name in converted for part in name.split("/")}
    for section, (before, after) in TREES.items():
        here = {n.removeprefix(f"{section}/"): a for n, a in converted.items() if n.startswith(f"{section}/")}
        if here:
            state = {
                name.removeprefix(before).removesuffix(after): array
                for name, array in expected.items()
                if name.startswith(before) and name.endswith(after)
            }
            parts = CASES[family](model, state)
            same_bits({name: here[name] for name in parts}, parts)
    convert(tmp_path / "orbax", tmp_path / "back", to="dcp", mapping=family, into="torch", axes=AXES[family])
    same_bits(dcp_tensors(tmp_path / "back"), expected)
    # A run goes on as if nothing had happened.
    other, its = trained(family, seed=1, steps=1, tie_word_embeddings=False)
    load_dcp(tmp_path / "back", other, its)
    assert np.array_equal(hf_logits(other, tokens()), hf_logits(model, tokens()))
    assert [train_step(other, its, seed) for seed in (2, 3)] == [
        train_step(model, optimizer, seed) for seed in (2, 3)
    ]


@pytest.mark.parametrize("family", CASES)
def test_files_of_save_pretrained_become_a_tree_and_what_from_pretrained_reads(
    tmp_path: Path, family: str
) -> None:
    model = hf_model(family, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "hub")
    # All sizes come from config.json; in the tree they are axes.
    convert(tmp_path / "hub", tmp_path / "orbax", mapping=family)
    weights = dict(flat(orbax_tree(tmp_path / "orbax")["params"]))
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    parts = CASES[family](model, state)
    same_bits({name: weights[name] for name in parts}, parts)
    convert(tmp_path / "orbax", tmp_path / "back", to="safetensors", mapping=family, into="hf")
    same_bits(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(tmp_path / "hub" / "model.safetensors")
    )
    shutil.copy(tmp_path / "hub" / "config.json", tmp_path / "back")
    again, info = type(model).from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert np.array_equal(hf_logits(again.eval(), tokens()), hf_logits(model, tokens()))


@pytest.mark.slow
def test_dense_layers_between_layers_of_experts(tmp_path: Path) -> None:
    model, optimizer = trained("qwen3_moe", tie_word_embeddings=False, mlp_only_layers=[1])
    save_dcp(tmp_path / "dcp", model, optimizer)
    axes = AXES["qwen3_moe"]
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping="qwen3_moe", into="jax", axes=axes)
    weights = dict(flat(orbax_tree(tmp_path / "orbax")["params"]))
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    dense = state["model.layers.1.mlp.up_proj.weight"].T
    same_bits({"up": weights["layers/1/dense_mlp/up/kernel"]}, {"up": dense})
    convert(tmp_path / "orbax", tmp_path / "back", to="dcp", mapping="qwen3_moe", into="torch", axes=axes)
    same_bits(dcp_tensors(tmp_path / "back"), dcp_tensors(tmp_path / "dcp"))


LOST = {
    "qwen3_moe": "model.layers.2.mlp.experts.4.down_proj.weight",
    "qwen3_next": "model.layers.2.linear_attn.A_log",
    "deepseek_v3": "model.layers.2.mlp.gate.weight",
}


@pytest.mark.parametrize("family", LOST)
def test_a_tensor_that_a_layer_of_its_kind_lacks_is_named(tmp_path: Path, family: str) -> None:
    """The last layer's, of layers that are not alike: no rule requires it of every layer."""
    hf_model(family, tie_word_embeddings=False).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    save_file({name: a for name, a in load_file(file).items() if name != LOST[family]}, file)
    with pytest.raises(MappingError, match=r"expected a tensor (for each .*experts|wherever other rules)"):
        convert(tmp_path / "hub", tmp_path / "orbax", mapping=family)


def _megatron(model: Any, state: Arrays, i: int) -> dict[str, np.ndarray]:
    """Layer ``i`` under Megatron-Core's names: each group's queries, its key, its value."""
    config, at, to = model.config, f"model.layers.{i}.", f"decoder.layers.{i}."
    groups, size = config.num_key_value_heads, head_dim(model)
    tensors = {}
    for leaf in ("weight", "bias"):
        if f"{at}self_attn.q_proj.{leaf}" in state:
            parts = [state[f"{at}self_attn.{p}_proj.{leaf}"] for p in "qkv"]
            rows = [part.reshape(groups, -1, size, *part.shape[1:]) for part in parts]
            whole = np.concatenate(rows, axis=1)
            tensors[f"{to}self_attention.linear_qkv.{leaf}"] = whole.reshape(-1, *parts[0].shape[1:])
    plain = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
        "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
        "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    }
    tensors |= {to + theirs: state[at + ours] for ours, theirs in plain.items() if at + ours in state}
    norm = state[at + "post_attention_layernorm.weight"]
    if at + "mlp.gate.weight" not in state:
        fused = np.concatenate([state[f"{at}mlp.{p}_proj.weight"] for p in ("gate", "up")])
        down = state[at + "mlp.down_proj.weight"]
        dense = {"layer_norm_weight": norm, "weight": fused}
        return (
            tensors
            | {f"{to}mlp.linear_fc1.{k}": a for k, a in dense.items()}
            | {f"{to}mlp.linear_fc2.weight": down}
        )
    tensors |= {
        to + "pre_mlp_layernorm.weight": norm,
        to + "mlp.router.weight": state[at + "mlp.gate.weight"],
    }
    for name, stack in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
        for expert, array in enumerate(state[f"{at}mlp.experts.{stack}"]):
            tensors[f"{to}mlp.experts.linear_{name}.weight{expert}"] = array
    return tensors


@pytest.mark.fast_cases("qwen3_moe")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_megatrons_fused_tensors_are_as_written_by_hand_and_come_back(tmp_path: Path, family: str) -> None:
    model, optimizer = trained(family, tie_word_embeddings=False)
    save_dcp(tmp_path / "dcp", model, optimizer)
    mapping, from_ = ("qwen3_moe", "torch") if family == "qwen3_moe" else ("megatron", "hf")
    axes = {"d": head_dim(model), "r": 3}
    convert(tmp_path / "dcp", tmp_path / "mcore", to="dcp", mapping=mapping, into="megatron", axes=axes)
    source, megatron = dcp_tensors(tmp_path / "dcp"), dcp_tensors(tmp_path / "mcore")
    for before, after in (
        ("model.", ""),
        ("optimizer.state.", ".exp_avg"),
        ("optimizer.state.", ".exp_avg_sq"),
    ):

        def part(tensors: Arrays, before: str = before, after: str = after) -> dict[str, np.ndarray]:
            return {
                name.removeprefix(before).removesuffix(after): array
                for name, array in tensors.items()
                if name.startswith(before) and name.endswith(after)
            }

        state = part(source)
        expected = {
            "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
            "decoder.final_layernorm.weight": state["model.norm.weight"],
            "output_layer.weight": state["lm_head.weight"],
        }
        for i in range(3):
            expected |= _megatron(model, state, i)
        same_bits(part(megatron), expected)
    convert(tmp_path / "mcore", tmp_path / "back", to="dcp", mapping=mapping, into=from_, axes=axes)
    same_bits(dcp_tensors(tmp_path / "back"), source)
    # And on to JAX, whose kernels are those of the family itself.
    convert(tmp_path / "mcore", tmp_path / "orbax", mapping=mapping, into="jax", axes=axes)
    own = {"llama": {"into": "flax"}, "qwen3_moe": {"from_": "torch"}}.get(family, {})
    axes = axes if family == "qwen3_moe" else {"d": axes["d"]}
    convert(tmp_path / "dcp", tmp_path / "direct", mapping=family, axes=axes, **own)
    with open_checkpoint(tmp_path / "orbax") as chained, open_checkpoint(tmp_path / "direct") as other:
        names = [name for name in other.tensors if name.startswith("params/")]
        same_bits({n: chained.read(n) for n in names}, {n: other.read(n) for n in names})
