"""Weights that say what is gathered of them (FSDP2's extensions) train on a GPU as with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn import functional as F

import torch_impl
from tests.gpu.devices import DEVICE, needs_device
from tests.gpu.networks import adamw, rows, sharded, train
from tests.support.torch_impl.extended import Bytes, Halved
from torch_impl.dtensor.local import local_of

pytestmark = needs_device


class Wrapped(nn.Module):
    """Layers whose weights are gathered as bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.layers = nn.ModuleList(nn.Linear(128, 128, device=DEVICE) for _ in range(3))
        for layer in self.layers:
            layer.weight = nn.Parameter(Halved(layer.weight.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def trained(shard: Callable[..., Any], **options: Any) -> list[float]:
    model = sharded(Wrapped(), shard, **options)
    losses = train(model, adamw(model))
    assert type(model.layers[0].weight.to_local()) is Halved
    return losses


def test_weights_gathered_by_their_own_say_have_the_losses_of_fsdp2(one_rank: None) -> None:
    losses = trained(torch_impl.fully_shard)
    # What is freed FSDP2 gathers again in place, which this class does not hide from autograd.
    theirs = trained(fsdp.fully_shard, reshard_after_forward=False)
    torch.testing.assert_close(losses, theirs, rtol=1e-6, atol=0)
    assert losses == trained(torch_impl.fully_shard, prefetch=0)


def test_such_weights_may_lie_in_the_hosts_memory(one_rank: None) -> None:
    losses = trained(torch_impl.fully_shard, offload_policy=fsdp.CPUOffloadPolicy())
    torch.testing.assert_close(losses, trained(torch_impl.fully_shard), rtol=1e-4, atol=0)


class Adapted(nn.Module):
    """A frozen weight in bytes and a trained adapter, as in QLoRA."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(6)
            base = torch.randn(128, 128).to(DEVICE) / 12
            self.base = nn.Parameter(Bytes.of(base), requires_grad=False)
            self.down, self.up = (nn.Linear(*sizes, device=DEVICE) for sizes in ((128, 16), (16, 128)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.base.dequantize()) + self.up(self.down(x))


def test_frozen_bytes_are_gathered_as_they_are(one_rank: None) -> None:
    plain = Adapted()
    model = torch_impl.fully_shard(Adapted())
    losses = train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    expected = train(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    model.unshard()
    assert torch.equal(model.base.dequantize(), plain.base.dequantize())
    model.reshard()
    assert type(local_of(model.base)) is Bytes
    assert model(rows(0)).shape == (64, 128)
