"""Items 6, 8, 9 and 10: how programs load and save."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.support.ranks import children
from tests.support.torch_impl.comparison import Facts, Program
from tests.support.torch_impl.engines import Engine, rows, shared_folder, squares, trained, whole
from tests.support.torch_impl.zoo import Stack


def sharded(engine: Engine, model: Any) -> Any:
    return engine.shard_all(*model.blocks, model)


def distance(model: nn.Module, source: nn.Module) -> float:
    """The largest difference of a parameter's elements."""
    pairs = zip(model.parameters(), source.parameters(), strict=True)
    return max((whole(ours.detach()) - theirs.detach()).abs().max().item() for ours, theirs in pairs)


def distributed(engine: Engine) -> Facts:
    """distribute_tensor(whole, param.device_mesh, param.placements) of every weight, then load_state_dict with
    assign=True, from values and from the meta device, and a step; DTensor.from_local of a parameter's to_local().
    """
    facts = Facts()
    for on_meta in (False, True):
        source = Stack()
        with torch.device("meta" if on_meta else "cpu"):
            model = sharded(engine, Stack())
        own = dict(model.named_parameters())
        state = {
            name: distribute_tensor(value, own[name].device_mesh, own[name].placements)
            for name, value in source.state_dict().items()
        }
        result = model.load_state_dict(state, assign=True)
        where = "from meta" if on_meta else "from values"
        facts(f"{where}: load_state_dict says", str(result))
        facts(f"{where}: distance from what was given", distance(model, source))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss = squares(model, rows(0))
        torch.testing.assert_close(loss, squares(source, rows(0)))
        loss.backward()
        facts(f"{where}: dtypes of gradients", [param.grad.dtype for param in model.parameters()])
        optimizer.step()
        facts(
            f"{where}: loss and a weight after a step", [loss.item(), whole(model.head.weight)[0, 0].item()]
        )
    param = model.head.weight.detach()
    again = DTensor.from_local(
        param.to_local(), param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
    facts("from_local: distance", (again.full_tensor() - param.full_tensor()).abs().max())
    facts("from_local: shares memory", again.to_local().data_ptr() == param.to_local().data_ptr())
    return facts


def first_rank_alone(engine: Engine) -> Facts:
    """Rank 0 has values, the others are on the meta device, as verl: shard, to_empty there or not, then
    set_model_state_dict(full_state_dict=True, broadcast_from_rank0=True) and a forward.
    """
    facts = Facts()
    for to_empty in (True, False):
        torch.manual_seed(3)
        source = Stack()
        here = dist.get_rank() == 0
        with torch.device("cpu" if here else "meta"):
            model = copy.deepcopy(source) if here else Stack()
        state = model.state_dict() if here else {}
        sharded(engine, model)
        if to_empty and not here:
            model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        how = "with to_empty" if to_empty else "without to_empty"
        facts(f"{how}: distance from rank 0's values", distance(model, source))
        facts(f"{how}: a forward", model(rows(0)).sum())
    return facts


def of_each_rank(engine: Engine) -> Facts:
    """torch.save of model and optimizer on each rank, two more steps, torch.load(weights_only=True), the same two steps
    again; a sharded tensor pickled and deep-copied.
    """
    facts = Facts()
    model = sharded(engine, Stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, optimizer, 0)
    saved = copy.deepcopy([whole(param.detach()) for param in model.parameters()])
    with shared_folder() as folder:
        path = folder / f"rank-{dist.get_rank()}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        facts("losses after the save", trained(model, optimizer, 1, 2))
        state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for param, value in zip(model.parameters(), saved, strict=True):
        torch.testing.assert_close(whole(param.detach()), value)
    facts("keys", list(state["model"]))
    facts("losses after the load", trained(model, optimizer, 1, 2))
    weight = model.head.weight.detach()
    for how, other in (
        ("pickled", pickle.loads(pickle.dumps(weight))),
        ("deep-copied", copy.deepcopy(weight)),
    ):
        facts(f"{how}: distance", (whole(other) - whole(weight)).abs().max())
        facts(f"{how}: has memory of its own", other.to_local().data_ptr() != weight.to_local().data_ptr())
    return facts


def by_thread(engine: Engine) -> Facts:
    """dcp.async_save by a thread, two steps while it writes, then dcp.load into a new model and optimizer and the same
    steps again.
    """
    return asynchronous(engine, AsyncCheckpointerType.THREAD)


def by_process(engine: Engine) -> Facts:
    """The same by a process."""
    return asynchronous(engine, AsyncCheckpointerType.PROCESS)


def asynchronous(engine: Engine, how: AsyncCheckpointerType) -> Facts:
    facts, pairs = Facts(), []
    for _ in range(2):
        model = sharded(engine, Stack(2))
        pairs.append((model, torch.optim.AdamW(model.parameters(), lr=0.01)))

    trained(*pairs[0], 0)
    saved = copy.deepcopy([whole(param.detach()) for param in pairs[0][0].parameters()])
    weights, moments = get_state_dict(*pairs[0])
    with shared_folder() as folder, children():
        # The step communicates meanwhile.
        future: Any = dcp.async_save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=folder,
            process_group=dist.new_group(),
            async_checkpointer_type=how,
        )
        straight = trained(*pairs[0], 1, 2)
        getattr(future, "upload_completion", future).result()
        weights, moments = get_state_dict(*pairs[1])
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(*pairs[1], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for param, value in zip(pairs[1][0].parameters(), saved, strict=True):
        torch.testing.assert_close(whole(param.detach()), value, rtol=0, atol=0)
    facts("losses of the run that goes on", straight)
    assert facts("losses of the loaded run", trained(*pairs[1], 1, 2)) == pytest.approx(straight, rel=1e-6)
    return facts


PROGRAMS = [
    Program(distributed, item=6, title="distribute_tensor by a parameter's placements, then assign=True"),
    Program(first_rank_alone, item=8, title="the first rank alone holds weights"),
    Program(of_each_rank, item=9, title="torch.save and torch.load on each rank"),
    Program(by_thread, item=10, title="dcp.async_save", torch="2.13.0a0"),
    Program(
        by_process,
        item=10,
        title="dcp.async_save, AsyncCheckpointerType.PROCESS",
        torch="2.13.0a0",
        slow=True,
    ),
]
