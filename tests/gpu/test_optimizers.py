"""Optimizers on one GPU: stock ones on sharded parameters, and those of main weights beside the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.devices import DEVICE, needs_device, needs_gpu
from tests.gpu.networks import network, same_bits, sharded, train, values
from torch_impl import MainWeightAdamW, MainWeightMuon, MainWeightSGD

Build = Callable[..., torch.optim.Optimizer]
STOCK: dict[str, Build] = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "foreach AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "fused Adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, fused=True),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "foreach SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


@needs_device
@pytest.mark.parametrize("name", STOCK)
def test_a_stock_optimizer_has_the_bits_that_it_has_on_plain_parameters(one_rank: None, name: str) -> None:
    plain, model = network(), sharded()
    expected, found = (
        train(plain, STOCK[name](plain.parameters())),
        train(model, STOCK[name](model.parameters())),
    )
    assert found == expected
    assert same_bits(values(model), values(plain))


@needs_device
@pytest.mark.parametrize("decoupled", [True, False])
def test_main_weight_adamw_has_the_bits_of_torchs_fused_kernel(one_rank: None, decoupled: bool) -> None:
    stock = torch.optim.AdamW if decoupled else torch.optim.Adam
    plain, model = network(), sharded()
    expected = train(plain, stock(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True))
    optimizer = MainWeightAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, adam_w_mode=decoupled)
    assert train(model, optimizer) == expected
    assert same_bits(values(model), values(plain))


@needs_device
def test_main_weight_sgd_has_the_bits_of_torchs(one_rank: None) -> None:
    plain, model = network(), sharded()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=True))
    assert train(model, MainWeightSGD(model.parameters(), lr=0.1, momentum=0.9)) == expected
    assert same_bits(values(model), values(plain))


F8 = torch.float8_e4m3fn
LOW: dict[str, Build] = {
    f"{kind.__name__} {str(dtype).removeprefix('torch.')}": (
        lambda params, kind=kind, keys=keys, dtype=dtype: kind(
            params,
            lr=1e-2,
            **dict.fromkeys(keys, dtype),
            **({"momentum": 0.9} if kind is MainWeightSGD else {}),
        )
    )
    for kind, keys in (
        (MainWeightAdamW, ("exp_avg_dtype", "exp_avg_sq_dtype")),
        (MainWeightSGD, ("momentum_dtype",)),
        (MainWeightMuon, ("momentum_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
    )
    for dtype in (torch.bfloat16, torch.float16, F8)
}


def stepped(
    build: Build, device: str, main: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and state after three updates by given gradients."""
    random = torch.Generator().manual_seed(3)
    params = [
        nn.Parameter(torch.randn(shape, generator=random).to(device, main))
        for shape in ((96, 64), (64, 33), (50,))
    ]
    optimizer = build(params)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=random).to(device, main)
        optimizer.step()
    state = {
        f"{number} {key}": value.detach().cpu()
        for number, param in enumerate(params)
        for key, value in optimizer.state[param].items()
    }
    return [param.detach().cpu() for param in params], state


@needs_device
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOW)
def test_moments_of_few_bits_are_those_of_the_cpu_but_for_roundings(name: str, main: torch.dtype) -> None:
    """Sums are rounded in another order, so that an element in thousands falls to the neighbouring number."""
    weights, state = stepped(LOW[name], DEVICE, main)
    expected, its_state = stepped(LOW[name], "cpu", main)
    # Muon multiplies matrices in bfloat16.
    step = 2.0**-7 if "Muon" in name or main == torch.bfloat16 else 2e-5
    for mine, want in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine.float(), want.float(), rtol=step, atol=step / 4)
    assert state.keys() == its_state.keys()
    for key, mine in state.items():
        want = its_state[key]
        assert (mine.dtype, mine.shape) == (want.dtype, want.shape)
        unlike = (bits_of(mine) != bits_of(want)).float().mean().item()
        assert mine.dtype == torch.float32 or unlike < 0.02, f"{key}: {unlike:.1%} of the elements differ"
        torch.testing.assert_close(mine.float(), want.float(), rtol=0.13, atol=1e-2)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize])


def random_steps(params: list[nn.Parameter], count: int) -> list[list[torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    return [[torch.randn(p.shape, generator=random).to(p.device) for p in params] for _ in range(count)]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_replays_a_capturable_step(dtype: torch.dtype) -> None:
    def build() -> tuple[list[nn.Parameter], MainWeightAdamW]:
        random = torch.Generator("cuda").manual_seed(1)
        params = [nn.Parameter(torch.randn(64, 33, device="cuda", generator=random)) for _ in range(3)]
        rate = torch.tensor(1e-2, device="cuda")
        kinds: dict[str, Any] = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        return params, MainWeightAdamW(params, lr=rate, capturable=True, **kinds)

    plain, its = build()
    grads = random_steps(plain, 5)
    for given in grads:
        for param, grad in zip(plain, given, strict=True):
            param.grad = grad.clone()
        its.step()

    params, optimizer = build()
    for param, grad in zip(params, grads[0], strict=True):
        param.grad = grad.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    # A capture computes nothing.
    for given in grads[1:]:
        for param, grad in zip(params, given, strict=True):
            param.grad.copy_(grad)
        graph.replay()
    torch.cuda.synchronize()
    assert optimizer.state[params[0]]["step"].item() == 5
    for param, want in zip(params, plain, strict=True):
        assert torch.equal(param, want)


@needs_device
def test_norms_of_gradients_are_clipped_on_the_device(one_rank: None) -> None:
    plain, model = network(), sharded()
    for one in (plain, model):
        (one(torch.ones(4, 128, device=DEVICE)).square().sum()).backward()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    found = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(found.full_tensor(), want)
    assert found.device.type == DEVICE
