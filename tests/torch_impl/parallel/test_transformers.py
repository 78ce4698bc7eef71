"""Models of Hugging Face, unedited, cut by a policy: Llama, and Qwen3, whose norms of heads lie between cut modules."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_impl
from tests.support.ranks import on_ranks
from torch_impl import ShardingPolicy

pytest.importorskip("transformers")
POLICY = """
[mesh]
dp = 2
tp = 2
[precision]
main = "float64"
[[unit]]
match = "model.layers.*"
recompute = true
[[unit]]
match = ""
[[parallel]]
match = ["model.layers.*.self_attn.[qkv]_proj", "model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj", "lm_head"]
axis = "tp"
style = "colwise"
[[parallel]]
match = ["model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj", "model.embed_tokens"]
axis = "tp"
style = "rowwise"
"""
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def built(family: str) -> torch.nn.Module:
    import transformers

    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**SIZES)
    ).double()
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * 0.2 + (1 if param.ndim == 1 else 0))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@on_ranks(4)
def test_gradients_are_those_of_one_process(family: str) -> None:
    model, reference = built(family), built(family)
    ShardingPolicy.parse(POLICY).apply(model)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (model, reference)]
    for step in range(2):
        tokens = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(step))
        for module, rows in ((model, tokens.chunk(2)[dist.get_rank() // 2]), (reference, tokens)):
            logits = module(rows).logits
            assert logits.shape == (*rows.shape, 64)
            logits.square().mean().backward()
        for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            grad = torch_impl.full_tensor(param.grad)
            torch.testing.assert_close(
                grad, other.grad, rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
