"""On one GPU ``torch_impl`` beside stock ``torch.distributed.fsdp``: the same bits, in no more memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

import torch_impl
from tests.gpu.devices import needs_device, needs_gpu
from tests.gpu.networks import adamw, loss_of, network, rows, same_bits, sharded, train, values

HALF = torch.bfloat16
POLICIES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "float32": (torch.float32, {}, {}),
    "bfloat16 over float32": (torch.float32, {"param_dtype": HALF, "reduce_dtype": torch.float32}, {}),
    "bfloat16 as given": (HALF, {"reduce_dtype": torch.float32}, {"main_dtype": None}),
}


def engine(ours: bool, precision: str, **sizes: int) -> torch.nn.Module:
    dtype, options, of_ours = POLICIES[precision]
    if ours:
        policy: Any = torch_impl.MixedPrecisionPolicy(**options, **of_ours)
        return sharded(network(dtype, **sizes), mp_policy=policy)
    policy = fsdp.MixedPrecisionPolicy(**options)
    return sharded(network(dtype, **sizes), fsdp.fully_shard, mp_policy=policy)


@needs_device
@pytest.mark.parametrize("precision", POLICIES)
def test_losses_and_weights_have_the_bits_of_fsdp2(one_rank: None, precision: str) -> None:
    runs = []
    for ours in (True, False):
        model = engine(ours, precision)
        losses = train(model, adamw(model), dtype=POLICIES[precision][0])
        runs.append((losses, values(model)))
    (losses, weights), (its_losses, its_weights) = runs
    assert losses == its_losses
    assert same_bits(weights, its_weights)


def peak_of(build: Callable[[], torch.nn.Module], width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes at rest after two steps, and at most in the third, above what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = build()
    optimizer = adamw(model)
    for step in range(3):
        torch.cuda.synchronize()
        rest = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        loss_of(model, rows(step, 64, width, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return rest, torch.cuda.max_memory_allocated() - before


@needs_gpu
@pytest.mark.parametrize("precision", ["bfloat16 over float32", "bfloat16 as given"])
def test_a_step_in_bfloat16_needs_no_more_memory_than_in_fsdp2(one_rank: None, precision: str) -> None:
    width, dtype = 2048, POLICIES[precision][0]
    # The libraries' workspaces are taken once.
    peak_of(lambda: engine(True, precision, width=width, layers=1), width, dtype)
    mine, theirs = (
        peak_of(lambda ours=ours: engine(ours, precision, width=width, layers=6), width, dtype)
        for ours in (True, False)
    )
    print(f"{precision}: at rest {mine[0]:,} and {theirs[0]:,} B, peak {mine[1]:,} and {theirs[1]:,} B")
    assert mine[0] <= 1.005 * theirs[0]
    assert mine[1] <= 1.005 * theirs[1]


@needs_gpu
def test_memory_goes_with_the_model(one_rank: None) -> None:
    # The libraries' workspaces are taken once.
    loss_of(network(width=1024), rows(0, 64, 1024)).backward()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = engine(True, "bfloat16 over float32", width=1024)
    optimizer = adamw(model)
    loss_of(model, rows(0, 64, 1024)).backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 8 * 2**20
