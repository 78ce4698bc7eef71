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
from torch_impl.optimizer.moments import MomentFormat

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
    expected, losses = (
        train(plain, STOCK[name](plain.parameters())),
        train(model, STOCK[name](model.parameters())),
    )
    assert losses == expected
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
SPACINGS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4}
"""Half the distance between neighbouring stored numbers, as part of them."""
LOW: dict[str, Build] = {
    f"{optimizer_class.__name__} {str(dtype).removeprefix('torch.')}": (
        lambda params, optimizer_class=optimizer_class, keys=keys, dtype=dtype: optimizer_class(
            params,
            lr=1e-2,
            **dict.fromkeys(keys, dtype),
            **({"momentum": 0.9} if optimizer_class is MainWeightSGD else {}),
        )
    )
    for optimizer_class, keys in (
        (MainWeightAdamW, ("exp_avg_dtype", "exp_avg_sq_dtype")),
        (MainWeightSGD, ("momentum_dtype",)),
        (MainWeightMuon, ("momentum_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
    )
    for dtype in (torch.bfloat16, torch.float16, F8)
}


Update = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def stepped(build: Build, device: str, main: torch.dtype) -> Update:
    """Weights and state after three updates by given gradients."""
    random = torch.Generator().manual_seed(3)
    shapes = ((96, 64), (64, 33), (50,))
    params = [nn.Parameter(torch.randn(shape, generator=random).to(device, main)) for shape in shapes]
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
def test_bfloat16_weights_and_moments_have_the_bits_of_torchs_fused_kernel() -> None:
    half: dict[str, Any] = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    weights, state = stepped(lambda params: MainWeightAdamW(params, lr=1e-2, **half), DEVICE, torch.bfloat16)
    expected, its_state = stepped(
        lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True), DEVICE, torch.bfloat16
    )
    assert same_bits(weights, expected)
    moments = [key for key in its_state if not key.endswith("step")]
    assert same_bits([state[key] for key in moments], [its_state[key] for key in moments])


@needs_device
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOW)
def test_moments_of_few_bits_are_those_of_the_cpu_but_for_roundings(name: str, main: torch.dtype) -> None:
    """An element that lies between two stored numbers may fall to either: kernels round sums in another order.

    Of bfloat16 gradients 3 % lie so near the middle, since torch's CUDA kernel of AdamW takes 1 - b1 in float32.
    """
    weights, state = stepped(LOW[name], DEVICE, main)
    expected, its_state = stepped(LOW[name], "cpu", main)
    spacing = next(size for dtype, size in SPACINGS.items() if dtype in name)
    # A moment in the next stored number moves a weight by that part of the learning rate. Muon multiplies in bfloat16.
    moved = 1e-2 * (0.1 if "Muon" in name else 2 * spacing)
    for mine, want in zip(weights, expected, strict=True):
        rounding = 2.0**-7 if main == torch.bfloat16 else 1e-6
        torch.testing.assert_close(mine.float(), want.float(), rtol=rounding, atol=moved)
    assert state.keys() == its_state.keys()
    for key, mine in state.items():
        want = its_state[key]
        assert (mine.dtype, mine.shape) == (want.dtype, want.shape)
        if mine.dtype == torch.float32:
            torch.testing.assert_close(mine, want, rtol=2 * spacing, atol=1e-6)
            continue
        unlike = (bits_of(mine) != bits_of(want)).float().mean().item()
        print(f"{key}: {unlike:.2%} of the elements have other bits")
        assert unlike < 0.05
        # Of the largest number of the row, since an earlier sum may have been larger than what is left of it.
        largest = want.float().abs().amax(-1, keepdim=True)
        assert bool(((mine.float() - want.float()).abs() <= 2 * spacing * largest).all())


@needs_device
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F8, torch.float8_e5m2])
def test_a_moment_is_stored_with_the_bits_of_the_cpu(dtype: torch.dtype, positive: bool) -> None:
    random = torch.Generator().manual_seed(9)
    # Of few bits, so that many lie in the middle between two stored numbers.
    powers = 2.0 ** torch.randint(-9, 3, (128, 1), generator=random)
    values = torch.randn(128, 96, generator=random).bfloat16().float() * powers
    values = values.abs() if positive else values
    moment_format = MomentFormat("moment", dtype, positive=positive)
    encoded = []
    for device in (DEVICE, "cpu"):
        stored = moment_format.zeros(nn.Parameter(values.to(device)), on_host=False)
        moment_format.encode(values.clone().to(device), stored["moment"], stored.get("moment_scale"), 3, 5)
        encoded.append(list(stored.values()))
    assert same_bits(*encoded)


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
        dtypes: dict[str, Any] = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        return params, MainWeightAdamW(params, lr=rate, capturable=True, **dtypes)

    plain, its = build()
    grads = random_steps(plain, 5)
    for step_grads in grads:
        for param, grad in zip(plain, step_grads, strict=True):
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
    for step_grads in grads[1:]:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad.copy_(grad)
        graph.replay()
    torch.cuda.synchronize()
    assert optimizer.state[params[0]]["step"].item() == 5
    for param, want in zip(params, plain, strict=True):
        assert torch.equal(param, want)


@needs_device
def test_norms_of_gradients_are_clipped_on_the_device(one_rank: None) -> None:
    plain, model = network(), sharded()
    for module in (plain, model):
        (module(torch.ones(4, 128, device=DEVICE)).square().sum()).backward()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm.full_tensor(), want)
    assert norm.device.type == DEVICE
