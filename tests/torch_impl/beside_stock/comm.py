"""PyTorch's test_fully_shard_comm.py: how many collectives run and when, and what they compute."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import Engine, backward_as_one, counting, gradients_are, rows, squares
from tests.support.torch_impl.zoo import MLP, Stack


def counted_step(engine: Engine, model: Any) -> dict[str, dict[str, int]]:
    with counting(engine, model) as forward:
        loss = squares(model, rows(0))
    with counting(engine, model) as backward:
        loss.backward()
    return {"forward": forward, "backward": backward}


def counts(engine: Engine, reshard: bool | None, replicas: bool) -> dict[str, dict[str, int]]:
    """A gather for each unit in forward, another in backward where it was freed; a reduction for each."""
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if replicas:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Stack()
    engine.shard_all(*model.blocks, model, **options)
    counted_step(engine, model)
    calls = counted_step(engine, model)
    units = 4
    assert calls["forward"]["all_gather"] == units
    assert calls["backward"]["reduce_scatter"] == units
    assert calls["backward"]["all_reduce"] == (units if replicas else 0)
    return calls


def by_hand(engine: Engine) -> list[int]:
    """Kept weights that are freed by hand after forward are gathered again in backward."""
    model = Stack()
    engine.shard_all(*model.blocks, model, reshard_after_forward=False)
    loss = squares(model, rows(0))
    for block in model.blocks:
        block.reshard()
    model.reshard()
    with counting(engine, model) as backward:
        loss.backward()
    return [backward["all_gather"]]


def microbatches(engine: Engine) -> list[dict[str, int]]:
    """Without gradient sync nothing is reduced; without resharding after backward nothing is gathered again."""
    model = Stack(2)
    engine.shard_all(*model.blocks, model, reshard_after_forward=False)
    calls_by_part = []
    for part in range(3):
        last = part == 2
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        with counting(engine, model) as calls:
            squares(model, rows(part)).backward()
        calls_by_part.append(calls)
    return calls_by_part


def divide_factor(engine: Engine, factor: float) -> list[float]:
    """Sums of gradients are divided by the given factor, whatever the number of ranks."""
    model = MLP()
    reference = copy.deepcopy(model)
    engine.shard(model)
    model.set_gradient_divide_factor(factor)
    if not engine.ours and factor != dist.get_world_size():
        # gloo has no PREMUL_SUM, which FSDP2 otherwise takes.
        model.set_force_sum_reduction_for_comms(True)
    squares(model, rows(0)).backward()
    for rank in range(dist.get_world_size()):
        (squares(reference, rows(0, rank)) / factor).backward()
    gradients_are(model, reference)
    return []


def unshard_ahead(engine: Engine, async_op: bool) -> list[int]:
    """Weights gathered by ``unshard`` before the forward are not gathered in it."""
    model = Stack()
    engine.shard_all(*model.blocks, model)
    squares(model, rows(1)).backward()
    handles = [block.unshard(async_op=async_op) for block in model.blocks]
    for handle in handles:
        if handle is not None:
            handle.wait()
    with counting(engine, model) as forward:
        loss = squares(model, rows(0))
    loss.backward()
    return [forward["all_gather"], *(handle is None for handle in handles)]


def unshard_before_any_forward(engine: Engine) -> list[bool]:
    """``unshard`` and ``reshard`` work before the first forward, and show whole and sharded parameters."""
    model = MLP()
    reference = copy.deepcopy(model)
    engine.shard(model)
    model.unshard()
    are_sharded = [isinstance(param, DTensor) for param in model.parameters()]
    for param, value in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), value.detach())
    model.reshard()
    return [*are_sharded, *(isinstance(param, DTensor) for param in model.parameters())]


def unshard_nothing(engine: Engine) -> list[bool]:
    """A module without parameters of its own has a handle that waits for nothing."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
    engine.shard_all(model[0], model)
    handle = model[0].unshard(async_op=True)
    handle.wait()
    model[0].unshard()
    model[0].reshard()
    return [handle is not None]


def backward_after_unshard(engine: Engine) -> list[float]:
    """``unshard`` ahead of a backward, when weights were freed after forward."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    engine.shard_all(*model.blocks, model)
    loss = squares(model, rows(0))
    for block in model.blocks:
        block.unshard()
    with counting(engine, model) as backward:
        loss.backward()
    backward_as_one(reference)
    gradients_are(model, reference)
    return [loss.item(), float(backward["all_gather"])]


def unit_of_several_unused(engine: Engine) -> list[bool]:
    """One of the modules that form a unit together is not called."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = MLP(), MLP(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Two()
    reference = copy.deepcopy(model)
    engine.shard([model.used, model.unused])
    engine.shard(model)
    for step in range(2):
        squares(model, rows(step)).backward()
        backward_as_one(reference, step)
        gradients_are(model, reference)
    return [param.grad is None for param in model.parameters()]


def all_units_kept(engine: Engine, setter: str) -> dict[str, dict[str, int]]:
    """Setters that change what is kept: of one module, or of all below it."""
    model = Stack(2)
    engine.shard_all(*model.blocks, model)
    if setter == "root":
        model.set_reshard_after_forward(True, recurse=False)
    elif setter == "all":
        model.set_reshard_after_forward(False, recurse=True)
    else:
        model.blocks[0].set_reshard_after_forward(False)
    return counted_step(engine, model)


PROGRAMS = [
    Program(counts, (True, False)),
    Program(counts, (False, False)),
    Program(counts, (None, False)),
    Program(counts, (True, True), world=4),
    Program(by_hand),
    Program(microbatches),
    Program(divide_factor, (1.0,)),
    Program(divide_factor, (2.0,)),
    Program(divide_factor, (5.0,)),
    Program(unshard_ahead, (False,)),
    Program(unshard_ahead, (True,)),
    Program(unshard_before_any_forward),
    Program(unshard_nothing),
    Program(backward_after_unshard),
    Program(unit_of_several_unused),
    Program(all_units_kept, ("root",)),
    Program(all_units_kept, ("all",)),
    Program(all_units_kept, ("one",), slow=True),
]
