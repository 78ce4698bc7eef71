"""``dp_mesh_dims``: several axes as one, and parameters that are DTensors on all axes of the mesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Toy, batch, mse, seeded, sharded_toy, whole
from tests.support.torch_impl.zoo import named

Dims = torch_impl.DataParallelMeshDims
INPUTS, HIDDEN = 5, 6


def mlp() -> nn.Sequential:
    """Of DTensors, if its parameters are; inputs and outputs are plain."""
    return seeded(
        lambda: named(up=nn.Linear(INPUTS, HIDDEN), tanh=nn.Tanh(), down=nn.Linear(HIDDEN, INPUTS)), 2
    )


def inputs(step: int) -> torch.Tensor:
    """Rows for four ranks, two each."""
    return torch.randn(8, INPUTS, generator=torch.Generator().manual_seed(step))


def trained(
    shard: Callable[..., Any], dims: Any, mesh: DeviceMesh, tp: bool, steps: int = 2
) -> tuple[list[float], nn.Sequential]:
    model = mlp()
    on = [Replicate()] * mesh.ndim
    for name, param in list(model.named_parameters()):
        placed = list(on)
        if tp:
            # Columns, then rows, on the last axis.
            placed[-1] = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}.get(
                name, Replicate()
            )
        owner, attr = model.get_submodule(name.split(".")[0]), name.split(".")[1]
        setattr(
            owner,
            attr,
            nn.Parameter(torch.distributed.tensor.distribute_tensor(param.detach(), mesh, placed)),
        )
    shard(model, mesh=mesh, dp_mesh_dims=dims)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cut = [Shard(0)] * mesh.ndim
    if tp:
        cut[-1] = Replicate()
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.distributed.tensor.distribute_tensor(inputs(step), mesh, cut)
        out = model(x)
        assert isinstance(out, DTensor)
        # A mean over this data-parallel rank's rows, whose gradients the unit averages.
        local = out.redistribute(placements=cut).to_local()
        loss = local.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def reference(steps: int = 2) -> nn.Sequential:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    return model


@on_ranks(4)
def test_parameters_on_all_axes_stay_so_in_forward() -> None:
    expected = dict(reference().named_parameters())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    cases: list[tuple[DeviceMesh, Dims, bool]] = [
        (mesh, Dims(("dp", "cp")), False),
        (mesh, Dims(shard="cp", replicate="dp"), False),
        (mesh, Dims(replicate=("dp", "cp")), False),
        (with_tp, Dims("dp"), True),
        (three, Dims(("dp", "cp")), True),
    ]
    for root, dims, tp in cases:
        losses, model = trained(torch_impl.fully_shard, dims, root, tp)
        for name, param in model.named_parameters():
            torch.testing.assert_close(whole(param), expected[name].detach(), rtol=1e-4, atol=1e-6)
        if hasattr(fsdp, "DataParallelMeshDims") and dims.shard is not None:
            theirs, stock = trained(
                fsdp.fully_shard, fsdp.DataParallelMeshDims(dims.shard, dims.replicate), root, tp
            )
            torch.testing.assert_close(losses, theirs)
            for name, param in stock.named_parameters():
                torch.testing.assert_close(param.full_tensor(), expected[name].detach(), rtol=1e-4, atol=1e-6)
    model = mlp()
    cut = torch.distributed.tensor.distribute_tensor(model.up.weight.detach(), mesh, [Shard(0), Replicate()])
    model.up.weight = nn.Parameter(cut)
    with pytest.raises(
        ValueError, match=r"up.weight: expected Replicate\(\) on axis 'dp', which dp_mesh_dims"
    ):
        torch_impl.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))


@on_ranks(4)
def test_several_axes_are_one() -> None:
    """Plain parameters; on three axes the outer one replicates and the two others are one."""
    cases = [
        (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "cp")),
            Dims(("shard", "cp")),
            ("shard_cp",),
        ),
        (
            init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("copies", "shard", "cp")),
            Dims(("shard", "cp"), "copies"),
            ("copies", "shard_cp"),
        ),
    ]
    for mesh, dims, names in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = sharded_toy(mesh=mesh, dp_mesh_dims=dims)
        plain = Toy()
        assert model.embed.weight.device_mesh.mesh_dim_names == names
        tokens, targets = batch(0, 4, 1)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain)]
        mse(plain, tokens, targets).backward()
        mse(model, tokens[dist.get_rank()], targets[dist.get_rank()]).backward()
        for optimizer in optimizers:
            optimizer.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(whole(param), plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


def replicas() -> None:
    """As torchft: each replica group shards by itself, and hooks average over the groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "dp"))
    calls: list[torch.dtype] = []

    def average(sums: torch.Tensor) -> None:
        calls.append(sums.dtype)
        dist.all_reduce(sums, group=mesh.get_group("group"))
        sums.div_(2)

    def hooked(module: nn.Module) -> None:
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(average)

    def trained_with(shard: Callable[..., Any]) -> nn.Sequential:
        model = mlp()
        for unit in (model.up, model.down, model):
            shard(unit, mesh=mesh["dp"])
        model.apply(hooked)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        for step in range(2):
            model(inputs(step)[own]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    ours = trained_with(torch_impl.fully_shard)
    assert calls == [torch.float32] * 4
    theirs = trained_with(fsdp.fully_shard)
    for name, param in reference().named_parameters():
        weight = whole(ours.get_parameter(name))
        torch.testing.assert_close(weight, param.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(weight, theirs.get_parameter(name).full_tensor(), rtol=1e-4, atol=1e-6)


def test_hooks_reduce_over_groups_that_the_mesh_does_not_know(ranks: RankGroup) -> None:
    ranks.run(4, replicas)


def hooks_of_two_axes() -> None:
    """After the outer axis, once a step, before the division; also what a model on meta was told."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "dp"))
    seen: list[float] = []

    def gradient(hook: Callable[[torch.Tensor], Any] | None) -> torch.Tensor:
        with torch.device("meta"):
            layer = nn.Linear(1, 1, bias=False)
        torch_impl.fully_shard(layer, mesh=mesh)
        if hook is not None:
            layer.set_all_reduce_hook(hook)
        layer.to_empty(device="cpu")
        nn.init.ones_(layer.weight)
        for last in (False, True):
            layer.set_is_last_backward(last)
            layer(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        return whole(layer.weight.grad)

    def triple(sums: torch.Tensor) -> None:
        # Both microbatches of both ranks.
        seen.append(sums[0].item())
        sums.mul_(3)

    assert gradient(None).item() == 3
    assert gradient(triple).item() == 9
    assert seen == [6.0]
    layer = torch_impl.fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ValueError, match="expected no stream on a mesh of two axes"):
        layer.set_all_reduce_hook(triple, stream=object())
    with pytest.raises(TypeError, match=r"set_all_reduce_hook: expected a function of .*, got 3"):
        layer.set_all_reduce_hook(3)
    layer.set_all_reduce_hook(triple)
    layer.set_all_reduce_hook(None)
    layer(torch.ones(1, 2)).sum().backward()
    assert seen == [6.0]


def test_hooks_run_after_the_outer_axis_in_the_last_microbatch(ranks: RankGroup) -> None:
    ranks.run(2, hooks_of_two_axes)
