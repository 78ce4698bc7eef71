"""Dense decoder families against the real classes of transformers: weights and optimizer state, there and back."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingError, Plan, load_mapping, make_plan
from bridge.core.mapping.one_rule.sizes import require_model, with_config_fields
from tests.support.bridge.dense_families import (
    MODELS,
    dense_config,
    dense_model,
    family_of,
    hand_made_tree,
    randomize,
)
from tests.support.bridge.family_checkpoints import (
    config_json,
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
from tests.support.bridge.memory_reader import MemoryReader

FUSED = {"phi3": {"d": 8, "q": 6}, "gpt_neox": {"d": 8}}
FUSED |= {"falcon-7b": {"d": 8, "r": 6}, "falcon-40b": {"d": 8, "r": 3}, "falcon-11b": {"d": 8, "r": 3}}
FUSED |= {"falcon-rw": {"d": 8, "r": 1}, "falcon-one-group-in-turn": {"d": 8, "r": 6}}
FUSED |= {"falcon-heads-beside-mlp": {"d": 8, "r": 1}}


def axes_of(name: str, model: Any) -> dict[str, int]:
    """What a checkpoint without config.json needs."""
    return (
        FUSED.get(name) or FUSED.get(family_of(name)) or {"d": getattr(model.config, "head_dim", None) or 8}
    )


def moments_by_hand(
    name: str, model: Any, optimizer: torch.optim.Optimizer, key: str
) -> dict[str, np.ndarray]:
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, original in zip(holder.parameters(), model.parameters(), strict=True):
            parameter.copy_(optimizer.state[original][key])
    return hand_made_tree(name, holder)


ADAM = {"exp_avg": "mu", "exp_avg_sq": "nu", "step": "count"}
SGD = {"momentum_buffer": "trace"}


def in_memory(
    name: str, model: Any, sections: Mapping[str, str]
) -> tuple[MemoryReader, dict[str, np.ndarray]]:
    """A DCP checkpoint of the model with random moments, and the tree that is expected of it."""
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    arrays = {f"model.{key}": value for key, value in state.items()}
    expected = {f"params/{key}": value for key, value in hand_made_tree(name, model).items()}
    for seed, (section, word) in enumerate(sections.items(), 1):
        if section == "step":
            arrays |= {f"optimizer.state.{key}.step": np.array(3, np.float32) for key in state}
            expected["opt_state/count"] = np.array(3, np.int32)
            continue
        holder = copy.deepcopy(model)
        randomize(holder, seed)
        own = {key: value.numpy() for key, value in holder.state_dict().items() if key in state}
        arrays |= {f"optimizer.state.{key}.{section}": value for key, value in own.items()}
        expected |= {f"opt_state/{word}/{key}": v for key, v in hand_made_tree(name, holder).items()}
    return MemoryReader("dcp", arrays), expected


def contents(plan: Plan, reader: MemoryReader) -> dict[str, np.ndarray]:
    return {name: tensor.read(reader, Box.whole(tensor.shape)) for name, tensor in plan.tensors.items()}


@pytest.mark.fast_cases(
    "granite-biases", "olmo2", "gemma3", "phi3", "gpt_neox", "falcon-7b", "falcon-40b", "falcon-rw"
)
@pytest.mark.parametrize("name", MODELS)
def test_weights_and_moments_become_the_tree_written_by_hand_and_come_back(name: str) -> None:
    model = dense_model(name, **short(name))
    # As with the config.json beside it, and without it by the sizes that the README names.
    beside = with_config_fields(load_mapping(family_of(name)), config_json(model), "config.json")
    with_sizes = load_mapping(family_of(name)).with_axes(axes_of(name, model))
    for sections, table in ((ADAM, beside), (SGD, with_sizes)):
        dcp, expected = in_memory(name, model, sections)
        same_bits(contents(make_plan(dcp, "orbax", table), dcp), expected)
        tree = MemoryReader("orbax", expected)
        same_bits(contents(make_plan(tree, "dcp", table, into="torch"), tree), dcp.arrays)


def short(name: str) -> dict[str, Any]:
    return {} if "layer_types" in MODELS[name][1] else {"num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_goes_through_jax_and_trains_on(tmp_path: Path, name: str) -> None:
    family, changes = family_of(name), short(name)
    model = dense_model(name, **changes)
    optimizer = optimizer_of(model)
    for step in range(2):
        train_step(model, optimizer, step)
    save_dcp(tmp_path / "dcp", model, optimizer)
    axes = axes_of(name, model)
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping=family, axes=axes)
    tree = orbax_tree(tmp_path / "orbax")
    expected = hand_made_tree(name, model)
    shown = dict(flat(tree["params"]))
    if model.config.tie_word_embeddings:
        # The class's state dict has the shared weight under both names.
        assert np.array_equal(shown.pop("lm_head/kernel"), expected["embed/embedding"].T)
    same_bits(shown, expected)
    same_bits(dict(flat(tree["opt_state"]["mu"])), moments_by_hand(name, model, optimizer, "exp_avg"))
    same_bits(dict(flat(tree["opt_state"]["nu"])), moments_by_hand(name, model, optimizer, "exp_avg_sq"))
    assert int(tree["opt_state"]["count"]) == 2
    convert(tmp_path / "orbax", tmp_path / "back", mapping=family, into="torch", axes=axes)
    same_bits(dcp_tensors(tmp_path / "back"), dcp_tensors(tmp_path / "dcp"))
    other = dense_model(name, seed=1, **changes)
    its = optimizer_of(other)
    train_step(other, its, 7)
    load_dcp(tmp_path / "back", other, its)
    assert np.array_equal(hf_logits(other, tokens()), hf_logits(model, tokens()))
    assert [train_step(other, its, seed) for seed in (2, 3)] == [
        train_step(model, optimizer, seed) for seed in (2, 3)
    ]


@pytest.mark.fast_cases("gpt_neox")
@pytest.mark.parametrize("name", MODELS)
def test_a_hub_folder_needs_neither_into_nor_axis_and_comes_back(tmp_path: Path, name: str) -> None:
    model = dense_model(name, **short(name))
    model.save_pretrained(tmp_path / "hub")
    family = family_of(name)
    convert(tmp_path / "hub", tmp_path / "orbax", mapping=family)
    same_bits(dict(flat(orbax_tree(tmp_path / "orbax")["params"])), hand_made_tree(name, model))
    convert(tmp_path / "orbax", tmp_path / "back", to="safetensors", mapping=family)
    same_bits(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(tmp_path / "hub" / "model.safetensors")
    )
    assert diff(tmp_path / "hub", tmp_path / "orbax", mapping=family).max_ulp == 0
    again = loaded(type(model), tmp_path / "hub", tmp_path / "back")
    assert np.array_equal(hf_logits(again, tokens()), hf_logits(model, tokens()))


def loaded(model_class: Any, hub: Path, folder: Path) -> torch.nn.Module:
    """What from_pretrained makes of a converted folder, which must have every weight."""
    shutil.copy(hub / "config.json", folder)
    model, info = model_class.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def test_gpt_neox_as_transformers_4_stored_it(tmp_path: Path) -> None:
    """With causal masks and frequencies among the weights."""
    model = dense_model("gpt_neox", num_hidden_layers=2)
    model.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    weights = load_file(file)
    assert "embed_out.weight" in weights
    for i in range(2):
        at = f"gpt_neox.layers.{i}.attention."
        weights |= {at + "bias": np.tril(np.ones((1, 1, 64, 64), bool)), at + "masked_bias": np.float32(-1e9)}
        weights |= {at + "rotary_emb.inv_freq": np.ones(1, np.float32)}
    save_file({name: np.asarray(array) for name, array in weights.items()}, file, {"format": "pt"})
    report = convert(tmp_path / "hub", tmp_path / "orbax", mapping="gpt_neox")
    assert len(report.dropped) == 6
    same_bits(dict(flat(orbax_tree(tmp_path / "orbax")["params"])), hand_made_tree("gpt_neox", model))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mistral", {"hidden_act": "gelu"}, r"hidden_act 'silu', found 'gelu'"),
        ("granite", {"hidden_act": "gelu"}, r"hidden_act 'silu', found 'gelu'"),
        ("phi3", {"model_type": "phimoe"}, r"model_type 'phi3', found 'phimoe'"),
        ("olmo2", {"model_type": "olmo"}, r"model_type 'olmo2' or 'olmo3', found 'olmo'"),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            r"use_bidirectional_attention false or null, found true",
        ),
        (
            "gpt_neox",
            {"model_type": "gpt_neox_japanese"},
            r"model_type 'gpt_neox', found 'gpt_neox_japanese'",
        ),
    ],
)
def test_a_model_that_is_another_one_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    table, config = load_mapping(name), json.loads(dense_config(name).to_json_string(use_diff=False))
    require_model(table, config, "config.json")
    with pytest.raises(
        MappingError, match=f"mapping {name} is not for this model: expected {message}.*--any-model"
    ):
        require_model(table, config | change, "config.json")
    require_model(table.for_any_model(), config | change, "config.json")


def test_a_vision_model_that_is_another_one_is_refused() -> None:
    """Fields of the table inside."""
    config = config_json(vision_model())
    table = load_mapping("gemma3_multimodal")
    require_model(table, config, "config.json")
    text = config["text_config"]
    for change, message in (
        ({"hidden_activation": "relu"}, r"text_config.hidden_activation 'gelu_pytorch_tanh', found 'relu'"),
        ({"use_bidirectional_attention": True}, "false or null, found true"),
    ):
        with pytest.raises(MappingError, match=message):
            require_model(table, config | {"text_config": text | change}, "config.json")
    with pytest.raises(MappingError, match=r"found 'gemma3'\. .*\(--mapping gemma3_multimodal\)"):
        require_model(load_mapping("gemma3"), config, "config.json")


def test_only_families_that_are_for_a_model_are_proposed_for_it(tmp_path: Path) -> None:
    """Megatron's is for Mistral too, but not for one with a window."""
    dense_model("mistral", num_hidden_layers=1).save_pretrained(tmp_path / "hub")
    with pytest.raises(MappingError, match=r"Choose a mapping for this model \(--mapping mistral\), or"):
        convert(tmp_path / "hub", tmp_path / "orbax", mapping="llama")


def vision_model(**changes: Any) -> torch.nn.Module:
    text = {**MODELS["gemma3"][1], **changes}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 20}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=copy.deepcopy(text), vision_config=vision, mm_tokens_per_image=4, **changes
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(model, 0, centre=0.0)
    return model


def vision_tree(model: Any) -> dict[str, np.ndarray]:
    """Some of the vision tower's tensors, and the projector's, by hand."""
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    tower, at = "model.vision_tower.", "encoder.layers.1.self_attn."
    heads = np.split(state[tower + "head.attention.in_proj_weight"], 3)
    tree = {
        "vision/patches/kernel": state[tower + "embeddings.patch_embedding.weight"].transpose(2, 3, 1, 0),
        "vision/layers/1/attention/key/kernel": state[f"{tower}{at}k_proj.weight"].T.reshape(24, 3, 8),
        "vision/layers/1/attention/value/bias": state[f"{tower}{at}v_proj.bias"].reshape(3, 8),
        "vision/layers/1/attention/out/kernel": state[f"{tower}{at}out_proj.weight"].T.reshape(3, 8, 24),
        "vision/layers/1/mlp/up/kernel": state[f"{tower}encoder.layers.1.mlp.fc1.weight"].T,
        "projector/kernel": state["model.multi_modal_projector.mm_input_projection_weight"],
        "projector/norm/scale": state["model.multi_modal_projector.mm_soft_emb_norm.weight"],
    }
    for part, kernel in zip(("query", "key", "value"), heads, strict=True):
        tree[f"vision/head/attention/{part}/kernel"] = kernel.T.reshape(24, 3, 8)
    return tree


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("tied", [True, False])
def test_gemma_3_with_its_vision_tower(tmp_path: Path, tied: bool) -> None:
    model = vision_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "orbax", mapping="gemma3_multimodal")
    tree = dict(flat(orbax_tree(tmp_path / "orbax")["params"]))
    assert len(tree) == len(model.state_dict()) - tied + 4  # the pooling head's fused projection is three
    parts = vision_tree(model)
    same_bits({name: tree[name] for name in parts}, parts)
    # The language model is Gemma 3's own tree.
    text = transformers.Gemma3ForCausalLM(model.config.text_config)
    text.model, text.lm_head = model.model.language_model, model.lm_head
    language = {name: array for name, array in tree.items() if not name.startswith(("vision", "projector"))}
    same_bits(language, hand_made_tree("gemma3", text))
    # The Hub's names; from_pretrained reads those, and its own, which the source had and which are noted.
    for into, below in (("hf", "vision_tower.vision_model."), (None, "vision_tower.")):
        back = tmp_path / f"back-{into}"
        convert(tmp_path / "orbax", back, to="safetensors", mapping="gemma3_multimodal", into=into)
        tensors = load_file(back / "model.safetensors")
        assert f"{below}embeddings.patch_embedding.weight" in tensors
        again = loaded(type(model), tmp_path / "hub", back)
        same_bits(
            {name: value.numpy() for name, value in again.state_dict().items()},
            {name: value.numpy() for name, value in model.state_dict().items()},
        )
    same_bits(tensors, load_file(tmp_path / "hub" / "model.safetensors"))
    # The names of the class, as a training run's checkpoint has them.
    convert(tmp_path / "orbax", tmp_path / "dcp", to="dcp", mapping="gemma3_multimodal")
    expected = {f"model.{name}": value.numpy() for name, value in model.state_dict().items()}
    if tied:
        del expected["model.lm_head.weight"]
    same_bits(dcp_tensors(tmp_path / "dcp"), expected)


@pytest.mark.slow
def test_the_language_model_of_gemma_3_alone(tmp_path: Path) -> None:
    model = vision_model()
    model.save_pretrained(tmp_path / "hub")
    selection = Selection(drop=("vision_tower.*", "multi_modal_projector.*"))
    convert(tmp_path / "hub", tmp_path / "orbax", mapping="gemma3_multimodal", selection=selection)
    text = transformers.Gemma3ForCausalLM(model.config.text_config)
    text.model, text.lm_head = model.model.language_model, model.lm_head
    same_bits(dict(flat(orbax_tree(tmp_path / "orbax")["params"])), hand_made_tree("gemma3", text))
    # And on as the text model of transformers, whose configuration is not the whole model's.
    with pytest.raises(MappingError, match="expected model_type 'gemma3_text', found 'gemma3'"):
        convert(tmp_path / "orbax", tmp_path / "text", to="safetensors", mapping="gemma3")
    text.config.save_pretrained(tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "text", to="safetensors", mapping="gemma3")
    text.config.save_pretrained(tmp_path / "config")
    again = loaded(transformers.Gemma3ForCausalLM, tmp_path / "config", tmp_path / "text")
    assert np.array_equal(hf_logits(again, tokens()), hf_logits(text.eval(), tokens()))
