"""``torch.optim.Muon`` on matrices that lie whole on one rank, and what it says of those that do not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.toy import assert_same_weights, counted, rank_inputs, seeded, whole

WORLD = 4
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
STRATEGIES = [
    ((4,), "no_shard"),
    ((4,), "optim"),
    ((4,), "optim_grads"),
    ((4,), "optim_grads_params"),
    ((2, 2), "hsdp"),
    ((2, 2), "hfsdp"),
]


class Model(nn.Module):
    """Matrices that are wide, tall and square, of different sizes, so that ranks hold several or none."""

    def __init__(self) -> None:
        super().__init__()
        widths = (5, 16, 16, 9, 3)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def sharded(shape: tuple[int, ...], strategy: str, granularity: str = "tensor") -> Model:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    return torch_impl.fully_shard(seeded(Model), mesh=mesh, strategy=strategy, granularity=granularity)


@pytest.mark.fast_cases("shape0-no_shard", "shape3-optim_grads_params")
@pytest.mark.parametrize(("shape", "strategy"), STRATEGIES)
@on_ranks(WORLD)
def test_whole_matrices_train_as_on_one_device(shape: tuple[int, ...], strategy: str) -> None:
    model, reference = sharded(shape, strategy), seeded(Model)
    if strategy != "no_shard":
        sizes = [param.to_local().numel() for param in model.parameters()]
        assert all(size in (0, param.numel()) for size, param in zip(sizes, model.parameters(), strict=True))
    optimizer = torch.optim.Muon(model.parameters(), **OPTIONS)
    expected = torch.optim.Muon(reference.parameters(), **OPTIONS)
    for step in range(4):
        everyone = [x * (step + 1) for x in rank_inputs()]
        model(everyone[dist.get_rank()]).square().mean().backward()
        for x in everyone:
            (reference(x).square().mean() / len(everyone)).backward()
        # The bits of the last gradient decide over whole steps of bfloat16, so both optimizers get the same.
        for name, param in reference.named_parameters():
            torch.testing.assert_close(whole(model.get_parameter(name).grad), param.grad)
            param.grad = whole(model.get_parameter(name).grad)
        with counted() as counts:
            optimizer.step()
        # Of orthogonalizing, one norm a matrix is all that is communicated.
        axes = {"no_shard": 0, "hfsdp": 2}.get(strategy, 1)
        assert counts == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": axes * len(model.layers)}
        expected.step()
        for opt in (optimizer, expected):
            opt.zero_grad()
        for name, param in reference.named_parameters():
            assert torch.equal(whole(model.get_parameter(name)), param.detach()), (step, name)
    assert_same_weights(model, reference)


@on_ranks(WORLD)
def test_matrices_that_are_cut_are_refused() -> None:
    granularity = "row"
    model = sharded((4,), "optim_grads_params", granularity)
    optimizer = torch.optim.Muon(model.parameters(), **OPTIONS)
    model(rank_inputs()[dist.get_rank()]).sum().backward()
    with pytest.raises(RuntimeError, match="shard with granularity='tensor', or use MainWeightMuon"):
        optimizer.step()


@on_ranks(WORLD)
def test_products_and_transposes_of_whole_matrices() -> None:
    model, reference = sharded((4,), "optim_grads_params"), seeded(Model)
    for name, param in model.named_parameters():
        want = reference.get_parameter(name)
        assert isinstance(param, DTensor)
        for got, expected in (
            (param.t(), want.t()),
            (param.T, want.T),
            (param.transpose(-1, 0), want.transpose(-1, 0)),
            (param.permute(1, 0).contiguous(), want.permute(1, 0)),
            (param @ param.t(), want @ want.t()),
            (
                torch.addmm(param, param @ param.T, param, beta=0.5, alpha=2),
                want * 0.5 + want @ want.T @ want * 2,
            ),
            (param.bfloat16().T.float(), want.bfloat16().T.float()),
        ):
            assert got.shape == expected.shape
            torch.testing.assert_close(whole(got), expected.detach(), msg=name)
    # A write through a transposed view is seen by the next forward, for which compute weights were kept.
    model, x = sharded((4,), "optim_grads"), rank_inputs()[dist.get_rank()]
    model(x)
    with torch.no_grad():
        model.reshard()
        model.layers[1].weight.t().mul_(2)
        reference.layers[1].weight.mul_(2)
    torch.testing.assert_close(model(x), reference(x))


@on_ranks(WORLD)
def test_products_with_other_tensors_are_refused() -> None:
    """Matrices on different ranks or meshes, plain ones, and vectors have no product here."""
    model = sharded((4,), "optim_grads_params")
    first, second = model.layers[1].weight, model.layers[2].weight
    held = [sum(bound == 0 for bound in param.placements[0].bounds) for param in (first, second)]
    assert held[0] != held[1]
    elsewhere = sharded((2, 2), "hfsdp").layers[1].weight
    assert elsewhere.placements[0].bounds == first.placements[0].bounds
    for product in (
        lambda: second @ first,
        lambda: elsewhere @ first.t(),
        lambda: first @ torch.ones(16, 2),
        lambda: first @ torch.ones(16),
    ):
        with pytest.raises(RuntimeError, match=r"is not supported on .*, placed as"):
            product()


@on_ranks(WORLD)
def test_norms_answer_full_tensor() -> None:
    """Norms answer ``full_tensor()``, over several meshes and with plain gradients among them."""
    model, plain = sharded((4,), "optim_grads_params"), nn.Linear(3, 1)
    # The last one's norms are sums over two ranks, not over all four.
    others = [sharded((2, 2), strategy) for strategy in ("hfsdp", "hsdp")]
    for module in (model, *others):
        module(rank_inputs()[dist.get_rank()]).square().sum().backward()
    plain(torch.ones(2, 3)).sum().backward()
    params = [param for module in (model, *others, plain) for param in module.parameters()]
    grads = [whole(p.grad) if isinstance(p.grad, DTensor) else p.grad.clone() for p in params]
    for foreach in (False, True):
        for order in (2.0, float("inf")):
            norm = nn.utils.clip_grad_norm_(params, 1e9, norm_type=order, foreach=foreach)
            assert type(norm.full_tensor()) is torch.Tensor
            assert type(norm * 2) is torch.Tensor
            want = nn.utils.get_total_norm(grads, order)
            assert norm.item() == pytest.approx(want.item(), rel=1e-6)
    by_hand = torch.stack([p.grad.norm() for p in params]).norm()
    assert by_hand.full_tensor().item() == pytest.approx(nn.utils.get_total_norm(grads).item(), rel=1e-6)
    nn.utils.clip_grad_norm_(params, 0.1)
    now = [whole(p.grad) if isinstance(p.grad, DTensor) else p.grad for p in params]
    assert nn.utils.get_total_norm(now).item() == pytest.approx(0.1, rel=1e-4)
