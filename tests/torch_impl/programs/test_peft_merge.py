"""Adapters of the real peft, merged by ``bridge.convert`` and by peft itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bridge import convert
from bridge.core.formats import open_checkpoint
from tests.support.torch_impl.frameworks import needs

pytestmark = [pytest.mark.slow, needs("accelerate", "peft", "transformers")]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 320, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 1000}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300))


# DoRA's norms of rows are sums that torch adds in another order than NumPy.
@pytest.mark.parametrize(
    ("model", "dtype", "options", "tolerance"),
    [
        (llama, "float32", {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 8}, 0.0),
        (llama, "float32", {"target_modules": "all-linear", "r": 64, "use_rslora": True}, 0.0),
        (llama, "float32", {"target_modules": ["q_proj"], "r": 4, "modules_to_save": ["lm_head"]}, 0.0),
        (llama, "float32", {"target_modules": ["embed_tokens", "q_proj"], "r": 4}, 0.0),
        (llama, "bfloat16", {"target_modules": ["q_proj"], "r": 8}, 0.0),
        (
            llama,
            "float32",
            {
                "target_modules": ["q_proj", "v_proj"],
                "alpha_pattern": {"layers.1.self_attn.q_proj": 3, "v_proj": 5},
                "rank_pattern": {"v_proj": 4},
            },
            0.0,
        ),
        (
            gpt2,
            "float32",
            {"target_modules": ["c_attn", "wte"], "r": 4, "fan_in_fan_out": True, "bias": "all"},
            0.0,
        ),
        (llama, "float32", {"target_modules": ["q_proj", "up_proj"], "r": 8, "use_dora": True}, 5e-7),
    ],
)
def test_a_merge_has_the_bits_of_pefts_own(
    model: Any, dtype: str, options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = model().to(getattr(torch, dtype))
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(lora_alpha=16, **options))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    convert(tmp_path / "base", tmp_path / "ours", to="safetensors", merge_adapter=tmp_path / "adapter")
    with (
        open_checkpoint(tmp_path / "ours") as ours,
        open_checkpoint(tmp_path / "merged") as pefts,
        open_checkpoint(tmp_path / "base") as before,
    ):
        assert ours.tensors.keys() == pefts.tensors.keys()
        changed = 0
        for name in pefts.tensors:
            a, b, old = (reader.read(name).astype(np.float32) for reader in (ours, pefts, before))
            assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b)), name
            changed += not np.array_equal(b, old)
        assert changed >= 2
