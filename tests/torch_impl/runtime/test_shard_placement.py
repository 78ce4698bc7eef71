"""``shard_placement_fn``: dimensions are hints, and a mesh of its own is the mesh of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
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
from tests.support.torch_impl.toy import Block, Toy, batch, mse, seeded, sharded_toy, whole
from tests.support.torch_impl.zoo import Experts
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.dtensor.local import local_of, own_part

EXPERTS, WIDTH = 4, 6


def expert_model() -> Experts:
    return seeded(lambda: Experts(5, WIDTH, 7, experts=EXPERTS), 3)


def inputs(step: int) -> list[torch.Tensor]:
    """One for each of four ranks."""
    random = torch.Generator().manual_seed(step)
    return [torch.randn(3, 5, generator=random) for _ in range(4)]


def mesh_info(mesh: DeviceMesh) -> Any:
    """What torch's ``FSDPMeshInfo`` says, which this package reads."""
    return SimpleNamespace(mesh=mesh, shard_mesh_dim=mesh.ndim - 1)


def expert_parallel(shard: Callable[..., Any], result: Callable[..., Any], root: DeviceMesh) -> Experts:
    """As torchtitan: experts are cut over "ep" and sharded over "efsdp", everything else over all ranks."""
    model = expert_model()
    part = model.experts.detach().chunk(2)[root.get_local_rank("ep")].clone()
    model.experts = nn.Parameter(DTensor.from_local(part, root["ep"], [Shard(0)], run_check=False))

    def placement_of(param: nn.Parameter) -> Any:
        return result(root["efsdp"]) if param is model.experts else Shard(param.ndim - 1)

    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    shard(model, mesh=everyone, shard_placement_fn=placement_of)
    return model


def trained(model: Experts, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(inputs(step)[dist.get_rank()]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def reference(steps: int) -> tuple[Experts, list[list[float]]]:
    """One process: dense gradients are the mean over four ranks, those of half the experts over two."""
    model = expert_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        outputs = [model(x) for x in inputs(step)]
        of_ranks = [out[:, 2 * (k % 2) : 2 * (k % 2) + 2].square().mean() for k, out in enumerate(outputs)]
        (sum(of_ranks) / 4).backward()
        model.experts.grad.mul_(2)
        optimizer.step()
        losses.append([loss.item() for loss in of_ranks])
    return model, losses


def over_their_own_mesh(path: str) -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))

    def result(mesh: DeviceMesh) -> Any:
        return SimpleNamespace(placement=Shard(1), mesh_info=mesh_info(mesh))

    model = expert_parallel(torch_impl.fully_shard, result, root)
    assert [group.mesh.size for group in model._unit.groups] == [2, 4]
    expected, losses = reference(3)
    own_losses = trained(model, 3)
    torch.testing.assert_close(own_losses, [by_rank[dist.get_rank()] for by_rank in losses])
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param), dict(expected.named_parameters())[name].detach())
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    want = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e9)
    torch.testing.assert_close(total, want)

    torch_impl.save_checkpoint(path, model)
    again = expert_parallel(torch_impl.fully_shard, result, root)
    torch_impl.load_checkpoint(path, again)
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(ours), whole(theirs))
    assert trained(again, 1) != [losses[0][dist.get_rank()]]

    # Torch has had these classes, which are private, since 2.12.
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        return

    def stock(mesh: DeviceMesh) -> Any:
        return common.ShardPlacementResult(Shard(1), common.FSDPMeshInfo(mesh, shard_mesh_dim=0))

    def evenly(module: nn.Module, *, shard_placement_fn: Callable[..., Any], **options: Any) -> None:
        # FSDP2 cuts other dimensions than the first one evenly only.
        def placement_of(param: nn.Parameter) -> Any:
            wanted = shard_placement_fn(param)
            return None if isinstance(wanted, Shard) else wanted

        fsdp.fully_shard(module, shard_placement_fn=placement_of, **options)

    torch.testing.assert_close(trained(expert_parallel(evenly, stock, root), 3), own_losses)
    ours = expert_parallel(torch_impl.fully_shard, stock, root)
    assert trained(ours, 3) == own_losses


def test_parameters_are_sharded_over_the_mesh_of_their_placement(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(4, over_their_own_mesh, str(tmp_path / "checkpoint"))


class Routed(nn.Module):
    """Experts of several kinds, of which a rank uses those that its ``route`` names."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.dense = nn.Linear(5, WIDTH)
            self.experts = nn.ParameterDict(
                {key: nn.Parameter(torch.randn(EXPERTS, WIDTH, 7)) for key in "abc"}
            )

    def forward(self, x: torch.Tensor, route: str) -> torch.Tensor:
        used = [self.experts[key] for key in route]
        own = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in used]
        return torch.einsum("bi,eio->beo", torch.tanh(self.dense(x)), torch.stack(own).sum(0)).tanh()


def routed() -> Routed:
    """Experts are cut over "ep" and sharded over "efsdp", the dense layer over all four ranks."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = Routed()
    for key, whole_experts in model.experts.items():
        part = whole_experts.detach().chunk(2)[root.get_local_rank("ep")].clone()
        model.experts[key] = nn.Parameter(DTensor.from_local(part, root["ep"], [Shard(0)], run_check=False))

    def placement_of(param: nn.Parameter) -> Any:
        placement = SimpleNamespace(placement=None, mesh_info=mesh_info(root["efsdp"]))
        return placement if param.ndim == 3 else None

    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    return torch_impl.fully_shard(model, mesh=everyone, shard_placement_fn=placement_of)


def backward_of_all(reference: Routed, step: int, routes: Sequence[str]) -> None:
    """The mean over four ranks; of experts, which two ranks have, the mean over these."""
    outputs = [reference(x, route) for x, route in zip(inputs(step), routes, strict=True)]
    of_ranks = [out[:, 2 * (k % 2) : 2 * (k % 2) + 2].square().mean() for k, out in enumerate(outputs)]
    (sum(of_ranks) / 4).backward()
    for param in reference.parameters():
        if param.ndim == 3 and param.grad is not None:
            param.grad.mul_(2)


@on_ranks(4)
def test_experts_that_some_ranks_use_get_gradients_on_the_ranks_of_their_mesh() -> None:
    """Flags of parameters are summed over the mesh of their own group: the two ranks with the same experts."""
    model, reference, rank = routed(), Routed(), dist.get_rank()
    for step, routes in enumerate((["a", "a", "ab", "ab"], ["ac", "ac", "a", "a"], ["b"] * 4)):
        model(inputs(step)[rank], routes[rank]).square().mean().backward()
        backward_of_all(reference, step, routes)
        for name, param in reference.named_parameters():
            got = model.get_parameter(name).grad
            assert (got is None) == (param.grad is None), (step, name)
            if param.grad is not None:
                torch.testing.assert_close(whole(got), param.grad)
        norms = [nn.utils.clip_grad_norm_(module.parameters(), 1.0) for module in (model, reference)]
        torch.testing.assert_close(norms[0], norms[1])
        model.zero_grad()
        reference.zero_grad()


@on_ranks(4)
def test_experts_that_no_rank_of_their_mesh_uses_have_no_gradient() -> None:
    """What one rank uses of its experts is used on the rank that has the same ones, and nowhere else."""
    model, reference, rank = routed(), Routed(), dist.get_rank()
    for step, user in enumerate((0, 3, 2)):
        routes = ["ab" if index == user else "a" for index in range(4)]
        model(inputs(step)[rank], routes[rank]).square().mean().backward()
        backward_of_all(reference, step, routes)
        with_gradient = {"dense.weight", "dense.bias", "experts.a"}
        if rank % 2 == user % 2:
            with_gradient.add("experts.b")
        for name, param in model.named_parameters():
            assert (param.grad is not None) == (name in with_gradient), (step, name)
            if param.grad is not None:
                # Not the whole, which the ranks of the other part would have to gather, too.
                wanted = own_part(param.grad, reference.get_parameter(name).grad)
                torch.testing.assert_close(local_of(param.grad), wanted, msg=name)
        model.zero_grad()
        reference.zero_grad()


def hybrid() -> None:
    """Two ranks shard a parameter and two replicate it, beside others that all four shard."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))

    def placement_of(param: nn.Parameter) -> Any:
        placement = SimpleNamespace(placement=None, mesh_info=mesh_info(root))
        return placement if param.ndim == 3 else None

    model, plain = sharded_toy(mesh=everyone, shard_placement_fn=placement_of), Toy()
    stack = model.blocks[0].stack
    assert stack.placements[0] == Replicate()
    assert len(stack.placements) == 2
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain)]
    for step in range(2):
        tokens, targets = batch(step, 4, 1)
        mse(plain, tokens, targets).backward()
        mse(model, tokens[dist.get_rank()], targets[dist.get_rank()]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(whole(param), plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


def test_a_parameter_is_sharded_and_replicated_beside_others(ranks: RankGroup) -> None:
    ranks.run(4, hybrid)


def hints() -> None:
    plain = torch_impl.fully_shard(Block())
    for dim in (0, 1, -1):

        def placement_of(param: nn.Parameter, dim: int = dim) -> Shard | None:
            return Shard(dim) if param.ndim > 1 else None

        model = torch_impl.fully_shard(Block(), shard_placement_fn=placement_of)
        assert model._unit.groups[0].layout == plain._unit.groups[0].layout
    unit = plain._unit.groups[0].mesh
    assert isinstance(unit, DataParallelMesh)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, r"expected a dimension of gain, which has 0, got Shard\(dim=1\)", Shard(1), {}),
        (TypeError, r"expected Shard\(dim\), .* or None for stack, got Replicate", Replicate(), {}),
        (
            TypeError,
            "expected the mesh_info of stack to have a DeviceMesh",
            SimpleNamespace(mesh_info=3, placement=None),
            {},
        ),
        (
            NotImplementedError,
            "SimpleNamespace for stack that shards axis 0 of 2 is not available: give a mesh whose last axis",
            SimpleNamespace(mesh_info=SimpleNamespace(mesh=mesh, shard_mesh_dim=0), placement=None),
            {},
        ),
        (
            ValueError,
            r"stack: strategy 'hfsdp' shards over 2 axes, expected a mesh of as many .* got one of shape \(2,\)",
            SimpleNamespace(mesh_info=mesh_info(mesh["b"]), placement=None),
            {"mesh": mesh, "strategy": "hfsdp"},
        ),
    ]
    for error, message, placement, options in cases:
        module = Block()
        with pytest.raises(error, match=message):
            torch_impl.fully_shard(module, shard_placement_fn=lambda _, chosen=placement: chosen, **options)
        assert type(module) is Block


def test_dimensions_are_hints_and_what_is_no_placement_is_refused(ranks: RankGroup) -> None:
    ranks.run(2, hints)
