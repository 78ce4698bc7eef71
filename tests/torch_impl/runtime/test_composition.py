"""Further mesh axes beside the data-parallel ones: tensor parallelism and expert parallelism, on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import assert_same_gradients, assert_same_weights, seeded, whole
from tests.support.torch_impl.zoo import named
from torch_impl.dtensor.local import local_of

WORLD = 4
WIDTH = 6


class Mlp(nn.Module):
    """Cut by columns, then by rows, as tensor parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chained(Mlp):
    """Without the sum, whose parts tensor parallelism would place differently."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def stack() -> nn.Sequential:
    return named(blocks=nn.Sequential(Mlp(), Mlp()), head=nn.Linear(WIDTH, 1))


def inputs_of(replica: int, step: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + replica))


def tensor_parallel_stack(mesh: DeviceMesh, *data_axes: str, **options: Any) -> nn.Sequential:
    model = seeded(stack)
    assert mesh.mesh_dim_names is not None
    data, others = mesh[data_axes], mesh[mesh.mesh_dim_names[-1]]
    for block in model.blocks:
        parallelize_module(block, others, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        torch_impl.fully_shard(block, mesh=data, **options)
    torch_impl.fully_shard(model, mesh=data, **options)
    return model


def assert_trains_like_one_process(model: nn.Sequential, replica: int, replicas: int, fused: bool) -> None:
    reference = seeded(stack)
    if fused:
        optimizer: torch.optim.Optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(4):
        model(inputs_of(replica, step)).square().mean().backward()
        whole_batch = torch.cat([inputs_of(k, step) for k in range(replicas)])
        reference(whole_batch).square().mean().backward()
        assert_same_gradients(model, reference, rtol=1e-4, atol=1e-6)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=0)
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
    assert_same_weights(model, reference)


def tensor_parallel(strategy: str, fused: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel_stack(mesh, "dp", strategy=strategy)
    assert_trains_like_one_process(model, mesh["dp"].get_local_rank(), 2, fused)
    up = model.blocks[0].up.weight
    assert tuple(up.shape) == (10, WIDTH)
    assert up.device_mesh.mesh_dim_names == ("dp", "tp")
    return [type(placement).__name__ for placement in up.placements]


@pytest.mark.fast_cases("optim", "optim_grads_params")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_tensor_parallel_parameters_are_sharded_once_more(ranks: RankGroup, strategy: str) -> None:
    rows = "Replicate" if strategy == "no_shard" else "RowShard"
    for placements in ranks.run(WORLD, tensor_parallel, strategy, strategy != "optim"):
        assert placements == [rows, "Shard"]


@on_ranks(WORLD)
def test_gradients_that_tensor_parallelism_left_unreduced_are_summed() -> None:
    """Each tensor-parallel rank normalizes its part of the sequence, so the norm's gradients are parts of a sum."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = seeded(Chained), seeded(Chained)
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    torch_impl.fully_shard(model, mesh=mesh["dp"])
    for step in range(2):
        replicas = [inputs_of(replica, step)[:4] for replica in range(2)]
        model(replicas[mesh["dp"].get_local_rank()]).square().mean().backward()
        reference(torch.cat(replicas)).square().mean().backward()
        assert_same_gradients(model, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.fast_cases("hsdp")
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
@on_ranks(WORLD)
def test_two_data_parallel_axes_and_a_tensor_parallel_one(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("outer", "dp", "model"))
    model = tensor_parallel_stack(mesh, "outer", "dp", strategy=strategy)
    assert_trains_like_one_process(model, mesh["outer"].get_local_rank(), 2, True)


def save_tensor_parallel(path: str, plain: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel_stack(mesh, "dp")
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.1)
    model(inputs_of(mesh["dp"].get_local_rank(), 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_impl.save_checkpoint(path, model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=plain)
    weights = {name: whole(param) for name, param in model.named_parameters()}
    loss = model(inputs_of(0, 9)).square().mean()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    torch_impl.load_checkpoint(path, model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), weights[name]), name
    assert torch.equal(model(inputs_of(0, 9)).square().mean(), loss)


def load_on_data_parallel(path: str, plain: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = seeded(stack)
    torch_impl.fully_shard(model)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.1)
    torch_impl.load_checkpoint(path, model, optimizer)
    first = {name: whole(param) for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=plain)
    second = {name: whole(param) for name, param in model.named_parameters()}
    model(inputs_of(0, 1)).square().mean().backward()
    optimizer.step()
    return first, second


@pytest.mark.slow
def test_checkpoints_move_between_tensor_parallel_and_data_parallel(ranks: RankGroup, tmp_path: Path) -> None:
    ours, plain = str(tmp_path / "ours"), str(tmp_path / "plain")
    ranks.run(WORLD, save_tensor_parallel, ours, plain)
    first, second = ranks.run(3, load_on_data_parallel, ours, plain)[0]
    untrained = dict(seeded(stack).named_parameters())
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert not torch.equal(value, untrained[name].detach()), name


def refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    wrong = init_device_mesh("cpu", (2, 2), mesh_dim_names=("columns", "dp"))

    def linear(placement: Any, on: DeviceMesh) -> nn.Linear:
        module = nn.Linear(4, 4, bias=False)
        tensor = distribute_tensor(module.weight.detach(), on, [Replicate()])
        if isinstance(placement, Partial):
            tensor = torch.distributed.tensor.DTensor.from_local(tensor.to_local(), on, [placement])
        else:
            tensor = tensor.redistribute(on, [placement])
        module.weight = nn.Parameter(tensor)
        return module

    for module, data, reason in (
        (linear(Shard(0), alone), mesh["dp"], "parts of one named mesh"),
        (linear(Shard(0), wrong["columns"]), wrong["dp"], "data-parallel axes first"),
        (linear(Shard(0), mesh["dp"]), mesh["tp"], "axis 'tp' is named for model parallelism"),
        (linear(Shard(0), mesh["dp"]), mesh["dp"], "parts of one named mesh"),
        (linear(Partial(), mesh["tp"]), mesh["dp"], "weight: expected a parameter placed by Shard"),
    ):
        with pytest.raises(ValueError, match=reason):
            torch_impl.fully_shard(module, mesh=data)
        assert type(module) is nn.Linear


def test_tensor_parallel_parameters_that_cannot_be_sharded_are_refused(ranks: RankGroup) -> None:
    ranks.run(WORLD, refused)


class Experts(nn.Module):
    """Two experts; every rank holds one of them, and tokens travel to the rank that holds theirs."""

    def __init__(self, group: dist.ProcessGroup | None, held: int | None) -> None:
        super().__init__()
        experts = [seeded_linear(k) for k in range(2)]
        self.experts = nn.ModuleList(experts if held is None else [experts[held]])
        self.group, self.held = group, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.held is None:
            return torch.stack([expert(part) for expert, part in zip(self.experts, x, strict=True)])
        # x: (2 experts, tokens, width) on each rank; after the exchange (2 ranks, tokens, width) of one expert.
        mine = Exchange.apply(x, self.group)
        return Exchange.apply(self.experts[0](mine), self.group)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        output = torch.empty_like(x)
        dist.all_to_all_single(output, x.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Exchange.forward(ctx, grads[0], ctx.group), None


def seeded_linear(seed: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(WIDTH, WIDTH)


class MixtureOfExperts(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None = None, held: int | None = None) -> None:
        super().__init__()
        self.first = seeded_linear(5)
        self.experts = Experts(group, held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.experts(torch.stack([x, -x])).sum(0)


@on_ranks(WORLD)
def test_experts_on_a_mesh_of_their_own_get_the_mean_over_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    held = mesh["ep"].get_local_rank()
    model = MixtureOfExperts(mesh["ep"].get_group(), held)
    reference = MixtureOfExperts()
    # An expert's gradient already sums the tokens of the ranks of its ep group; the mean is over all ranks.
    torch_impl.fully_shard(model.experts, mesh=mesh["edp"], grad_divisor=WORLD)
    torch_impl.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        model(inputs_of(dist.get_rank(), step)).square().mean().backward()
        for rank in range(WORLD):
            (reference(inputs_of(rank, step)).square().mean() / WORLD).backward()
        pairs = [(model.first, reference.first), (model.experts.experts[0], reference.experts.experts[held])]
        for ours, theirs in pairs:
            held_here = sum(local_of(param).numel() for param in ours.parameters())
            assert held_here < sum(param.numel() for param in theirs.parameters()), "nothing is sharded"
            for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-5, atol=1e-7)
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
    for ours, theirs in pairs:
        for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(whole(got), want.detach(), rtol=1e-5, atol=1e-7)
