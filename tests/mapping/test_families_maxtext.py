"""Names of MaxText: against MaxText's own trees and its own conversion, and there and back with optimizer state."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from bridge.core.mapping import load_mapping
from tests.mapping.test_families_gpt_oss import gpt_oss
from tests.support.bridge.dense_families import MODELS, dense_model, randomize
from tests.support.bridge.family_checkpoints import (
    config_json,
    dcp_tensors,
    flat,
    optimizer_of,
    orbax_tree,
    same_bits,
    save_dcp,
    train_step,
)
from tests.support.bridge.family_models import hf_model
from tests.support.bridge.maxtext_trees import BEFORE, ENVIRONMENT

# Scales of queries (1 / 2) and of embeddings are powers of two.
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "head_dim": 4}
MAXTEXT: dict[str, Any] = {
    "base_emb_dim": 64,
    "base_num_decoder_layers": 4,
    "head_dim": 4,
    "base_num_query_heads": 6,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 40,
    "vocab_size": 61,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "sparse_matmul": False}

CYCLE = {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "mlp_only_layers": []}
GEMMA = {"num_attention_heads": 4, "query_pre_attn_scalar": 4}
FOUR_HEADS = {"base_num_query_heads": 4}
LAYERS = GEMMA | {
    "hidden_size": 64,
    "num_hidden_layers": 14,
    "head_dim": 4,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2 + ["sliding_attention"] * 2,
}

DELTA_NET = {
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 6,
    "gdn_key_head_dim": 6,
    "gdn_value_head_dim": 10,
    "gdn_conv_kernel_dim": 4,
    "gdn_chunk_size": 8,
}

VISION = {
    "use_multimodal": True,
    "hidden_size_for_vit": 24,
    "intermediate_size_for_vit": 20,
    "num_attention_heads_for_vit": 3,
    "num_hidden_layers_for_vit": 2,
}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2.5-7b", SIZES, MAXTEXT),
    "qwen3": ("qwen3-8b", SIZES, MAXTEXT),
    "qwen3_moe": ("qwen3-30b-a3b", SIZES, MAXTEXT | EXPERTS | {"base_mlp_dim": 16, "base_moe_mlp_dim": 16}),
    "mixtral": ("mixtral-8x7b", SIZES, MAXTEXT | EXPERTS | {"base_moe_mlp_dim": 40}),
    "qwen3_next": (
        "qwen3-next-80b-a3b",
        SIZES | CYCLE | {"num_hidden_layers": 8, "head_dim": 8, "shared_expert_intermediate_size": 16},
        MAXTEXT
        | EXPERTS
        | DELTA_NET
        | {"base_num_decoder_layers": 8, "head_dim": 8, "base_mlp_dim": 16, "base_moe_mlp_dim": 16},
    ),
    "gpt_oss": (
        "gpt-oss-20b",
        {"num_hidden_layers": 4},
        MAXTEXT
        | EXPERTS
        | {"base_emb_dim": 32, "head_dim": 10}
        | {"base_mlp_dim": 64, "base_moe_mlp_dim": 64},
    ),
    # Two layers of Gemma 2 are one of MaxText.
    "gemma2": ("gemma2-2b", SIZES | GEMMA, MAXTEXT | FOUR_HEADS | {"base_num_decoder_layers": 2}),
    # Two blocks of six layers, and two more.
    "gemma3": ("gemma3-4b", LAYERS, MAXTEXT | FOUR_HEADS | {"base_num_decoder_layers": 14}),
    "deepseek_v3": (
        "deepseek3-671b",
        {"hidden_size": 64, "num_hidden_layers": 5, "first_k_dense_replace": 2},
        MAXTEXT
        | EXPERTS
        | {"base_num_decoder_layers": 5, "first_num_dense_layers": 2, "num_experts": 8, "q_lora_rank": 9}
        | {"kv_lora_rank": 12, "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 5}
        | {"base_num_kv_heads": 6, "base_moe_mlp_dim": 16},
    ),
    "gemma3_multimodal": (
        "gemma3-4b",
        LAYERS,
        MAXTEXT | FOUR_HEADS | VISION | {"base_num_decoder_layers": 14},
    ),
}
"""By family: MaxText's name of a model, sizes for the class of transformers, and sizes for MaxText."""

OLD = "_0_2_4"
CONVENTIONS = {
    "maxtext": True,
    "maxtext_unscanned": False,
    f"maxtext{OLD}": True,
    f"maxtext_unscanned{OLD}": False,
}
"""Whether layers are scanned, by convention."""

VOCABULARIES = {
    "gemma2": (64, {"padding": 3}),
    "gemma3": (64, {"padding": 3}),
    "gemma3_multimodal": (59, {"unused": 2}),
}
"""Rows of MaxText's embedding for the 61 of the class, and the sizes to give. It takes tied embeddings only."""

CASES = [(f, c) for f in FAMILIES for c in CONVENTIONS if c in load_mapping(f).conventions]


def _like_torch(family: str) -> str:
    """The convention of the class of transformers."""
    return "torch" if "torch" in load_mapping(family).conventions else "hf"


def _with_vision(changes: dict[str, Any]) -> torch.nn.Module:
    vision = {"model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 20}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 896, "patch_size": 14}
    # As the published models, whose vision tower has no pooling head.
    config = transformers.Gemma3Config(
        text_config=copy.deepcopy({**MODELS["gemma3"][1], **changes}),
        vision_config=vision | {"vision_use_head": False},
        mm_tokens_per_image=256,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(model, 0, centre=0.0)
    return model


def _trained(family: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    changes = FAMILIES[family][1]
    if family == "gpt_oss":
        model = gpt_oss(**changes)
    elif family == "gemma3":
        model = dense_model(family, **changes)
    elif family == "gemma3_multimodal":
        model = _with_vision(changes)
    else:
        model = hf_model(family, **changes)
    optimizer = optimizer_of(model)
    if family == "gemma3_multimodal":
        # Text alone would give the vision tower no gradients.
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    else:
        train_step(model, optimizer, 0)
    if family.startswith("gemma"):
        # MaxText's norms are these plus one, which is exact for such numbers alone, and has no negative zero.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_((parameter * 256).round() / 256 + 0.0)
    return model, optimizer


@pytest.mark.fast_cases("mixtral-maxtext_unscanned")
@pytest.mark.parametrize(("family", "convention"), CASES)
def test_weights_and_moments_go_there_and_come_back_bit_for_bit(
    tmp_path: Path, family: str, convention: str
) -> None:
    model, optimizer = _trained(family)
    save_dcp(tmp_path / "torch", model, optimizer)
    (tmp_path / "torch" / "config.json").write_text(json.dumps(config_json(model)))
    convert(tmp_path / "torch", tmp_path / "there", to="orbax", mapping=family, into=convention)
    (tmp_path / "there" / "config.json").write_text(json.dumps(config_json(model)))
    convert(tmp_path / "there", tmp_path / "back", to="dcp", mapping=family, into=_like_torch(family))
    same_bits(dcp_tensors(tmp_path / "back"), dcp_tensors(tmp_path / "torch"))
    tree = orbax_tree(tmp_path / "there")
    weights = dict(flat(tree["params"]))
    moments = dict(flat(tree["opt_state"][0]["nu"]))
    # The bias of DeepSeek's router is no parameter of the class.
    assert {k: a.shape for k, a in weights.items() if not k.endswith("MoeBlock_0/gate/bias")} == {
        k: a.shape for k, a in moments.items()
    }


@pytest.mark.slow
@pytest.mark.skipif(
    not ENVIRONMENT.exists(), reason="make maxtext installs MaxText, in an environment of its own"
)
def test_weights_are_what_maxtexts_own_conversion_makes_in_maxtexts_own_tree(tmp_path: Path) -> None:
    jobs: dict[str, list[dict[str, Any]]] = {"": [], OLD: []}
    axes: dict[str, dict[str, int]] = {}
    for family, (model_name, _, own) in FAMILIES.items():
        model, _ = _trained(family)
        files = tmp_path / family
        model.save_pretrained(files)
        with open_checkpoint(files) as reader:
            tensors = {_as_maxtext_reads(family, name): reader.read(name) for name in reader.tensors}
            np.savez(tmp_path / f"{family}.npz", **tensors)
        config = config_json(model)
        if family == "gemma3":
            config = {"text_config": config, "vision_config": {"num_hidden_layers": 0, "hidden_size": 1}}
        for convention in (c for f, c in CASES if f == family):
            for rows, sizes in {
                (61, ()),
                *((n, tuple(a.items())) for n, a in [VOCABULARIES.get(family, (61, {}))]),
            }:
                name = f"{family}_{convention}_{rows}"
                axes[name] = dict(sizes)
                convert(
                    files,
                    tmp_path / name,
                    to="orbax",
                    mapping=family,
                    into=convention,
                    axes=dict(sizes) or None,
                )
                job = {
                    "model": model_name,
                    "sizes": own | {"vocab_size": rows},
                    "scan": CONVENTIONS[convention],
                    "config": config,
                    "source": str(tmp_path / f"{family}.npz"),
                    "target": str(tmp_path / f"{name}.npz"),
                }
                jobs[OLD if convention.endswith(OLD) else ""].append(job)
    script = Path(__file__).parents[1] / "support" / "bridge" / "maxtext_trees.py"
    for release, path in (("", ""), (OLD, str(BEFORE))):
        (tmp_path / "jobs.json").write_text(json.dumps(jobs[release]))
        run = subprocess.run(
            [ENVIRONMENT, script, tmp_path / "jobs.json"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert run.returncode == 0, run.stderr[-3000:]
    for name in axes:
        converted = dict(flat(orbax_tree(tmp_path / name)["params"]))
        with np.load(tmp_path / f"{name}.npz") as expected:
            shapes = {key: expected[key].shape for key in expected.files}
            assert {key: a.shape for key, a in converted.items()} == shapes, name
            wrong = [key for key in converted if not np.array_equal(converted[key], expected[key])]
            assert wrong == [], name


def _as_maxtext_reads(family: str, name: str) -> str:
    """MaxText reads Gemma 3 under the names of the class that sees images, in transformers 4."""
    if family == "gemma3":
        return name.replace("model.", "model.language_model.", 1)
    if family == "gemma3_multimodal":
        name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        return "model." + name.replace("language_model.model.", "language_model.", 1)
    return name
