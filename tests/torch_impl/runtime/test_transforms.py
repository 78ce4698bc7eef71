"""Derivatives of derivatives and transforms of ``torch.func`` over units: as on one process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad, functional
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.zoo import Chain

Loss = Callable[[nn.Module, int, int], torch.Tensor]


class Layer(nn.Module):
    """Curved in its input and its weights; ``mixing`` is no module's but its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(5), nn.Linear(5, 7)
        self.mixing = nn.Parameter(torch.randn(7, 5) * 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.up(self.norm(x))) @ self.mixing


def field() -> Chain:
    """The last layer is linear: its backward reads weights and no activations."""
    return Chain(Layer(), Layer(), nn.Linear(5, 5), output=nn.Linear(5, 3))


def points(rank: int, step: int, offset: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * offset + 10 * step + rank)
    return torch.randn(4, 5, generator=random, dtype=torch.float64)


def energy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(energy(model, x), x, create_graph=True)
    return gradient


def func_grad(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    gradient = torch.func.grad(lambda x: energy(model, x))(points(rank, step))
    return (model(points(rank, step))[:, :1] - gradient).square().mean()


def late_vjp(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    output, pull = torch.func.vjp(model, points(rank, step))
    other = model(points(rank, step, 1))
    return (pull(other.detach())[0]).square().mean() + output.mean()


def vmapped(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return torch.vmap(lambda x: model(x[None])[0])(points(rank, step)).square().mean()


def vmapped_gradients(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    per_row = torch.vmap(torch.func.grad(lambda x: energy(model, x[None])))
    return per_row(points(rank, step)).square().mean()


def directional(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    output, tangent = torch.func.jvp(model, (points(rank, step),), (points(rank, step, 1),))
    return (output - 0.3 * tangent).square().mean()


def tangent_alone(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return torch.func.jvp(model, (points(rank, step),), (points(rank, step, 1),))[1].square().mean()


def reverse_jacobian(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return torch.func.jacrev(model)(points(rank, step)[0]).square().mean()


def forward_jacobian(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return torch.func.jacfwd(model)(points(rank, step)[0]).square().mean()


def func_hessian(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return torch.func.hessian(lambda x: energy(model, x))(points(rank, step)[0]).square().mean()


def nested_grad(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inner = torch.func.grad(lambda x: energy(model, x))
    return torch.func.grad(lambda x: inner(x).square().sum())(points(rank, step)).square().mean()


def grad_of_jvp(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    direction = points(rank, step, 1)
    along = torch.func.grad(lambda x: torch.func.jvp(model, (x,), (direction,))[1].square().sum())
    return along(points(rank, step)).square().mean()


def dual_numbers(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(points(rank, step), points(rank, step, 1)))
        tangent = forward_ad.unpack_dual(output).tangent
    return tangent.square().mean()


def penalty(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = points(rank, step).requires_grad_()
    return (slope(model, x).norm(dim=1) - 1).square().mean()


def adversary(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Three calls in one backward, of which one was differentiated before the last."""
    real = model(points(rank, step, 1))
    term = penalty(model, rank, step)
    return real.mean() - model(points(rank, step, 2)).square().mean() + term


def third_derivative(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = points(rank, step).requires_grad_()
    (second,) = torch.autograd.grad(slope(model, x).square().sum(), x, create_graph=True)
    return second.square().mean()


def laplacian(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = points(rank, step).requires_grad_()
    first = slope(model, x)
    columns = [torch.autograd.grad(first[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(2)]
    return sum(columns, torch.zeros(())).square().mean()


def hessian_product(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    direction = points(rank, step, 1)
    return functional.hvp(lambda x: energy(model, x), points(rank, step), direction, create_graph=True)[
        1
    ].mean()


def vectorized_jacobian(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    jacobian = functional.jacobian(model, points(rank, step)[0], create_graph=True, vectorize=True)
    return jacobian.square().mean()


def batched_gradients(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = points(rank, step).requires_grad_()
    output = model(x)
    weights = torch.stack([torch.ones_like(output), torch.full_like(output, 2.0)])
    (gradient,) = torch.autograd.grad(output, x, weights, is_grads_batched=True, create_graph=True)
    return gradient.square().mean()


def recomputed_penalty(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = points(rank, step).requires_grad_()
    (gradient,) = torch.autograd.grad(
        checkpoint(lambda x: energy(model, x), x, use_reentrant=False), x, create_graph=True
    )
    return gradient.square().mean()


def now_and_then(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A penalty of the fifth step only."""
    loss = energy(model, points(rank, step))
    return loss + penalty(model, rank, step) if step == 4 else loss


@dataclass
class Sample:
    """What no search for inputs looks into."""

    x: torch.Tensor


class Unpacking(nn.Module):
    def __init__(self, field: nn.Module) -> None:
        super().__init__()
        self.layers, self.output = field.layers, field.output

    def forward(self, x: torch.Tensor | Sample) -> torch.Tensor:
        x = x.x if isinstance(x, Sample) else x
        for layer in self.layers:
            x = layer(x)
        return torch.sin(self.output(x))


def penalty_of_hidden_input(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = points(rank, step).requires_grad_()
    output = model(Sample(x))
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return gradient.square().mean()


class Projections(nn.Module):
    """A model of operators that have a rule for ``autograd.functional``'s own batches."""

    def __init__(self, field: nn.Module) -> None:
        super().__init__()
        self.layers, self.output = field.layers[2:], field.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return torch.sin(self.output(x))


def batched_tangents(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The forward runs on a batch of tangents, whose wrappers hide their graphs."""
    jacobian = functional.jacobian(model, points(rank, step), strategy="forward-mode", vectorize=True)
    return jacobian.square().mean()


LOSSES: Sequence[Loss] = (
    func_grad,
    late_vjp,
    vmapped,
    vmapped_gradients,
    directional,
    tangent_alone,
    reverse_jacobian,
    forward_jacobian,
    func_hessian,
    nested_grad,
    grad_of_jvp,
    dual_numbers,
    penalty,
    adversary,
    third_derivative,
    laplacian,
    hessian_product,
    vectorized_jacobian,
    batched_gradients,
    recomputed_penalty,
)


def made(build: type[nn.Module], **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build(**options).double()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Also of a model that is not sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(model: nn.Module, loss_of: Loss, ranks: Sequence[int], steps: int) -> list[torch.Tensor]:
    """Losses and norms before clipping, on the data of all ``ranks``, and the weights after the last step."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.3), []
    for step in range(steps):
        loss = sum((loss_of(model, rank, step) for rank in ranks), torch.zeros(())) / len(ranks)
        loss.backward()
        # Named anew, as a program does that reads what modules show after a backward.
        norm = nn.utils.clip_grad_norm_([param for _, param in model.named_parameters()], 0.05)
        seen += [loss.detach().clone(), whole(norm)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(whole(param) for param in model.parameters())]


def exact(
    loss_of: Loss,
    options: dict[str, Any],
    inner: bool,
    build: Callable[..., nn.Module] = field,
    steps: int = 2,
) -> None:
    world, model = dist.get_world_size(), made(field)
    options = dict(options)
    recompute, keep = options.pop("recompute", False), options.pop("keep_after_backward", False)
    model.recompute = False if recompute else None
    model = model if build is field else build(model)
    expected_model = made(field)
    expected_model.recompute = False if recompute else None
    expected = trained(
        expected_model if build is field else build(expected_model), loss_of, range(world), steps
    )
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", options["mesh"])
    for layer in model.layers if inner else ():
        torch_impl.fully_shard(layer, **options)
    torch_impl.fully_shard(model, **options)
    if keep:
        model.set_reshard_after_backward(False)
    tensors = trained(model, loss_of, [dist.get_rank()], steps)
    for index in range(0, 2 * steps, 2):
        dist.all_reduce(tensors[index])
        tensors[index] /= world
    for have, want in zip(tensors, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss_of", LOSSES)
def test_derivatives_are_those_of_one_process(ranks: RankGroup, loss_of: Loss) -> None:
    ranks.run(2, exact, loss_of, {}, True)


@pytest.mark.parametrize("loss_of", [vmapped, directional])
def test_the_gradients_of_a_single_unit_are_clipped_after_transforms(ranks: RankGroup, loss_of: Loss) -> None:
    ranks.run(2, exact, loss_of, {}, False)


def test_a_gradient_that_leaves_a_unit_unseen_keeps_its_weights(ranks: RankGroup) -> None:
    ranks.run(2, exact, penalty_of_hidden_input, {}, True, Unpacking)


def test_a_forward_on_batched_tangents(ranks: RankGroup) -> None:
    ranks.run(2, exact, batched_tangents, {}, True, Projections)


@pytest.mark.parametrize("loss_of", [third_derivative, now_and_then])
def test_units_do_not_share_memory_in_derivatives_of_derivatives(ranks: RankGroup, loss_of: Loss) -> None:
    # After some steps that were alike, units would use memory by turns.
    ranks.run(2, exact, loss_of, {"prefetch": 0}, True, field, 6)


def test_a_penalty_over_recomputed_units(ranks: RankGroup) -> None:
    ranks.run(2, exact, penalty, {"recompute": True}, True)


@pytest.mark.slow
@pytest.mark.parametrize("loss_of", LOSSES)
def test_derivatives_with_all_strategies_and_worlds(ranks: RankGroup, loss_of: Loss) -> None:
    flat: list[dict[str, Any]] = [
        *({"strategy": name} for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
        {"reshard_after_forward": True, "prefetch": 0},
        {"reshard_after_forward": False},
        {"keep_after_backward": True},
        {"granularity": "tensor"},
    ]
    for options in flat:
        ranks.run(2, exact, loss_of, options, True)
    ranks.run(1, exact, loss_of, {}, True)
    for strategy in ("hsdp", "hfsdp"):
        ranks.run(4, exact, loss_of, {"strategy": strategy, "mesh": (2, 2)}, True)


@on_ranks(2)
def test_what_would_run_without_the_weights_is_refused_by_name() -> None:
    model = made(field)
    for layer in model.layers:
        torch_impl.fully_shard(layer)
    torch_impl.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"unit root: torch.func.linearize.* use torch.func.jvp"):
        torch.func.linearize(model, points(dist.get_rank(), 0))
    energy(model, points(dist.get_rank(), 0)).backward()
    assert all(whole(param.grad).isfinite().all() for param in model.parameters())
