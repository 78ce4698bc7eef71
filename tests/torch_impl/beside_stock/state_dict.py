"""PyTorch's test_fully_shard_state_dict.py: sharded and whole state dicts, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import Engine, rows, shared_folder, squares, weights_are
from tests.support.torch_impl.zoo import Stack, Tied


def sharded(engine: Engine, model: Any, **options: Any) -> Any:
    return engine.shard_all(*model.blocks, model, **options)


def round_trip(engine: Engine, offload: bool, replicas: bool) -> dict[str, list[Any]]:
    """A sharded state dict has DTensors under plain names; loading one that was changed changes the model."""
    options: dict[str, Any] = {}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if replicas:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Stack()
    reference = copy.deepcopy(model)
    sharded(engine, model, **options)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    facts: dict[str, list[Any]] = {}
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        facts[name] = [str(value.dtype), tuple(value.shape), value.device_mesh.ndim, value.device.type]
        torch.testing.assert_close(value.full_tensor(), reference.state_dict()[name])
    doubled = {name: value.clone() * 2 for name, value in state.items()}
    model.load_state_dict(doubled)
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(2)
    weights_are(model, reference)
    torch.testing.assert_close(model(rows(0)), reference(rows(0)))
    model(rows(1)).sum().backward()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    return facts


def whole_state_dict(engine: Engine, broadcast: bool, tied: bool) -> list[bool]:
    """Whole values of the first rank, on the CPU, come back into another sharded model."""
    build = Tied if tied else Stack
    model: Any = build()
    reference = copy.deepcopy(model)
    sharded(engine, model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    assert bool(state) == (dist.get_rank() == 0)
    for name, value in state.items():
        assert not isinstance(value, DTensor)
        assert value.device.type == "cpu"
        torch.testing.assert_close(value, reference.state_dict()[name])
    torch.manual_seed(7)
    other = sharded(engine, build())
    if not broadcast:
        state = reference.state_dict()
    set_model_state_dict(
        other, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    )
    weights_are(other, reference)
    return [name in state for name in reference.state_dict()]


def checkpoint(engine: Engine, tied: bool) -> list[float]:
    """A run that is saved by DCP and loaded into another model and optimizer goes on as the first one does."""
    with shared_folder() as folder:
        return checkpoint_in(folder, engine, tied)


def checkpoint_in(folder: Path, engine: Engine, tied: bool) -> list[float]:
    build = Tied if tied else Stack
    shape = (2, 11) if tied else (3, 8)

    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        model = sharded(engine, build())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
        loss = squares(model, rows(number, None, *shape))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = fresh()
    for number in range(2):
        step(model, optimizer, number)
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    wanted = [step(model, optimizer, number) for number in (2, 3)]
    torch.manual_seed(11)
    other, its = fresh()
    state = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, its)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, its, state["optimizer"])
    losses = [step(other, its, number) for number in (2, 3)]
    assert losses == pytest.approx(wanted, rel=1e-6)
    return losses


def plain_values(engine: Engine) -> bool:
    """FSDP2 refuses whole plain tensors, which ``load_state_dict`` here takes."""
    model, source = sharded(engine, Stack()), Stack()
    if engine.ours:
        model.load_state_dict(source.state_dict())
        weights_are(model, source)
    else:
        with pytest.raises(RuntimeError, match="DTensor"):
            model.load_state_dict(source.state_dict())
    return True


def extra_keys(engine: Engine) -> list[str]:
    """Missing and unexpected keys are told as by any module."""
    model = sharded(engine, Stack(1))
    state = dict(model.state_dict())
    state["odd"] = state.pop("scale")
    missing, unexpected = model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match="odd"):
        model.load_state_dict(state)
    return [*missing, *unexpected]


def tensor_parallel(engine: Engine) -> list[str]:
    """State dicts under torch's tensor parallelism hold whole values on both axes."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    engine.shard_all(model[0], model, mesh=mesh["dp"])
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in reference.state_dict().items():
        if dist.get_rank() == 0:
            torch.testing.assert_close(state[name], value)
    model.load_state_dict({name: value * 1 for name, value in model.state_dict().items()})
    weights_are(model, reference)
    return list(state)


PROGRAMS = [
    Program(round_trip, (False, False), slow=True),
    Program(round_trip, (True, False)),
    Program(round_trip, (False, True), world=4, slow=True),
    Program(whole_state_dict, (True, False), slow=True),
    Program(whole_state_dict, (True, True)),
    Program(whole_state_dict, (False, False), slow=True),
    Program(checkpoint, (False,), slow=True),
    Program(checkpoint, (True,), slow=True),
    Program(plain_values),
    Program(extra_keys),
    Program(tensor_parallel, world=4, slow=True),
]
