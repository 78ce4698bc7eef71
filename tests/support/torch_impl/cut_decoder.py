"""The shipped decoder, cut over a tensor-parallel axis by a policy, and one process that trains on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from torch_impl import ParallelPolicy, PrecisionPolicy, ShardingPolicy, UnitPolicy
from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

CONFIG = DecoderConfig(vocab_size=24, d_model=20, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=6, d_ff=20)
CUTS = (
    ParallelPolicy(("layers.*.attention.w[qkv]",), "tp", "colwise"),
    ParallelPolicy(("layers.*.attention.wo", "layers.*.mlp.w2"), "tp", "rowwise"),
    ParallelPolicy(("layers.*.mlp.w13",), "tp", "colwise", fused=(1, 1)),
)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def decoder() -> Decoder:
    """A float64 decoder with weights so large that each one affects the loss."""
    model = Decoder(CONFIG).double()
    model.init_weights(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(10)
    return model


def cut_decoder(mesh: dict[str, int | str], *others: ParallelPolicy, **options: Any) -> Decoder:
    """Sharded by layers over ``mesh``; ``options`` are those of every unit."""
    units = (UnitPolicy("layers.*", **options), UnitPolicy("", **options))
    policy = ShardingPolicy(units, mesh, PrecisionPolicy("float64"), parallel=(*CUTS, *others))
    model = decoder()
    policy.apply(model)
    return model


def rows(step: int, microbatch: int = 0) -> torch.Tensor:
    """Tokens ``[4, 8]`` of all data-parallel ranks."""
    random = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randint(0, CONFIG.vocab_size, (4, 8), generator=random)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: range,
    replica: int,
    replicas: int,
    microbatches: int = 1,
) -> Iterator[tuple[float, float]]:
    """Train on the rows of ``replica``; the mean loss of its microbatches and the norm of the gradients, by step."""
    for step in steps:
        total = 0.0
        for k in range(microbatches):
            if replicas > 1:
                model.set_is_last_backward(k == microbatches - 1)
            loss = loss_of(model, rows(step, k).chunk(replicas)[replica]) / microbatches
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm


def assert_trains_like_one_process(
    model: Any,
    reference: Any,
    optimizers: list[torch.optim.Optimizer],
    steps: range,
    data: int,
    microbatches: int = 1,
) -> None:
    """Losses, norms and weights; the first ``data`` of the mesh's axes are data-parallel, other ranks are replicas."""
    replicas, replica = data, dist.get_rank() // (dist.get_world_size() // data)
    got = train(model, optimizers[0], steps, replica, replicas, microbatches)
    want = train(reference, optimizers[1], steps, 0, 1, microbatches)
    for (loss, norm), (whole_loss, whole_norm) in zip(got, want, strict=True):
        mean = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(mean)
        expected = torch.tensor([whole_loss, whole_norm], dtype=torch.float64)
        loss_and_norm = torch.tensor([mean.item() / dist.get_world_size(), norm], dtype=torch.float64)
        torch.testing.assert_close(loss_and_norm, expected, **EXACT)
    named = dict(reference.named_parameters())
    assert list(named) == [name for name, _ in model.named_parameters()]
    for name, param in model.named_parameters():
        assert param.shape == named[name].shape
        torch.testing.assert_close(torch_impl.full_tensor(param).detach(), named[name].detach(), **EXACT)
