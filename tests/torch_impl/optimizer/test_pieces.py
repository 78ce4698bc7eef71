"""Updates in pieces: the same bits however tensors are cut, and memory for one chunk beside what is there at rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.bench.torch_memory import live_bytes
from torch_impl import MainWeightAdamW
from torch_impl.optimizer import update

FORMATS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
# Rows of odd length, rows longer than a chunk, a stack, a vector with elements after its last whole vector register.
SHAPES = [(7, 331), (3, 4001), (40, 1), (2, 9, 48), (1003,), ()]


def trained(dtype: torch.dtype, grad_dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Weights, and all tensors of the state, after three steps."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = MainWeightAdamW(weights, lr=3e-2, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, **options)
    for weight in weights:
        weight.grad_dtype = grad_dtype
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(grad_dtype)
        optimizer.step()
    return [tensor for weight in weights for tensor in (weight.detach(), *optimizer.state[weight].values())]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, *FORMATS])
def test_the_bits_are_the_same_however_tensors_are_cut(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fraction: float
) -> None:
    whole = trained(dtype, torch.bfloat16)
    for size in (16, 100, 3000):
        monkeypatch.setattr(update, "CHUNK", size)
        for tensor, other in zip(
            trained(dtype, torch.bfloat16, offload_fraction=fraction), whole, strict=True
        ):
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def test_tensors_with_gaps_are_updated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "CHUNK", 16)
    apart, dense = nn.Parameter(torch.ones(6, 8).T), nn.Parameter(torch.ones(8, 6))
    for weight in (apart, dense):
        optimizer = MainWeightAdamW([weight], exp_avg_dtype=torch.bfloat16)
        weight.grad = torch.arange(48.0).view(8, 6)
        optimizer.step()
    assert torch.equal(apart, dense)


def peak_beyond_rest(numel: int, dtype: torch.dtype) -> int:
    def build() -> Callable[[], Any]:
        weights = [nn.Parameter(torch.ones(numel // 1024, 256)) for _ in range(4)]
        optimizer = MainWeightAdamW(weights, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        return optimizer.step

    live = live_bytes(build, torch.device("cpu"))
    return live.peak - live.rest


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
def test_an_update_needs_memory_for_one_chunk_whatever_the_size(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(update, "CHUNK", 1 << 16)
    small, large = peak_beyond_rest(1 << 18, dtype), peak_beyond_rest(1 << 20, dtype)
    # Two moments in float32, and while one of them is encoded three more arrays of its size.
    assert large <= 20 * update.CHUNK + 64 * 1024
    assert abs(large - small) < 16 * 1024
