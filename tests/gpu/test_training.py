"""The torch runtime on one GPU with NCCL against plain modules on the CPU; skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from torch_impl import MainWeightAdamW, fully_shard, load_checkpoint, save_checkpoint
from torch_impl.dtensor.local import local_of
from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = DecoderConfig(d_model=37, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=53)
STEPS = 4


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, CONFIG.vocab_size, (4, 17), generator=generator) for _ in range(STEPS)]


def train(model: Decoder, optimizer: torch.optim.Optimizer, device: str) -> list[float]:
    losses = []
    for tokens in batches():
        tokens = tokens.to(device)
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(strategy: str, offload: bool) -> tuple[Decoder, MainWeightAdamW]:
    model = Decoder(CONFIG)
    model.init_weights(5)
    model.cuda()
    policy = CPUOffloadPolicy() if offload else None
    for layer in model.layers:
        fully_shard(layer, strategy=strategy, offload_policy=policy)
    fully_shard(model, strategy=strategy, offload_policy=policy)
    for param in model.parameters():
        assert local_of(param).is_pinned() == offload
    return model, MainWeightAdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_training_on_a_gpu_follows_the_cpu_and_survives_a_checkpoint(
    nccl: None, tmp_path: Path, strategy: str, offload: bool
) -> None:
    reference = Decoder(CONFIG)
    reference.init_weights(5)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True), "cpu")
    model, optimizer = sharded(strategy, offload)
    assert train(model, optimizer, "cuda") == pytest.approx(expected, rel=1e-4)
    save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    continued, other = sharded(strategy, offload)
    load_checkpoint(tmp_path / "checkpoint", continued, other)
    assert train(continued, other, "cuda") == pytest.approx(train(model, optimizer, "cuda"), rel=1e-6)
