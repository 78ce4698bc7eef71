"""Names of MaxText: against MaxText's own trees and its own conversion, and there and back with optimizer state."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.checkpoints.convert import convert
from bridge.formats import open_checkpoint
from bridge.mapping import load_mapping
from tests.mapping.test_families_gpt_oss import gpt_oss
from tests.support.bridge.family_checkpoints import (
    config_json,
    dcp_tensors,
    flat,
    optimizer_of,
    orbax_tree,
    same_bits,
    save_dcp,
    train_step,
    trained,
)
from tests.support.bridge.maxtext_trees import ENVIRONMENT

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

CYCLE = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_only_layers": []}
DELTA_NET = {
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 6,
    "gdn_key_head_dim": 6,
    "gdn_value_head_dim": 10,
    "gdn_conv_kernel_dim": 4,
    "gdn_chunk_size": 8,
}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2.5-7b", SIZES, MAXTEXT),
    "qwen3": ("qwen3-8b", SIZES, MAXTEXT),
    "qwen3_moe": ("qwen3-30b-a3b", SIZES, MAXTEXT | EXPERTS | {"base_mlp_dim": 16, "base_moe_mlp_dim": 16}),
    "mixtral": ("mixtral-8x7b", SIZES, MAXTEXT | EXPERTS | {"base_moe_mlp_dim": 40}),
    "qwen3_next": (
        "qwen3-next-80b-a3b",
        SIZES | CYCLE | {"head_dim": 8, "shared_expert_intermediate_size": 16},
        MAXTEXT | EXPERTS | DELTA_NET | {"head_dim": 8, "base_mlp_dim": 16, "base_moe_mlp_dim": 16},
    ),
    "gpt_oss": (
        "gpt-oss-20b",
        {},
        MAXTEXT
        | EXPERTS
        | {"base_emb_dim": 32, "base_num_decoder_layers": 3, "head_dim": 10}
        | {"base_mlp_dim": 64, "base_moe_mlp_dim": 64},
    ),
}
"""By family: MaxText's name of a model, sizes for the class of transformers, and sizes for MaxText."""

CONVENTIONS = {"maxtext": True, "maxtext_unscanned": False}
"""Whether layers are scanned, by convention."""

CASES = [(f, c) for f in FAMILIES for c in CONVENTIONS if c in load_mapping(f).conventions]


def _like_torch(family: str) -> str:
    """The convention of the class of transformers."""
    return "torch" if "torch" in load_mapping(family).conventions else "hf"


def _trained(family: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    if family != "gpt_oss":
        return trained(family, steps=1, **FAMILIES[family][1])
    model = gpt_oss()
    optimizer = optimizer_of(model)
    train_step(model, optimizer, 0)
    return model, optimizer


@pytest.mark.fast_cases("qwen3_moe-maxtext", "mixtral-maxtext_unscanned", "qwen3_next-maxtext_unscanned")
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
    weights = dict(flat(tree["params"]["params"]))
    moments = dict(flat(tree["opt_state"][0]["nu"]["params"]))
    assert {k: a.shape for k, a in weights.items()} == {k: a.shape for k, a in moments.items()}


@pytest.mark.slow
@pytest.mark.skipif(
    not ENVIRONMENT.exists(), reason="make maxtext installs MaxText, in an environment of its own"
)
def test_weights_are_what_maxtexts_own_conversion_makes_in_maxtexts_own_tree(tmp_path: Path) -> None:
    jobs = []
    for family, (model_name, _, own) in FAMILIES.items():
        model, _ = _trained(family)
        files = tmp_path / family
        model.save_pretrained(files)
        with open_checkpoint(files) as reader:
            np.savez(tmp_path / f"{family}.npz", **{name: reader.read(name) for name in reader.tensors})
        for convention in (c for f, c in CASES if f == family):
            convert(files, tmp_path / f"{family}_{convention}", to="orbax", mapping=family, into=convention)
            jobs.append(
                {
                    "model": model_name,
                    "sizes": own,
                    "scan": CONVENTIONS[convention],
                    "config": config_json(model),
                    "source": str(tmp_path / f"{family}.npz"),
                    "target": str(tmp_path / f"{family}_{convention}.npz"),
                }
            )
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).parents[1] / "support" / "bridge" / "maxtext_trees.py"
    run = subprocess.run(
        [ENVIRONMENT, script, tmp_path / "jobs.json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for family, convention in CASES:
        found = dict(flat(orbax_tree(tmp_path / f"{family}_{convention}")["params"]))
        with np.load(tmp_path / f"{family}_{convention}.npz") as expected:
            shapes = {name: expected[name].shape for name in expected.files}
            assert {name: a.shape for name, a in found.items()} == shapes, (family, convention)
            wrong = [name for name in found if not np.array_equal(found[name], expected[name])]
            assert wrong == [], (family, convention)
