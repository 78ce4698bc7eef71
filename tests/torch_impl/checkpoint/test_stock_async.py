"""``torch.distributed.checkpoint.async_save`` of sharded models: the state of the moment it was called at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.torch_version import TorchVersion

import torch_impl
from tests.support.ranks import RankGroup, children, on_ranks
from tests.support.torch_impl.toy import Toy, batch, mse, sharded_toy

# Before, torch's copies of sharded tensors lose their shape.
copies_shapes = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13.0a0", reason="refused with what to use instead, see below"
)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, world: int) -> None:
    rank = dist.get_rank()
    for step in steps:
        tokens, targets = batch(step, world, 1)
        part = rank if dist.get_world_size() == world else slice(None)
        optimizer.zero_grad()
        mse(model, tokens[part], targets[part]).backward()
        optimizer.step()


def saved(how: str, strategy: str, path: str) -> None:
    model = sharded_toy(strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, range(2), 2)
    weights, moments = get_state_dict(model, optimizer)
    # The training below communicates meanwhile.
    group = dist.new_group()
    with children():
        future: Any = dcp.async_save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=path,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType(how),
        )
        train(model, optimizer, range(2, 4), 2)
        getattr(future, "upload_completion", future).result()


def goes_on(path: str, strategy: str) -> None:
    world = dist.get_world_size()
    model, reference = sharded_toy(strategy=strategy), Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.05)
    weights, moments = get_state_dict(model, optimizer)
    for param in model.parameters():
        param.data.zero_()
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(4):
        tokens, targets = batch(step, 2, 1)
        expected.zero_grad()
        mse(reference, tokens, targets).backward()
        expected.step()
    # As many different rows on each rank, whose mean loss is that of the whole batch.
    for step in range(2, 4):
        tokens, targets = batch(step, 2, 1)
        optimizer.zero_grad()
        mine = slice(dist.get_rank(), None, world)
        mse(model, tokens.view(-1)[mine], targets.view(-1)[mine]).backward()
        optimizer.step()
    for (name, param), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            param.full_tensor().detach(),
            want.detach(),
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.fast_cases("thread-no_shard")
@copies_shapes
@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        ("thread", "optim_grads_params"),
        ("thread", "no_shard"),
        pytest.param("process", "optim_grads_params", marks=pytest.mark.slow),
    ],
)
def test_an_asynchronous_save_holds_what_the_model_was_when_it_was_called(
    ranks: RankGroup, tmp_path: Path, how: str, strategy: str
) -> None:
    ranks.run(2, saved, how, strategy, str(tmp_path / "saved"))
    for world, other in ((4, "optim_grads_params"), (1, "no_shard")):
        ranks.run(world, goes_on, str(tmp_path / "saved"), other)


@on_ranks(2)
def test_what_torch_would_copy_wrongly_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, store_param_remainders=True)
    model = sharded_toy(strategy="optim", mp_policy=policy)
    group = dist.new_group()
    # A rank that raises and ends while the other still connects would be the other's error.
    dist.barrier(group)
    with pytest.raises(
        RuntimeError, match=r"cannot copy the remainders .*: use torch_impl\.save_checkpoint_async"
    ):
        dcp.async_save(model.state_dict(), checkpoint_id=path, process_group=group)
    # How older versions of torch begin.
    with pytest.raises(RuntimeError, match=r"of this torch cannot .*: use torch_impl\.save_checkpoint_async"):
        sharded_toy().embed.weight.new_empty([], device="cpu")
