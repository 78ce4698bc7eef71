"""Configurations of published decoders, as in `config.json` on the Hub, without fields of the tokenizer.

Each has the name of its repository. The number of parameters comes from the repository's safetensors files or from the
paper ("GPT-NeoX-20B", arXiv 2204.06745, table 1). None means unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """family: the mapping. class_name: of transformers. shapes: of some tensors in the family's tree."""

    family: str
    class_name: str
    config: dict[str, Any]
    parameters: int | None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def _attention(layer: str, m: int, heads: int, groups: int, size: int) -> dict[str, tuple[int, ...]]:
    at = f"{layer}/attention/"
    return {
        at + "query/kernel": (m, heads, size),
        at + "key/kernel": (m, groups, size),
        at + "value/kernel": (m, groups, size),
        at + "out/kernel": (heads, size, m),
    }


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attn_logit_softcapping": None}
_GEMMA |= {"final_logit_softcapping": None, "rms_norm_eps": 1e-6, "use_cache": True}
_FALCON = {"model_type": "falcon", "alibi": False, "bias": False, "layer_norm_epsilon": 1e-5}
_FALCON |= {"multi_query": True, "parallel_attn": True, "vocab_size": 65024}

PUBLISHED = {
    "mistralai/Mistral-7B-v0.1": Published(
        "mistral",
        "MistralForCausalLM",
        {"model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336}
        | {"max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096}
        | {"tie_word_embeddings": False, "vocab_size": 32000},
        7241732096,
        _attention("layers/31", 4096, 32, 8, 128),
    ),
    "mistralai/Mistral-Nemo-Base-2407": Published(
        "mistral",
        "MistralForCausalLM",
        # Heads are narrower than hidden_size / num_attention_heads.
        {"model_type": "mistral", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 14336}
        | {"max_position_embeddings": 128000, "num_attention_heads": 32, "num_hidden_layers": 40}
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
        | {"head_dim": 128, "tie_word_embeddings": False, "vocab_size": 131072},
        12247782400,
        _attention("layers/39", 5120, 32, 8, 128),
    ),
    "ibm-granite/granite-3.0-8b-instruct": Published(
        "granite",
        "GraniteForCausalLM",
        {
            "model_type": "granite",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_multiplier": 0.0078125,
        }
        | {"embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22}
        | {"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12800}
        | {"max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 40}
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000, "rope_scaling": None}
        | {"tie_word_embeddings": True, "vocab_size": 49155},
        8170848256,
        _attention("layers/39", 4096, 32, 8, 128),
    ),
    "allenai/OLMo-2-1124-7B": Published(
        "olmo2",
        "Olmo2ForCausalLM",
        {"model_type": "olmo2", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096}
        | {"intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32}
        | {"num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000}
        | {"rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 100352},
        7298617344,
        _attention("layers/31", 4096, 32, 32, 128) | {"layers/0/attention/query_norm/scale": (32, 128)},
    ),
    "google/gemma-3-1b-pt": Published(
        "gemma3",
        "Gemma3ForCausalLM",
        {"model_type": "gemma3_text", "head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912}
        | {"max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26}
        | {"num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000}
        | {"rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6}
        | {"vocab_size": 262144}
        | _GEMMA,
        999885952,
        _attention("layers/25", 1152, 4, 1, 256),
    ),
    "google/gemma-3-4b-pt": Published(
        "gemma3_multimodal",
        "Gemma3ForConditionalGeneration",
        # What is absent here has the values of the class: heads of 256, for one.
        {"model_type": "gemma3", "mm_tokens_per_image": 256, "image_token_index": 262144}
        | {
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
            | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
            | {"sliding_window": 1024},
            "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304}
            | {"model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27}
            | {"patch_size": 14, "vision_use_head": False},
        },
        4300079472,
        _attention("layers/33", 2560, 8, 4, 256)
        | _attention("vision/layers/26", 1152, 16, 16, 72)
        | {"vision/patches/kernel": (14, 14, 3, 1152), "projector/kernel": (1152, 2560)},
    ),
    "microsoft/Phi-3-mini-4k-instruct": Published(
        "phi3",
        "Phi3ForCausalLM",
        {"model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192}
        | {"max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
        | {"rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "vocab_size": 32064}
        | {"tie_word_embeddings": False, "attention_bias": False},
        3821079552,
        _attention("layers/31", 3072, 32, 32, 96) | {"layers/0/mlp/up/kernel": (3072, 8192)},
    ),
    "microsoft/phi-4": Published(
        "phi3",
        "Phi3ForCausalLM",
        {"model_type": "phi3", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17920}
        | {"max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40}
        | {"num_key_value_heads": 10, "original_max_position_embeddings": 16384, "rms_norm_eps": 1e-5}
        | {"rope_scaling": None, "rope_theta": 250000, "sliding_window": None, "vocab_size": 100352}
        | {"tie_word_embeddings": False, "attention_bias": False},
        14659507200,
        _attention("layers/39", 5120, 40, 10, 128),
    ),
    "EleutherAI/gpt-neox-20b": Published(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {"model_type": "gpt_neox", "hidden_act": "gelu_fast", "hidden_size": 6144, "intermediate_size": 24576}
        | {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 64}
        | {"num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25, "vocab_size": 50432}
        | {"tie_word_embeddings": False, "use_parallel_residual": True},
        20554567680,
        _attention("layers/43", 6144, 64, 64, 96) | {"layers/0/attention/key/bias": (64, 96)},
    ),
    "tiiuae/falcon-7b": Published(
        "falcon",
        "FalconForCausalLM",
        _FALCON
        | {"hidden_size": 4544, "new_decoder_architecture": False, "num_attention_heads": 71}
        | {"num_hidden_layers": 32, "num_kv_heads": 71},
        6921720704,
        _attention("layers/31", 4544, 71, 1, 64),
    ),
    "tiiuae/falcon-40b": Published(
        "falcon",
        "FalconForCausalLM",
        _FALCON
        | {"hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128}
        | {"num_hidden_layers": 60, "num_kv_heads": 8},
        41303293952,
        _attention("layers/59", 8192, 128, 8, 64),
    ),
    "tiiuae/falcon-11B": Published(
        "falcon",
        "FalconForCausalLM",
        _FALCON
        | {"hidden_size": 4096, "new_decoder_architecture": True, "num_attention_heads": 32}
        | {"num_hidden_layers": 60, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 16384}
        | {"tie_word_embeddings": False, "ff_factor": 4},
        None,
        _attention("layers/59", 4096, 32, 8, 128),
    ),
    "tiiuae/falcon-rw-1b": Published(
        "falcon",
        "FalconForCausalLM",
        _FALCON
        | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False, "vocab_size": 50304}
        | {"hidden_size": 2048, "new_decoder_architecture": False, "num_attention_heads": 32}
        | {"num_hidden_layers": 24, "num_kv_heads": 32},
        1311625216,
        _attention("layers/23", 2048, 32, 32, 64),
    ),
    "Qwen/Qwen3-30B-A3B": Published(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128}
        | {"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": []}
        | {"max_position_embeddings": 40960, "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
        | {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936}
        | {"tie_word_embeddings": False},
        30532122624,
        _attention("layers/47", 2048, 32, 4, 128)
        | {"layers/0/mlp/down/kernel": (128, 768, 2048), "layers/47/mlp/gate/kernel": (128, 2048, 768)},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Published(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {"model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256}
        | {"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4}
        | {"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_value_head_dim": 128, "mlp_only_layers": [], "moe_intermediate_size": 512}
        | {"norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10}
        | {"num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}
        | {"rms_norm_eps": 1e-6, "rope_theta": 10000000, "shared_expert_intermediate_size": 512}
        | {"tie_word_embeddings": False, "vocab_size": 151936},
        79674391296,
        _attention("layers/47", 2048, 16, 2, 256)
        | {
            "layers/0/delta_net/value/kernel": (2048, 16, 2, 128),
            "layers/0/delta_net/query_conv/kernel": (4, 1, 16, 128),
            "layers/3/attention/gate/kernel": (2048, 16, 256),
            "layers/47/moe/up/kernel": (512, 2048, 512),
        },
    ),
    "deepseek-ai/DeepSeek-V3": Published(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "kv_lora_rank": 512}
        | {"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256}
        | {"n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8}
        | {"num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "topk_group": 4}
        | {"tie_word_embeddings": False, "v_head_dim": 128, "vocab_size": 129280},
        # Of the files without the layer that predicts a second token; the paper has 671 B.
        671026419200,
        {
            "layers/60/attention/query_up/kernel": (1536, 128, 128),
            "layers/60/attention/query_up_rope/kernel": (1536, 128, 64),
            "layers/60/attention/key_up/kernel": (512, 128, 128),
            "layers/60/attention/value_up/kernel": (512, 128, 128),
            "layers/60/moe/up/kernel": (256, 7168, 2048),
            "layers/60/moe/down/kernel": (256, 2048, 7168),
            "layers/2/mlp/up/kernel": (7168, 18432),
        },
    ),
}
