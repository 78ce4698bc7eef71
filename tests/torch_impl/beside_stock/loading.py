"""Items 6, 8, 9 and 10: how programs load and save."""

from __future__ import annotations

import copy
import pickle
from typing import Any

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
from tests.support.torch_impl.engines import Engine, rows, shared_folder, squares, trained, whole
from tests.torch_impl.beside_stock.shown import Facts, Item


def linears() -> nn.Sequential:
    """Weights that the ranks hold uneven rows of."""
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5))


def distance(model: nn.Module, given: nn.Module) -> float:
    """The largest difference of a parameter's elements."""
    pairs = zip(model.parameters(), given.parameters(), strict=True)
    return max((whole(ours.detach()) - one.detach()).abs().max().item() for ours, one in pairs)


def distributed(engine: Engine, facts: Facts) -> None:
    """distribute_tensor(whole, param.device_mesh, param.placements) of every weight, then load_state_dict with
    assign=True, from values and from the meta device, and a step; DTensor.from_local of a parameter's to_local().
    """
    for on_meta in (False, True):
        given = linears()
        with torch.device("meta" if on_meta else "cpu"):
            model = linears()
        engine.shard(model)
        own = dict(model.named_parameters())
        state = {
            name: distribute_tensor(value, own[name].device_mesh, own[name].placements)
            for name, value in given.state_dict().items()
        }
        result = model.load_state_dict(state, assign=True)
        where = "from meta" if on_meta else "from values"
        facts(f"{where}: load_state_dict says", str(result))
        facts(f"{where}: distance from what was given", distance(model, given))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss = squares(model, rows(0))
        loss.backward()
        optimizer.step()
        facts(f"{where}: loss and a weight after a step", [loss.item(), whole(model[0].weight)[0, 0].item()])
    param = model[0].weight.detach()
    again = DTensor.from_local(
        param.to_local(), param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
    facts("from_local: distance", (again.full_tensor() - param.full_tensor()).abs().max())
    facts("from_local: shares memory", again.to_local().data_ptr() == param.to_local().data_ptr())


def first_rank_alone(engine: Engine, facts: Facts) -> None:
    """Rank 0 has values, the others are on the meta device, as verl: shard, to_empty there or not, then
    set_model_state_dict(full_state_dict=True, broadcast_from_rank0=True) and a forward.
    """
    for to_empty in (True, False):
        torch.manual_seed(3)
        given = linears()
        here = dist.get_rank() == 0
        with torch.device("cpu" if here else "meta"):
            model = copy.deepcopy(given) if here else linears()
        state = model.state_dict() if here else {}
        engine.shard(model)
        if to_empty and not here:
            model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        how = "with to_empty" if to_empty else "without to_empty"
        facts(f"{how}: distance from rank 0's values", distance(model, given))
        facts(f"{how}: a forward", model(rows(0)).sum())


def of_each_rank(engine: Engine, facts: Facts) -> None:
    """torch.save of model and optimizer on each rank, two more steps, torch.load(weights_only=True), the same two steps
    again; a sharded tensor pickled and deep-copied.
    """
    model = engine.shard(linears())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    trained(model, optimizer, 0)
    with shared_folder() as folder:
        path = folder / f"rank-{dist.get_rank()}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        facts("losses after the save", trained(model, optimizer, 1, 2))
        state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    facts("losses after the load", trained(model, optimizer, 1, 2))
    weight = model[0].weight.detach()
    for how, other in (
        ("pickled", pickle.loads(pickle.dumps(weight))),
        ("deep-copied", copy.deepcopy(weight)),
    ):
        facts(f"{how}: distance", (whole(other) - whole(weight)).abs().max())
        facts(f"{how}: has memory of its own", other.to_local().data_ptr() != weight.to_local().data_ptr())


def by_thread(engine: Engine, facts: Facts) -> None:
    """dcp.async_save by a thread, two steps while it writes, then dcp.load into a new model and optimizer and the same
    steps again.
    """
    asynchronous(engine, facts, AsyncCheckpointerType.THREAD)


def by_process(engine: Engine, facts: Facts) -> None:
    """The same by a process."""
    asynchronous(engine, facts, AsyncCheckpointerType.PROCESS)


def asynchronous(engine: Engine, facts: Facts, how: AsyncCheckpointerType) -> None:
    pairs = []
    for _ in range(2):
        model = engine.shard(linears())
        pairs.append((model, torch.optim.AdamW(model.parameters(), lr=0.01)))

    trained(*pairs[0], 0)
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
    facts("losses of the run that goes on", straight)
    facts("losses of the loaded run", trained(*pairs[1], 1, 2))


ITEMS = [
    Item(6, "distribute_tensor by a parameter's placements, then assign=True", distributed),
    Item(8, "the first rank alone holds weights", first_rank_alone),
    Item(9, "torch.save and torch.load on each rank", of_each_rank),
    Item(10, "dcp.async_save", by_thread, torch="2.13.0a0"),
    Item(10, "dcp.async_save, AsyncCheckpointerType.PROCESS", by_process, torch="2.13.0a0"),
]
