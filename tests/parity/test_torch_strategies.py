"""Every strategy trains as one process on the concatenated batch does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import (
    Toy,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    batch,
    mean_over_ranks,
    mse,
    sharded_toy,
)
from torch_impl.dtensor.local import row_range_of
from torch_impl.models import Decoder, DecoderConfig, next_token_loss

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def backwards(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, mark: bool) -> torch.Tensor:
    """Forward and backward of this rank's microbatches; returns its mean loss."""
    total = torch.zeros(())
    count = len(tokens)
    for k in range(count):
        if mark:
            model.set_is_last_backward(k == count - 1)
        loss = mse(model, tokens[k], targets[k]) / count
        loss.backward()
        total += loss.detach()
    return total


def train_against_full_batch(
    strategy: str, microbatches: int, set_to_none: bool, mark: bool, compute: str, steps: int
) -> tuple[int, int]:
    """Returns how many parameters have no rows, and how many have some, on this rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dtype = getattr(torch, compute)
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model, reference = sharded_toy(strategy=strategy, mp_policy=policy), Toy()
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    exact = dtype == torch.float32
    for step in range(steps):
        tokens, targets = batch(step, world, microbatches)
        loss = mean_over_ranks(backwards(model, tokens[rank], targets[rank], mark))
        full = reference_backward(reference, tokens, targets, dtype)
        torch.testing.assert_close(loss, full, rtol=1e-5, atol=1e-6) if exact else torch.testing.assert_close(
            loss, full, rtol=0, atol=3e-3
        )
        if exact:
            assert_same_gradients(model, reference)
        elif step == 0:
            assert_same_gradients(model, reference, rtol=3e-2, atol=3e-3)
        optimizer.step()
        expected.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        expected.zero_grad()
        assert_at_rest(model)
        if exact:
            assert_same_weights(model, reference)
    empty = [r0 == r1 for r0, r1 in (row_range_of(p) for p in model.parameters())]
    return sum(empty), len(empty) - sum(empty)


def reference_backward(
    reference: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """One process: forward and backward in ``dtype``, gradients on the float32 weights."""
    if dtype == torch.float32:
        loss = mse(reference, tokens, targets)
        loss.backward()
        return loss.detach()
    low = copy.deepcopy(reference).to(dtype)
    loss = mse(low, tokens, targets)
    loss.backward()
    for param, computed in zip(reference.parameters(), low.parameters(), strict=True):
        assert computed.grad is not None
        param.grad = computed.grad.to(param.dtype)
    return loss.detach()


@pytest.mark.fast_cases(
    "optim_grads_params-2-3-2", "no_shard-3-3-2", "optim-2-3-2", "no_shard-2-1-2", "optim_grads-3-3-2"
)
@pytest.mark.parametrize("steps", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_the_full_batch_on_one_process(
    ranks: RankGroup, strategy: str, world: int, microbatches: int, steps: int
) -> None:
    for set_to_none in (True, False):
        for mark in (True, False) if microbatches > 1 else (True,):
            rows = ranks.run(
                world, train_against_full_batch, strategy, microbatches, set_to_none, mark, "float32", steps
            )
            if world == 4 and strategy != "no_shard":
                assert any(empty for empty, _ in rows), (
                    "no rank had an empty shard: the sizes prove too little"
                )
            assert all(held for _, held in rows)


@pytest.mark.fast_cases("no_shard")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_compute_with_float32_main_weights_follows_one_process(
    ranks: RankGroup, strategy: str
) -> None:
    ranks.run(3, train_against_full_batch, strategy, 2, True, True, "bfloat16", 8)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def gradient_of_rank_numbers(strategy: str, divisor: float | None, sync: list[bool]) -> torch.Tensor:
    model = torch_impl.fully_shard(Product(), strategy=strategy, grad_divisor=divisor)
    for last in sync:
        model.set_requires_gradient_sync(last)
        model(torch.full((7,), dist.get_rank() + 1.0)).backward()
    return torch_impl.full_tensor(model.weight.grad)


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sync", [[True], [True, True], [False, True], [True, False, True]])
def test_the_gradient_is_exactly_the_mean_over_ranks(
    ranks: RankGroup, strategy: str, sync: list[bool]
) -> None:
    for world in (2, 4):
        for gradient in ranks.run(world, gradient_of_rank_numbers, strategy, None, sync):
            assert gradient.tolist() == [len(sync) * (world + 1) / 2] * 7


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_divisor_replaces_the_number_of_ranks(ranks: RankGroup, strategy: str) -> None:
    for sync in ([True], [True, False, True]):
        for gradient in ranks.run(4, gradient_of_rank_numbers, strategy, 2.0, sync):
            assert gradient.tolist() == [len(sync) * 5.0] * 7


def losses_beside_fsdp2(low: bool) -> list[tuple[float, float]]:
    from torch.distributed import fsdp

    dtype = torch.bfloat16 if low else torch.float32
    config = DecoderConfig(
        vocab_size=37, d_model=21, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=29, rope_theta=10000
    )
    ours, theirs = Decoder(config), Decoder(config)
    for model, shard, policy in (
        (ours, torch_impl.fully_shard, torch_impl.MixedPrecisionPolicy),
        (theirs, fsdp.fully_shard, fsdp.MixedPrecisionPolicy),
    ):
        model.init_weights(0)
        for module in (*model.layers, model):
            shard(module, mp_policy=policy(param_dtype=dtype, reduce_dtype=torch.float32))
    optimizers = [
        torch_impl.MainWeightAdamW(ours.parameters(), lr=1e-2),
        torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True),
    ]
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(6):
        tokens = torch.randint(0, 5, (3, 11), generator=generator)
        pair = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pair.append(mean_over_ranks(loss).item())
        losses.append((pair[0], pair[1]))
    return losses


@pytest.mark.slow
def test_losses_follow_those_of_torch_fsdp(ranks: RankGroup) -> None:
    for low, tolerance in ((False, 1e-5), (True, 1e-3)):
        losses = ranks.run(2, losses_beside_fsdp2, low)[0]
        assert losses[0][0] - losses[-1][0] > 0.1, "nothing was learned"
        for ours, theirs in losses:
            assert ours == pytest.approx(theirs, rel=tolerance)
