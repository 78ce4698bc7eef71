"""Measured peaks of PyTorch on 2 ranks: this repository's decoder, and Hugging Face's models with both attentions."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import torch_impl
from bridge.planning import make_plan, resolve_models
from bridge.planning.models.formulas import Attention
from tests.bench.peak_shapes import CONFIGS, Cell, model_named
from tests.bench.torch_memory import live_bytes
from tests.support.ranks import RankGroup
from torch_impl.models import Decoder, DecoderConfig, next_token_loss

RANKS = 2
EAGER = "-eager"
"""Suffix of a family's name for plain attention."""


def measured_cells(chosen: Sequence[Cell]) -> Iterator[tuple[Cell, int, int, str]]:
    """For each cell: planned bytes, measured bytes on the rank that holds most, and the moment of the planned peak."""
    group = RankGroup()
    try:
        for cell in chosen:
            peak = planned(cell)
            yield cell, peak[0], max(group.run(RANKS, measured, cell, timeout=600)), peak[1]
    finally:
        group.close()


def planned(cell: Cell) -> tuple[int, str]:
    """Planned peak in bytes, and its moment."""
    family, attention = cell.model.removesuffix(EAGER), None
    if cell.model != "decoder":
        attention = Attention.plain if cell.model.endswith(EAGER) else Attention.fused
    with tempfile.TemporaryDirectory() as scratch:
        (shapes,) = resolve_models(model_named(family, Path(scratch)), ["torch"], (), attention).values()
    peak = make_plan(shapes, cell.policy(), RANKS, "torch", cell.workload).peak
    return peak.total, peak.moment


def measured(cell: Cell) -> int:
    """Bytes on this rank at the peak of a step."""
    torch.manual_seed(0)

    def build() -> Callable[[], Any]:
        model, loss_of = _model(cell)
        layers = "layers.*" if cell.model == "decoder" else "model.layers.*"
        torch_impl.ShardingPolicy.parse(cell.policy(layers=layers).to_toml(), "cell").apply(model)
        optimizer = torch_impl.MainWeightAdamW(model.parameters())
        tokens = torch.zeros(1, cell.length, dtype=torch.int64)

        def step() -> None:
            for k in range(cell.microbatches):
                model.set_is_last_backward(k == cell.microbatches - 1)
                loss = loss_of(model, tokens)
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()

        return step

    gc.collect()
    return live_bytes(build, torch.device("cpu"), warm=1).peak


def _model(cell: Cell) -> tuple[Any, Callable[[Any, torch.Tensor], torch.Tensor]]:
    if cell.model == "decoder":
        return Decoder(DecoderConfig()), lambda model, tokens: next_token_loss(model(tokens), tokens)
    import transformers

    keys = dict(CONFIGS[cell.model.removesuffix(EAGER)])
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    config._attn_implementation = "eager" if cell.model.endswith(EAGER) else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model, lambda model, tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss
