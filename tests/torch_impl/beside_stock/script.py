"""A training script as users write them for ``torch.distributed.fsdp``, which imports from either library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import Engine
from tests.support.torch_impl.real_models import MODELS, STEPS, rank_batch
from torch_impl.models import Decoder, DecoderConfig, next_token_loss

_CONFIG = DecoderConfig(
    vocab_size=61, d_model=21, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=29, rope_theta=10000
)


@dataclass(frozen=True)
class Script:
    """What differs between the scripts; dtypes by name, None as in ``MixedPrecisionPolicy``.

    accumulate: how microbatches before the last are treated: "sync" reduces each, "no_sync" sets
        ``set_requires_gradient_sync(False)``, "last" sets ``set_is_last_backward(False)``.
    """

    model: str = "decoder"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    reshard_after_forward: bool | None = None
    microbatches: int = 1
    accumulate: str = "sync"
    max_norm: float | None = None
    set_to_none: bool = True
    foreach: bool = True
    offload: bool = False


SCRIPTS = {
    "plain": Script(),
    "tied gpt2": Script("gpt2"),
    "clipped mixtral": Script("mixtral", max_norm=0.5, foreach=False),
    "offloaded": Script(microbatches=2, accumulate="no_sync", max_norm=0.5, offload=True),
    "reduced in the last microbatch": Script("llama", microbatches=2, accumulate="no_sync", max_norm=0.5),
    "last backward marked, weights kept": Script(
        microbatches=3, accumulate="last", reshard_after_forward=False, set_to_none=False
    ),
    "llama": Script("llama"),
    "t5": Script("t5"),
    "vit": Script("vit"),
    "clipped": Script(max_norm=0.5),
    "weights kept after forward": Script("llama", reshard_after_forward=False),
    "reduced in every microbatch": Script(microbatches=3, set_to_none=False),
    "reduced in the last microbatch, weights kept": Script(
        microbatches=3, accumulate="no_sync", reshard_after_forward=False
    ),
    "last backward marked": Script("llama", microbatches=2, accumulate="last"),
    "bfloat16, float32 reduction": Script(param_dtype="bfloat16", reduce_dtype="float32"),
    "bfloat16 reduction": Script(param_dtype="bfloat16"),
    "bfloat16 llama, float32 reduction": Script("llama", "bfloat16", "float32", max_norm=0.5),
    "bfloat16 llama, bfloat16 reduction": Script("llama", "bfloat16"),
    "bfloat16 llama, offloaded": Script("llama", "bfloat16", "float32", offload=True),
    "bfloat16 llama, microbatches": Script(
        "llama", "bfloat16", "float32", microbatches=2, accumulate="no_sync"
    ),
}


def script(engine: Engine, name: str) -> dict[str, list[float]]:
    """The mean losses over the ranks of ``STEPS`` steps; in float32 the gradient's norms, 0 where not clipped."""
    fsdp, script = engine.package, SCRIPTS[name]
    model, units = _model(script.model)
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=_dtype(script.param_dtype), reduce_dtype=_dtype(script.reduce_dtype)
    )
    options: dict[str, Any] = {"mp_policy": policy}
    if script.reshard_after_forward is not None:
        options["reshard_after_forward"] = script.reshard_after_forward
    if script.offload:
        options["offload_policy"] = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
    for layer in units:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)
    assert isinstance(model, fsdp.FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=script.foreach)

    losses, norms = [], []
    for step in range(STEPS):
        mean_loss = torch.zeros(())
        for k in range(script.microbatches):
            last = k == script.microbatches - 1
            if script.accumulate == "no_sync":
                model.set_requires_gradient_sync(last)
            if script.accumulate == "last":
                model.set_is_last_backward(last)
            loss = _loss(model, script, step * script.microbatches + k) / script.microbatches
            loss.backward()
            mean_loss += loss.detach().float()
        norm = 0.0
        if script.max_norm is not None:
            total = nn.utils.clip_grad_norm_(model.parameters(), script.max_norm)
            norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=script.set_to_none)
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item() / dist.get_world_size())
        norms.append(norm)
    assert losses[0] - losses[-1] > 0.5, "nothing was learned"
    return {"losses": losses} if script.param_dtype else {"losses": losses, "norms": norms}


def _model(name: str) -> tuple[Any, Iterable[nn.Module]]:
    if name == "decoder":
        decoder = Decoder(_CONFIG)
        decoder.init_weights(0)
        return decoder, decoder.layers
    model = MODELS[name].seeded()
    return model, MODELS[name].layers(model)


def _loss(model: nn.Module, script: Script, index: int) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    if script.model != "decoder":
        return model(**rank_batch(script.model, index, rank, world)).loss
    tokens = rank_batch("llama", index, rank, world)["input_ids"]
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _within(name: str) -> dict[str, float]:
    # bfloat16 itself is 1e-3 to 7e-3 away from float32 here.
    if SCRIPTS[name].param_dtype:
        return {"losses": 1e-4 if SCRIPTS[name].reduce_dtype else 2e-3}
    return {"losses": 1e-6, "norms": 1e-5}


PROGRAMS = [
    Program(script, (name,), world, slow=(name, world) != ("plain", 3), within=_within(name))
    for world in (3, 2)
    for name in SCRIPTS
]
