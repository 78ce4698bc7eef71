"""Models, policies and cells of ``bench_plan_peak``. Widths are small, so that 8192 tokens compile and run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.core.sharding import ShardingPolicy
from bridge.planning import Workload, parse_policy

LENGTHS = (64, 512, 2048, 4096, 8192)
MICROBATCHES = (1, 4)
STRATEGIES = {"fsdp": "optim_grads_params", "zero1": "optim", "zero2": "optim_grads", "no_shard": "no_shard"}
DEVICES = 4

_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 704,
    "vocab_size": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "num_hidden_layers": 4,
        "vocab_size": 1024,
        "intermediate_size": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3": {
        **_LLAMA,
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2048,
        "intermediate_size": 768,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        **_LLAMA,
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "vocab_size": 2048,
        "intermediate_size": 1024,
        "sliding_window": 256,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 1003,
        "n_embd": 192,
        "n_layer": 4,
        "n_head": 6,
        "n_positions": 8192,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
}
"""Configurations of ``CausalLM``, by family."""


def model_named(name: str, folder: Path) -> str:
    """The value of ``--model``. ``decoder`` is this repository's; the others get a config.json in ``folder``."""
    if name == "decoder":
        return "decoder:default"
    path = folder / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(CONFIGS[name]))
    return str(path)


@dataclass(frozen=True)
class Cell:
    """One step to compare. ``model``: "decoder", or a family of ``CONFIGS``."""

    model: str
    length: int
    microbatches: int
    recompute: bool
    stacked: bool
    strategy: str

    @property
    def workload(self) -> Workload:
        return Workload(1, self.length, self.microbatches)

    @property
    def stacks(self) -> tuple[str, ...]:
        return ("layers",) if self.stacked else ()

    def policy(self, prefetch: int = 0, layers: str = "layers.*") -> ShardingPolicy:
        """The policy, all in float32. ``layers``: the pattern of all units except the root."""
        strategy = STRATEGIES[self.strategy]
        again = str(self.recompute).lower()
        return parse_policy(
            f"[mesh]\nprefetch = {prefetch}\n"
            f'[[unit]]\nmatch = "{layers}"\nstrategy = "{strategy}"\nrecompute = {again}\n'
            f'[[unit]]\nmatch = ""\nstrategy = "{strategy}"\n',
            self.strategy,
        )


def cells(
    models: Sequence[str],
    lengths: Sequence[int] = LENGTHS,
    microbatches: Sequence[int] = MICROBATCHES,
    strategies: Sequence[str] = ("fsdp", "zero1", "zero2"),
    stacked: Sequence[bool] = (False, True),
) -> Iterator[Cell]:
    """All combinations, with and without recomputation. Gemma 2's layers differ and cannot be stacked."""
    for fields in itertools.product(models, lengths, microbatches, (False, True), stacked, strategies):
        if not (fields[0] == "gemma2" and fields[4]):
            yield Cell(*fields)
