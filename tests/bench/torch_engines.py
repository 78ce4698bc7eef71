"""One training step of the same model under each engine: ours, FSDP2, DDP, and no parallelism."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

import torch_impl
from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

ENGINES = ("ours", "fsdp2", "ddp")
NAMES = {"ours": "Twinshard", "fsdp2": "FSDP2", "ddp": "DDP", "plain": "plain module"}
BASELINE = DecoderConfig(32000, 512, 12, 8, 8, 64, 1408)
"""71.3 M parameters."""
TINY = DecoderConfig(61, 24, 2, 2, 1, 8, 40)


@dataclass(frozen=True)
class Training:
    """The training of every engine: per step ``batch`` sequences of ``length`` random tokens, different on each rank.

    ``bfloat16`` computes in bfloat16 on float32 weights and reduces gradients in float32. DDP uses autocast.
    """

    config: DecoderConfig = field(default=BASELINE)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    batch: int = 2
    length: int = 128
    lr: float = 3e-4

    @property
    def tokens(self) -> int:
        """Tokens of one step on one rank."""
        return self.batch * self.length


def prototype(training: Training) -> Decoder:
    """The model with initial weights that are equal on all ranks. Every engine trains a copy."""
    model = Decoder(training.config)
    model.init_weights(0)
    return model.to(training.device)


def build_step(engine: str, training: Training, model: Decoder) -> Callable[[], torch.Tensor]:
    """A step of AdamW on a copy of ``model``. Each call returns this rank's loss before the update."""
    wrapped = sharded(engine, copy.deepcopy(model), training.dtype)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=training.lr, fused=True)
    draw = torch.Generator().manual_seed(dist.get_rank())
    shape = (training.batch, training.length + 1)
    tokens = torch.randint(training.config.vocab_size, shape, generator=draw).to(training.device)
    autocast = engine in ("ddp", "plain") and training.dtype != torch.float32

    def step() -> torch.Tensor:
        context = torch.autocast(training.device, training.dtype) if autocast else contextlib.nullcontext()
        with context:
            loss = next_token_loss(wrapped(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sharded(engine: str, model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` under ``engine``, with a unit for each of ``model.layers`` and one for the rest.

    Raises ValueError for an unknown engine.
    """
    if engine == "plain":
        return model
    if engine == "ddp":
        # The view saves DDP a second copy of the gradients.
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if engine not in ("ours", "fsdp2"):
        raise ValueError(f"engine: expected one of {', '.join(NAMES)}, got {engine!r}")
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    low = None if dtype == torch.float32 else dtype
    high = None if low is None else torch.float32
    for module in (*layers, model):
        if engine == "ours":
            policy = torch_impl.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high)
            torch_impl.fully_shard(module, mp_policy=policy)
        else:
            theirs = fsdp.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high)
            fsdp.fully_shard(module, mp_policy=theirs)
    return model


class Chain(nn.Module):
    """``units`` layers ``Linear(4, 4)``, with so little arithmetic that hooks dominate the cost of a step."""

    def __init__(self, units: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, device=device) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build_chain(engine: str, units: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of a ``Chain``, and its AdamW step, which also clears the gradients."""
    torch.manual_seed(0)
    model = sharded(engine, Chain(units, device), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.ones(2, 4, device=device)

    def forward_backward() -> None:
        model(x).sum().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return forward_backward, update
