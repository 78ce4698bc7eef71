"""Pickles and copies of sharded tensors: ``torch.save`` of state dicts on each rank, as verl saves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.dtensor_cuts import FEW, placed
from tests.support.torch_impl.toy import Toy, assert_same_weights, batch, local_loss, mse, sharded_toy, whole
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.placement import RowShard
from torch_impl.dtensor.tensor import RowDTensor


@FEW
@on_ranks(4)
def test_pickles_and_deep_copies_are_like_the_tensor_in_memory_of_their_own(
    tmp_path: Path, few: bool
) -> None:
    path = str(tmp_path)
    file = Path(path) / f"rank-{dist.get_rank()}"
    for cut, full, tensor in placed(few=few):
        for weight in (tensor, nn.Parameter(tensor), nn.Parameter(tensor, requires_grad=False)):
            torch.save({"weight": weight}, file)
            for made in (
                pickle.loads(pickle.dumps(weight)),
                torch.load(file, weights_only=True)["weight"],
                torch.load(file, weights_only=False)["weight"],
                copy.deepcopy(weight),
            ):
                assert type(made) is RowDTensor, cut
                assert isinstance(made, nn.Parameter) == isinstance(weight, nn.Parameter)
                assert made.requires_grad == weight.requires_grad
                assert (made.placements, made.shape, made.device_mesh) == (
                    weight.placements,
                    weight.shape,
                    weight.device_mesh,
                )
                assert torch.equal(local_of(made), local_of(tensor)), cut
                assert torch.equal(made.full_tensor(), full), cut
                with torch.no_grad():
                    made.mul_(0)
        assert torch.equal(tensor.full_tensor(), full)
    # With what a local tensor has to know of its whole.
    stack = pickle.loads(pickle.dumps(RowShard((0, 1, 1, 3, 6), 1, (2, 3, 4))))
    assert (stack, stack.shape) == (RowShard((0, 1, 1, 3, 6)), (2, 3, 4))


def model_of(sharding: str) -> nn.Module:
    """A scalar would be refused by FSDP2."""
    if sharding == "fsdp2":
        model = Toy()
        for block in model.blocks:
            block.gain = nn.Parameter(block.gain.detach().view(1))
            fsdp.fully_shard(block)
        return fsdp.fully_shard(model)
    if sharding == "hfsdp":
        return sharded_toy(strategy="hfsdp", mesh=init_device_mesh("cpu", (2, 1)))
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, store_param_remainders=True)
    return (
        sharded_toy(strategy="optim_grads", mp_policy=policy) if sharding == "remainders" else sharded_toy()
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "main": lambda params: torch_impl.MainWeightAdamW(params, lr=0.05),
    "float8": lambda params: torch_impl.MainWeightAdamW(
        params,
        lr=0.05,
        exp_avg_dtype=torch.float8_e4m3fn,
        exp_avg_sq_dtype=torch.float16,
        offload_fraction=0.5,
    ),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()


def saved(sharding: str, optimizer: str, path: str) -> list[torch.Tensor]:
    model = model_of(sharding)
    ours = OPTIMIZERS[optimizer](model.parameters())
    train(model, ours, range(2))
    torch.save(model.state_dict(), f"{path}/model-{dist.get_rank()}.pt")
    torch.save(ours.state_dict(), f"{path}/optimizer-{dist.get_rank()}.pt")
    train(model, ours, range(2, 4))
    return [param.full_tensor().detach().float() for param in model.parameters()]


def resumed(sharding: str, optimizer: str, path: str, assign: bool) -> list[torch.Tensor]:
    """In new process groups, as after a restart."""
    model = model_of(sharding)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    ours = OPTIMIZERS[optimizer](model.parameters())
    model.load_state_dict(torch.load(f"{path}/model-{dist.get_rank()}.pt", weights_only=True), assign=assign)
    ours.load_state_dict(torch.load(f"{path}/optimizer-{dist.get_rank()}.pt", weights_only=True))
    train(model, ours, range(2, 4))
    return [param.full_tensor().detach().float() for param in model.parameters()]


@pytest.mark.fast_cases("sharded-main", "remainders-main", "sharded-float8")
@pytest.mark.parametrize(
    ("sharding", "optimizer"),
    [
        ("fsdp2", "adamw"),
        ("sharded", "adamw"),
        ("sharded", "main"),
        ("sharded", "float8"),
        ("hfsdp", "adamw"),
        ("remainders", "main"),
    ],
)
def test_a_run_goes_on_bit_for_bit_from_what_each_rank_saved(
    ranks: RankGroup, tmp_path: Path, sharding: str, optimizer: str
) -> None:
    wanted = ranks.run(2, saved, sharding, optimizer, str(tmp_path))
    for assign in (False, True) if sharding == "sharded" and optimizer == "adamw" else (False,):
        weights = ranks.run(2, resumed, sharding, optimizer, str(tmp_path), assign)
        for got, want in zip(weights[0], wanted[0], strict=True):
            assert torch.equal(got, want)


def reference() -> None:
    """The run that is saved and resumed above is that of one process."""
    model, whole_model = sharded_toy(), Toy()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.05), range(2))
    optimizer = torch.optim.AdamW(whole_model.parameters(), lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        mse(whole_model, *batch(step, dist.get_world_size(), 1)).backward()
        optimizer.step()
    assert_same_weights(model, whole_model)


def other_ranks(path: str) -> None:
    model = sharded_toy()
    state = torch.load(f"{path}/model-0.pt", weights_only=True)
    with pytest.raises(RuntimeError, match="expected tensors of one shape and placement"):
        model.load_state_dict(state)
    assert torch.equal(whole(model.embed.weight), Toy().embed.weight)


def test_what_was_saved_on_other_ranks_is_refused(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(2, reference)
    ranks.run(2, saved, "sharded", "adamw", str(tmp_path))
    ranks.run(3, other_ranks, str(tmp_path))
