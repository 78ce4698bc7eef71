"""Offloaded state on CUDA, without a process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_impl import MainWeightAdamW

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def run(dtype: torch.dtype, fraction: float) -> tuple[list[nn.Parameter], MainWeightAdamW, int]:
    random = torch.Generator("cuda").manual_seed(0)
    params = [nn.Parameter(torch.randn(1024, 2048, device="cuda", generator=random)) for _ in range(24)]
    optimizer = MainWeightAdamW(
        params, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, offload_fraction=fraction
    )
    for _ in range(4):
        for param in params:
            param.grad = torch.randn(param.shape, device="cuda", generator=random)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    torch.cuda.synchronize()
    return params, optimizer, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_state_gives_the_same_bits_and_lies_in_pinned_memory(kind: torch.dtype) -> None:
    plain, its, _ = run(kind, 0.0)
    params, optimizer, extra = run(kind, 1.0)
    for param, want in zip(params, plain, strict=True):
        assert torch.equal(param, want)
        for key, value in optimizer.state[param].items():
            theirs = its.state[want][key].cpu()
            assert value.device.type == "cpu"
            assert key == "step" or value.is_pinned()
            assert torch.equal(value.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))
    # Two chunks of two moments, and what a conversion to float32 takes; the whole state would be 400 MB.
    assert extra < 2 * 2 * 2**22 * 4 + 3 * 2**22 * 4 + 2**20
