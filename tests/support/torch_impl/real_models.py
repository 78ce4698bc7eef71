"""Public models of ``transformers``: small random configurations, units, data and a reference.

Sizes are awkward (odd vocabularies, rows without small common multiples), and dropout is off. Every sample of a batch
has the same weight, so the mean of the ranks' losses equals the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

STEPS = 10
SAMPLES = 2  # of each rank in a step
_VOCAB, _LENGTH = 61, 7
_SPREAD = 0.2  # of the first weights: with the usual 0.02, such small models are nearly linear
# A key's bias has no gradient but rounding, which eps=1e-8 would blow up to full steps, different on every run.
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}


@dataclass(frozen=True)
class RealModel:
    """How to build a model, which modules under the root are units, and ``samples`` inputs of a step."""

    build: Callable[[], nn.Module]
    layers: Callable[[Any], Iterable[nn.Module]]
    batch: Callable[[int, int], dict[str, Tensor]]

    def seeded(self) -> nn.Module:
        """The same weights on every rank and in the reference."""
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.build().train()

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Modules in the order in which users shard them: each layer, then the root."""
        return [*self.layers(model), model]


def _tokens(step: int, samples: int) -> dict[str, Tensor]:
    """Sequences that the first token determines, so that the model has something to learn."""
    tokens = [torch.randint(_VOCAB, (samples,), generator=torch.Generator().manual_seed(step))]
    while len(tokens) < _LENGTH:
        tokens.append((5 * tokens[-1] + 1) % _VOCAB // 3)
    return {"input_ids": torch.stack(tokens, 1), "labels": torch.stack(tokens, 1)}


def _sentence_pairs(step: int, samples: int) -> dict[str, Tensor]:
    sources = _tokens(step, samples)["input_ids"]
    return {"input_ids": sources, "labels": sources.flip(1)[:, :5].clamp(min=1)}


def _images(step: int, samples: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    pixels = torch.randn(samples, 3, 8, 8, generator=random)
    labels = torch.randint(3, (samples,), generator=random)
    # The channel of the label is brighter: enough to be learned in ten steps from whatever weights a torch draws.
    pixels[torch.arange(samples), labels] += 2
    return {"pixel_values": pixels, "labels": labels}


def _llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=_SPREAD,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=_VOCAB,
        n_positions=16,
        n_embd=20,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=_SPREAD,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=_VOCAB,
        hidden_size=24,
        intermediate_size=19,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        initializer_range=_SPREAD,
        use_cache=False,
        experts_implementation="eager",  # only the experts that got tokens are called
    )
    return MixtralForCausalLM(config)


def _t5() -> nn.Module:
    config = T5Config(
        vocab_size=_VOCAB,
        d_model=20,
        d_kv=6,
        d_ff=33,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=20,
        intermediate_size=33,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=_SPREAD,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def _t5_blocks(model: Any) -> list[nn.Module]:
    return [*model.encoder.block, *model.decoder.block]


MODELS = {
    "llama": RealModel(_llama, lambda model: model.model.layers, _tokens),
    "gpt2": RealModel(_gpt2, lambda model: model.transformer.h, _tokens),
    "mixtral": RealModel(_mixtral, lambda model: model.model.layers, _tokens),
    "t5": RealModel(_t5, _t5_blocks, _sentence_pairs),
    "vit": RealModel(_vit, lambda model: model.vit.layers, _images),
}


@cache
def full_batch_run(name: str, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of ``STEPS`` steps of the unsharded model on the batches of all ``world`` ranks, and the last weights."""
    model = MODELS[name].seeded()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in range(STEPS):
        loss = model(**MODELS[name].batch(step, world * SAMPLES)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def rank_batch(name: str, step: int, rank: int, world: int) -> dict[str, Tensor]:
    """The part of the step's batch that ``rank`` trains on."""
    whole = MODELS[name].batch(step, world * SAMPLES)
    return {key: value[rank * SAMPLES : (rank + 1) * SAMPLES] for key, value in whole.items()}
