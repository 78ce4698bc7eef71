"""PyTorch's test_fully_shard_init.py and _state.py: what is sharded, over which ranks, and from which values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import (
    Engine,
    backward_as_one,
    counting,
    gradients_are,
    rows,
    squares,
    train_as_one,
    weights_are,
    whole,
)
from tests.support.torch_impl.zoo import MLP, Stack, Tied


def sharded_names(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if isinstance(param, DTensor)]


def meshes(engine: Engine) -> list[str]:
    """Three data-parallel axes are refused; the default mesh has all ranks."""
    with pytest.raises(ValueError, match=r"(?i)mesh"):
        engine.shard(MLP(), mesh=init_device_mesh("cpu", (1, 1, 2)))
    model = engine.shard(MLP())
    mesh = next(iter(model.parameters())).device_mesh
    group = init_device_mesh("cpu", (2,)).get_group()
    assert dist.get_process_group_ranks(mesh.get_group()) == dist.get_process_group_ranks(group)
    return [mesh.device_type, str(mesh.ndim), str(mesh.size())]


def bad_arguments(engine: Engine) -> bool:
    """A module list has no forward."""
    with pytest.raises(ValueError, match=r"forward|ModuleList"):
        engine.shard(nn.ModuleList([MLP()]))
    return True


def which_parameters(engine: Engine) -> dict[str, list[str]]:
    """A unit takes what no inner unit has taken; modules and names stay."""
    model = Stack()
    names = [name for name, _ in model.named_parameters()]
    engine.shard(model.blocks[1])
    inner = sharded_names(model)
    engine.shard(model)
    assert [name for name, _ in model.named_parameters()] == names
    is_unit = [
        name for name, module in model.named_modules() if isinstance(module, engine.package.FSDPModule)
    ]
    return {"inner": inner, "all": sharded_names(model), "units": is_unit}


def one_unit_of_several(engine: Engine) -> dict[str, list[int]]:
    """A list of modules is one unit: one reduction."""
    model = Stack()
    reference = copy.deepcopy(model)
    engine.shard([model.blocks[0], model.blocks[1]])
    engine.shard(model)
    loss = squares(model, rows(0))
    with counting(engine, model) as calls:
        loss.backward()
    backward_as_one(reference)
    gradients_are(model, reference)
    return {"reductions": [calls["reduce_scatter"]]}


def shared_modules(engine: Engine) -> list[str]:
    """A module in two places and a tied weight are sharded once, and stay one object."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.other = self.first
            self.third = nn.Linear(8, 8)
            self.third.weight = self.first.weight
            self.register_buffer("shift", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.other(self.first(x))) + self.shift

    model = Doubled()
    train_as_one(model, engine.shard, steps=2)
    assert model.first.weight is model.other.weight
    assert model.first.weight is model.third.weight
    assert not isinstance(model.shift, DTensor)
    return sharded_names(model)


def tie_across_units(engine: Engine) -> bool:
    """FSDP2 lets a tie across units fall apart in silence; here it is named."""
    model = Tied()
    if engine.ours:
        with pytest.raises(ValueError, match="tie"):
            engine.shard_all(model.head, model)
    else:
        engine.shard_all(model.head, model)
    return True


def odd_parameters(engine: Engine, oddity: str) -> bool:
    """What FSDP2 refuses: scalars and transposed memory; both train here."""
    model = nn.Module()
    values = torch.tensor(2.0) if oddity == "scalar" else torch.arange(12.0).view(3, 4).t()
    model.weight = nn.Parameter(values)
    if not engine.ours:
        with pytest.raises((ValueError, NotImplementedError)):
            engine.shard(model)
        return True
    engine.shard(model)
    torch.testing.assert_close(whole(model.weight.detach()), values)
    return True


def at_rest(engine: Engine) -> dict[str, list[Any]]:
    """Each parameter is a DTensor of the given shape, and the ranks' parts are all of it, once."""
    model = Stack()
    reference = copy.deepcopy(model)
    engine.shard_all(*model.blocks, model)
    facts: dict[str, list[Any]] = {}
    for name, param in model.named_parameters():
        count = torch.tensor(param.to_local().numel())
        dist.all_reduce(count)
        facts[name] = [
            tuple(param.shape),
            tuple(param.stride()),
            str(param.dtype),
            count.item(),
            param.is_leaf,
        ]
    weights_are(model, reference)
    return facts


def from_meta(engine: Engine, axes: int) -> dict[str, list[str]]:
    """On the meta device until ``to_empty``, then initialized in place, then trained."""
    mesh = init_device_mesh(
        "cpu", (2, 2) if axes == 2 else (2,), mesh_dim_names=("replicate", "shard")[-axes:]
    )
    with torch.device("meta"):
        model = Stack(2)
    engine.shard_all(*model.blocks, model, mesh=mesh)
    facts = {"before": sorted({param.device.type for param in model.parameters()})}
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model.to_empty(device="cpu")
    facts["after"] = sorted({param.device.type for param in model.parameters()})
    source = Stack(2)
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(distribute_tensor(values[name].detach(), param.device_mesh, param.placements))
    weights_are(model, source)
    squares(model, rows(0)).backward()
    backward_as_one(source)
    gradients_are(model, source)
    return facts


def still_on_meta(engine: Engine) -> bool:
    """A forward before ``to_empty`` names a parameter that is on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine.shard_all(model[0], model)
    with pytest.raises(RuntimeError, match=r"(?s)weight.*meta|meta.*weight"):
        model(rows(0))
    return True


def replicas_may_differ(engine: Engine) -> list[float]:
    """FSDP2 broadcasts nothing; a program makes replicas equal by broadcasting local parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = MLP()
    reference = copy.deepcopy(model)
    engine.shard(model, mesh=mesh)
    group = mesh.get_group("replicate")
    if mesh.get_local_rank("replicate"):
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().add_(1)
    for param in model.parameters():
        dist.broadcast(param.to_local().detach(), group_src=0, group=group)
    weights_are(model, reference)
    return [squares(model, rows(0)).item()]


def all_reduce_hook(engine: Engine) -> list[float]:
    """A hook sees reduced gradients before they are the parameters', and may change them."""
    model = MLP()
    reference = copy.deepcopy(model)
    engine.shard(model)
    model.set_all_reduce_hook(lambda sums: sums.mul_(2))
    squares(model, rows(0)).backward()
    backward_as_one(reference, loss=lambda module, x: 2 * squares(module, x))
    gradients_are(model, reference)
    return []


def placements(engine: Engine, dim: int) -> list[float]:
    """Any dimension that divides evenly; ``None`` for the rest."""

    def placement_of(param: nn.Parameter) -> Shard | None:
        return Shard(dim) if param.ndim > 1 else None

    return train_as_one(
        nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)),
        lambda module: engine.shard(module, shard_placement_fn=placement_of),
    )


def bad_placements(engine: Engine) -> bool:
    with pytest.raises((ValueError, TypeError, AssertionError)):
        engine.shard(MLP(), shard_placement_fn=lambda param: Shard(5))
    return True


def uneven_placement(engine: Engine) -> bool:
    """FSDP2 cuts other dimensions than the first evenly only; here rows are cut, evenly or not."""
    model = nn.Linear(7, 5, bias=False)
    if engine.ours:
        train_as_one(
            model,
            lambda module: engine.shard(module, shard_placement_fn=lambda param: Shard(1)),
            shape=(3, 7),
        )
    else:
        with pytest.raises(NotImplementedError, match="uneven"):
            engine.shard(model, shard_placement_fn=lambda param: Shard(1))
    return True


def inner_unit_first(engine: Engine) -> bool:
    """FSDP2 wants the root's forward first; here any unit may be called first."""
    model = nn.Sequential(MLP(), MLP(8, 6))
    engine.shard_all(*model, model)
    model[0](rows(0))
    if engine.ours:
        model(rows(0)).sum().backward()
    else:
        with pytest.raises(RuntimeError, match="root"):
            model(rows(0))
    return True


def swapped(engine: Engine) -> list[float]:
    """Local parts that are written after sharding, before the first forward, are what it computes with."""
    model = MLP()
    engine.shard(model)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(0.5)
    return [squares(model, rows(0)).item()]


def mixed_dtypes(engine: Engine, frozen: bool) -> list[str]:
    """A unit may have frozen parameters of another dtype; FSDP2 wants trained ones to have the same."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(not frozen)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * self.other(x.to(self.other.weight.dtype))

    model = engine.shard(Mixed())
    if not frozen and not engine.ours:
        with pytest.raises(AssertionError, match="uniform original parameter dtype"):
            model(rows(0))
        return []
    model(rows(0)).float().sum().backward()
    return [str(model.first.weight.grad.dtype), str(model.other.weight.dtype)] if frozen else []


def at_the_old_place(engine: Engine) -> bool:
    """``torch.distributed._composable.fsdp`` has the same function."""
    from torch.distributed._composable.fsdp import fully_shard

    if not engine.ours:
        assert fully_shard is engine.package.fully_shard
        return True
    with engine.package.install():
        from torch.distributed._composable.fsdp import fully_shard as installed

        assert installed is engine.package.fully_shard
    return True


def classes(engine: Engine) -> list[Any]:
    """A sharded module is of its own class and of FSDPModule; modules below are what they were."""
    model = Stack(1)
    assert engine.shard(model) is model
    again = engine.shard(Stack(1))
    assert type(again) is type(model)
    package = engine.package.FSDPModule
    bases = (type(model), package)
    return [
        isinstance(model, Stack),
        isinstance(model, package),
        isinstance(model.head, package),
        issubclass(type(model), bases),
        type(model.blocks[0]) is MLP,
        type(model).__name__.endswith("Stack"),
    ]


def twice(engine: Engine) -> bool:
    """A module is sharded once."""
    model = engine.shard(MLP())
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        engine.shard(model)
    return True


def without_forward(engine: Engine) -> bool:
    """Containers that are never called have no forward to hook."""
    for container in (nn.ModuleList([MLP()]), nn.ModuleDict({"one": MLP()})):
        with pytest.raises(ValueError, match=type(container).__name__):
            engine.shard(container)
    return True


def copied(engine: Engine) -> bool:
    """A sharded module has no copy; its parts of parameters do."""
    model = engine.shard(MLP())
    with pytest.raises((AssertionError, TypeError)):
        copy.deepcopy(model)
    return True


PROGRAMS = [
    Program(meshes),
    Program(bad_arguments),
    Program(which_parameters),
    Program(one_unit_of_several),
    Program(shared_modules),
    Program(tie_across_units),
    Program(odd_parameters, ("scalar",)),
    Program(odd_parameters, ("transposed",)),
    Program(at_rest),
    Program(from_meta, (1,)),
    Program(from_meta, (2,), world=4, slow=True),
    Program(still_on_meta),
    Program(replicas_may_differ, world=4, slow=True),
    Program(all_reduce_hook),
    Program(placements, (1,)),
    Program(placements, (-1,)),
    Program(bad_placements),
    Program(uneven_placement),
    Program(inner_unit_first),
    Program(swapped),
    Program(mixed_dtypes, (True,)),
    Program(mixed_dtypes, (False,)),
    Program(at_the_old_place),
    Program(classes),
    Program(twice),
    Program(without_forward),
    Program(copied),
]
