"""What programs do with sharded modules, on one GPU beside plain modules there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_impl
from tests.gpu.devices import DEVICE, ON_GPU, busy, needs_device, needs_gpu
from tests.gpu.networks import (
    LAYERS,
    WIDTH,
    Network,
    adamw,
    bytes_of,
    loss_of,
    network,
    rows,
    same_bits,
    sharded,
    train,
    values,
)
from torch_impl.dtensor.local import local_of

pytestmark = needs_device


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    grads = []
    for param in model.parameters():
        grad = param.grad
        grads.append(None if grad is None else local_of(grad).cpu())
    return grads


def assert_gradients_alike(model: nn.Module, plain: nn.Module) -> None:
    for mine, want in zip(gradients(model), gradients(plain), strict=True):
        assert (mine is None) == (want is None)
        if mine is not None:
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", ["every", "last", "no_sync"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_gradients_of_microbatches_add_up(one_rank: None, strategy: str, how: str) -> None:
    plain, model = network(), sharded(strategy=strategy)
    for number in range(3):
        if how == "last":
            model.set_is_last_backward(number == 2)
        elif how == "no_sync":
            model.set_requires_gradient_sync(number == 2)
        for module in (plain, model):
            (loss_of(module, rows(number)) / 3).backward()
    assert_gradients_alike(model, plain)


def test_parameters_that_no_rank_used_have_no_gradient(one_rank: None) -> None:
    plain, model = network(), sharded()
    for module in (plain, model):
        module.skipped, module.layers[2].half = frozenset({1}), True
        loss_of(module, rows(0)).backward()
    assert_gradients_alike(model, plain)
    assert [param.grad for param in model.layers[1].parameters()] == [None] * 3
    assert model.layers[2].down.weight.grad is None
    assert model.layers[2].up.weight.grad is not None


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_a_loss_multiplies_by_weights_that_are_kept_after_forward(
    one_rank: None, options: dict[str, Any]
) -> None:
    plain, model = network(), sharded(**options)
    for step in range(3):
        for module in (plain, model):
            module.whole = False
            hidden = module(rows(step))
            F.linear(hidden, module.output.weight).square().mean().backward()
        assert_gradients_alike(model, plain)
    assert all(hasattr(param, "full_tensor") for param in model.parameters())


class Fused(torch.autograd.Function):
    """A product whose backward writes the weight's gradient to ``main_grad``, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        param = ctx.weight
        product = (grads[0].t() @ x).to(param.main_grad.dtype)
        if param.overwrite_main_grad and not param.grad_added_to_main_grad:
            param.main_grad.copy_(product)
        else:
            param.main_grad.add_(product)
        param.grad_added_to_main_grad = True
        return grads[0] @ weight, None


class FusedLinear(nn.Linear):
    fused = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Fused.apply(x, self.weight) + self.bias if self.fused else super().forward(x)


class FusedNetwork(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(8)
            self.layers = nn.ModuleList(FusedLinear(WIDTH, WIDTH) for _ in range(LAYERS))
        for layer in self.layers:
            layer.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def pressure() -> None:
    """Memory of the allocator's, filled with NaN: what is read too late shows it."""
    for _ in range(12):
        torch.full((WIDTH, WIDTH), float("nan"), device=DEVICE)


def under_pressure(model: nn.Module, pressed: bool, steps: int = 10) -> list[float]:
    optimizer, losses = adamw(model), []
    for step in range(steps):
        if pressed:
            pressure()
        loss = loss_of(model, rows(step))
        if pressed:
            pressure()
        loss.backward()
        if pressed:
            pressure()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_main_gradients_that_kernels_write_are_those_of_autograd(one_rank: None) -> None:
    """Also where other memory is taken and let go all the time."""
    plain = FusedNetwork(fused=False).to(DEVICE)
    expected = under_pressure(plain, pressed=False)
    for pressed in (False, True):
        model = sharded(FusedNetwork(fused=True).to(DEVICE))
        model.set_main_gradients(True)
        torch.testing.assert_close(under_pressure(model, pressed), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_memory_that_units_use_in_turn_never_changes_a_result(
    one_rank: None, strategy: str, pool: bool
) -> None:
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    runs = []
    for pressed in (False, True):
        model = sharded(strategy=strategy, mp_policy=policy)
        model.set_buffer_pool(pool)
        runs.append(under_pressure(model, pressed))
        assert (model.buffer_plan() is not None) == pool
    assert runs[0] == runs[1]


class Chain(nn.Module):
    """Roots one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(network() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def test_roots_that_share_their_streams_train_as_one_model(one_rank: None) -> None:
    plain, model = Chain(), Chain()
    for stage in model.stages:
        sharded(stage)
    torch_impl.share_comm_ctx(list(model.stages))
    assert train(model, adamw(model)) == train(plain, adamw(plain))
    assert same_bits(values(model), values(plain))


def test_setters_of_prefetching_change_no_result(one_rank: None) -> None:
    plain, model = sharded(), sharded(prefetch=0)
    for number in range(LAYERS - 1):
        model.layers[number].set_modules_to_forward_prefetch([model.layers[number + 1]])
        model.layers[number + 1].set_modules_to_backward_prefetch([model.layers[number]])
    assert train(model, adamw(model)) == train(plain, adamw(plain))


@needs_gpu
@pytest.mark.parametrize("own", [False, True])
def test_a_hook_changes_reduced_gradients_on_its_stream(one_rank: None, own: bool) -> None:
    """After the reduction, before what reads the gradient, though the hook's stream is busy."""
    plain, model = network(), sharded()
    stream = torch.cuda.Stream() if own else None
    streams: list[int] = []

    def hook(sums: torch.Tensor) -> None:
        streams.append(torch.cuda.current_stream().cuda_stream)
        busy(20)
        sums.mul_(2)

    for layer in model.layers:
        layer.set_all_reduce_hook(hook, stream=stream)
    for module in (plain, model):
        loss_of(module, rows(0)).backward()
    for mine, want in zip(model.layers.parameters(), plain.layers.parameters(), strict=True):
        torch.testing.assert_close(local_of(mine.grad), 2 * want.grad, rtol=1e-5, atol=1e-7)
    assert torch.equal(local_of(model.output.weight.grad), plain.output.weight.grad)
    assert len(streams) == LAYERS
    if stream is not None:
        assert set(streams) == {stream.cuda_stream}
    else:
        assert torch.cuda.current_stream().cuda_stream not in streams


def test_a_model_from_the_meta_device_gets_its_memory_on_the_device(one_rank: None) -> None:
    with torch.device("meta"):
        model = Network()
    sharded(model)
    model.to_empty(device=DEVICE)
    plain = network()
    model.load_state_dict({name: value.detach() for name, value in plain.state_dict().items()})
    assert {param.device.type for param in model.parameters()} == {DEVICE}
    assert train(model, adamw(model)) == train(plain, adamw(plain))


def test_diagnostics_read_a_device(one_rank: None) -> None:
    model = sharded()
    optimizer = adamw(model)
    with torch_impl.watch_nonfinite_outputs(model) as nonfinite:
        loss_of(model, rows(0)).backward()
    assert not nonfinite
    norms = torch_impl.parameter_norms(model)
    for name, value in network().named_parameters():
        assert norms[name] == pytest.approx(value.norm().item(), rel=1e-5)
    optimizer.step()
    assert torch_impl.memory_overlaps(model, optimizer) == ()
    assert torch_impl.find_nonfinite(model) == ()
    with torch.no_grad():
        local_of(model.layers[2].up.weight)[3, 4] = float("nan")
    assert "layers.2.up.weight" in str(torch_impl.find_nonfinite(model))
    report = model.memory_report(optimizer)
    own = sum(local_of(param).nbytes for param in model.parameters())
    assert report.main_weights - report.padding == own
    assert report.moments == 2 * own
    assert bytes_of(local_of(model.output.weight)).numel() == 4 * WIDTH * WIDTH
    if ON_GPU:
        assert torch.cuda.memory_allocated() >= report.total
