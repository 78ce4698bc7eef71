"""Families at the sizes of the models that people have: names and shapes of transformers' classes, without weights.

The sizes are those of config.json on the Hub, in the repository that a case names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bridge.core.mapping import MappingTable, load_mapping, make_plan
from bridge.core.mapping.one_rule.sizes import require_model, with_config_fields
from tests.support.bridge.memory_reader import MemoryReader

Shapes = Mapping[str, tuple[int, ...]]

T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 64,
}
T5_XXL |= {"vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
WHISPER = {
    "vocab_size": 51866,
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
}
WHISPER |= {"encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120}
WHISPER |= {"decoder_ffn_dim": 5120, "max_source_positions": 1500, "max_target_positions": 448}
GPT_OSS = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32}

# By repository: family, class, sizes that differ from the class's defaults, and some of the tree's shapes.
CASES: dict[str, tuple[str, str, Mapping[str, Any], Shapes]] = {
    "google/t5-v1_1-xxl": (
        "t5",
        "T5ForConditionalGeneration",
        T5_XXL,
        {
            "shared/embedding": (32128, 4096),
            "decoder/block/23/layer/1/EncDecAttention/k/kernel": (4096, 4096),
            "decoder/block/23/layer/2/DenseReluDense/wi_1/kernel": (4096, 10240),
            "encoder/block/0/layer/0/SelfAttention/relative_attention_bias/embedding": (32, 64),
        },
    ),
    "google-bert/bert-large-uncased": (
        "bert",
        "BertForPreTraining",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        {
            "bert/embeddings/word_embeddings/embedding": (30522, 1024),
            "bert/encoder/layer/23/intermediate/dense/kernel": (1024, 4096),
            "cls/seq_relationship/kernel": (1024, 2),
        },
    ),
    "google/vit-base-patch16-224": (
        "vit",
        "ViTForImageClassification",
        {"num_labels": 1000},
        {
            "vit/embeddings/patch_embeddings/projection/kernel": (16, 16, 3, 768),
            "vit/embeddings/position_embeddings": (1, 197, 768),
            "vit/encoder/layer/11/output/dense/kernel": (3072, 768),
            "classifier/kernel": (768, 1000),
        },
    ),
    "openai/whisper-large-v3": (
        "whisper",
        "WhisperForConditionalGeneration",
        WHISPER,
        {
            "model/encoder/conv1/kernel": (3, 128, 1280),
            "model/decoder/embed_positions/embedding": (448, 1280),
            "model/decoder/layers/31/fc1/kernel": (1280, 5120),
        },
    ),
    "openai/gpt-oss-20b": (
        "gpt_oss",
        "GptOssForCausalLM",
        GPT_OSS,
        {
            "layers/23/mlp/gate/kernel": (32, 2880, 2880),
            "layers/23/attention/key/kernel": (2880, 8, 64),
            "layers/0/attention/sinks": (64,),
        },
    ),
}


def without_memory(shapes: Mapping[str, tuple[int, ...]], format: str) -> MemoryReader:
    """A checkpoint in which each tensor is one zero, repeated."""
    zero = np.zeros((), np.float16)
    return MemoryReader(format, {name: np.broadcast_to(zero, shape) for name, shape in shapes.items()})


def planned(table: MappingTable, shapes: Shapes, **conventions: str) -> dict[str, tuple[int, ...]]:
    source, to = ("orbax", "dcp") if next(iter(shapes)).startswith("params/") else ("dcp", "orbax")
    plan = make_plan(without_memory(shapes, source), to, table, **conventions)
    return {name: tensor.shape for name, tensor in plan.tensors.items()}


@pytest.mark.fast_cases("google/vit-base-patch16-224")
@pytest.mark.parametrize("repository", CASES)
def test_a_real_model_fits_its_family_and_comes_back(repository: str) -> None:
    family, class_name, sizes, shapes = CASES[repository]
    class_ = getattr(transformers, class_name)
    config = class_.config_class(**copy.deepcopy(dict(sizes)))
    with torch.device("meta"):
        model = class_(config)
    table = load_mapping(family)
    fields = config.to_dict()
    require_model(table, fields, "config.json")
    table = with_config_fields(table, fields, "config.json")
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    state = {f"model.{n}": tuple(t.shape) for n, t in model.state_dict().items()}
    once = {name: shape for name, shape in state.items() if name.removeprefix("model.") in names}
    tree = planned(table, once)
    assert {f"params/{name}": shape for name, shape in shapes.items()}.items() <= tree.items()
    assert sum(map(np.prod, tree.values())) == sum(map(np.prod, once.values()))
    into = "torch" if "torch" in table.conventions else "hf"
    back = planned(table, tree, into=into)
    # The names that only a state dict has come back, too, but for the output's, which a mapping ties if asked.
    assert once.items() <= back.items() <= state.items()
