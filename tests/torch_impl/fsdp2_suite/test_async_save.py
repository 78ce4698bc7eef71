"""``dcp.async_save`` of models sharded by FSDP2: the values of the moment of the call, whatever is trained meanwhile.

PyTorch's own tests of it (test/distributed/checkpoint) use FSDP2 for what they save. Saving by another process is in
``tests/torch_impl/checkpoint/test_stock_async.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.torch_version import TorchVersion

from tests.support.ranks import RankGroup
from tests.support.torch_impl.engines import Case, Engine, agree, name_of, rows, shared_folder, squares, whole
from tests.torch_impl.fsdp2_suite.models import Stack


def saved_while_trained(engine: Engine) -> list[float]:
    """Two steps are trained while the save is under way; the loaded run repeats them."""
    with shared_folder() as folder:
        return saved_in(engine, folder)


def saved_in(engine: Engine, folder: Path) -> list[float]:
    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        model: Any = Stack(2)
        engine.shard_all(*model.blocks, model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
        loss = squares(model, rows(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = fresh()
    step(model, optimizer, 0)
    weights, moments = get_state_dict(model, optimizer)
    kept = [whole(param.detach()).clone() for param in model.parameters()]
    # The training communicates beside it.
    future = dcp.async_save(
        {"model": weights, "optimizer": moments}, checkpoint_id=folder, process_group=dist.new_group()
    )
    wanted = [step(model, optimizer, number) for number in (1, 2)]
    getattr(future, "upload_completion", future).result()
    torch.manual_seed(5)
    other, its = fresh()
    weights, moments = get_state_dict(other, its)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for param, value in zip(other.parameters(), kept, strict=True):
        torch.testing.assert_close(whole(param.detach()), value, rtol=0, atol=0)
    found = [step(other, its, number) for number in (1, 2)]
    assert found == pytest.approx(wanted, rel=1e-6)
    return found


CASES: list[Any] = [(saved_while_trained, (), 2)]


@pytest.mark.slow
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13.0a0", reason="torch's copies of sharded tensors lose their shape"
)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_async_save(ranks: RankGroup, case: Case) -> None:
    agree(ranks, case)
