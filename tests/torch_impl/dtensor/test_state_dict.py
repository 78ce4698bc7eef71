"""State dicts of sharded models, gathered, offloaded, broadcast and assigned: right or an error."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    Toy,
    assert_same_weights,
    full_batch_loss,
    local_loss,
    sharded_toy,
    whole,
)
from torch_impl.checkpoint import full_state_dict
from torch_impl.dtensor.tensor import RowDTensor


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("cpu_offload", [False, True])
@on_ranks(3)
def test_full_state_dicts_hold_the_whole_values(cpu_offload: bool) -> None:
    model, reference = sharded_toy(), Toy()
    optimizer, expected = trained(model), trained(reference)
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    weights = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options).get("state", {})
    if cpu_offload and dist.get_rank() > 0:
        assert (weights, moments) == ({}, {})
        return
    for name, value in get_model_state_dict(reference).items():
        assert not isinstance(weights[name], RowDTensor)
        torch.testing.assert_close(weights[name], value)
    for name, state in get_optimizer_state_dict(reference, expected)["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(moments[name][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("cpu_offload", [False, True])
@on_ranks(3)
def test_sharded_state_dicts_load_what_they_saved(cpu_offload: bool) -> None:
    model = sharded_toy()
    optimizer = trained(model)
    options = StateDictOptions(cpu_offload=cpu_offload)
    weights = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    other = sharded_toy()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    set_model_state_dict(other, weights)
    set_optimizer_state_dict(other, fresh, moments)
    for param, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(param), whole(mine))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(optimizer.state[param][key]), whole(fresh.state[mine][key]))
    torch.testing.assert_close(other(torch.arange(4)), model(torch.arange(4)))


@pytest.mark.fast_cases("True-no_shard")
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@pytest.mark.parametrize("broadcast", [False, True])
@on_ranks(3)
def test_whole_state_dicts_load(broadcast: bool, strategy: str) -> None:
    """From one process's state to a sharded model and on by one step."""
    model, reference = sharded_toy(strategy=strategy), Toy(seed=5)
    expected = trained(reference)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = get_model_state_dict(reference), get_optimizer_state_dict(reference, expected)
    # Steps are handed over as they are, not copied.
    weights, moments = copy.deepcopy(state) if dist.get_rank() == 0 or not broadcast else ({}, {})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    model(torch.arange(4))
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, moments, options=options)
    for step in range(2):
        torch.testing.assert_close(model(torch.arange(4)), reference(torch.arange(4)))
        for module, its in ((model, optimizer), (reference, expected)):
            module(torch.arange(step, step + 4)).sum().backward()
            its.step()
            its.zero_grad()
    assert_same_weights(model, reference)


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@pytest.mark.parametrize("broadcast", [False, True])
@on_ranks(3)
def test_a_model_on_the_meta_device_gets_memory_and_values(broadcast: bool, strategy: str) -> None:
    reference = Toy(seed=5)
    with torch.device("meta"):
        model = sharded_toy(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = dist.get_rank() == 0 or not broadcast
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, reference.state_dict() if mine else {}, options=options)
    assert_same_weights(model, reference, rtol=0, atol=0)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for module, its in ((model, optimizer), (reference, expected)):
        module(torch.arange(4)).sum().backward()
        its.step()
    assert_same_weights(model, reference)


def own_rows_twice() -> None:
    """Values that are broadcast go into the units' memory: rows of their own beside it would be as much again."""
    made: list[torch.Size] = []
    distribute = full_state_dict.distribute

    def noting(whole: torch.Tensor, *args: Any) -> RowDTensor:
        made.append(whole.shape)
        return distribute(whole, *args)

    with torch.device("meta"):
        model = sharded_toy()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with mock.patch.object(full_state_dict, "distribute", noting):
        set_model_state_dict(model, Toy().state_dict() if dist.get_rank() == 0 else {}, options=options)
    assert made == []


def test_a_broadcast_onto_meta_makes_no_rows_beside_those_of_the_units(ranks: RankGroup) -> None:
    ranks.run(2, own_rows_twice)


@pytest.mark.parametrize("broadcast", [False, True])
@on_ranks(2)
def test_a_load_that_could_leave_weights_without_values_is_refused(broadcast: bool) -> None:
    weights = Toy().state_dict() if dist.get_rank() == 0 or not broadcast else {}
    with torch.device("meta"):
        model = sharded_toy()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
    with pytest.raises(
        RuntimeError,
        match=r"embed.weight' is on the meta device: expected strict=True.*call model\.to_empty\(device=\.\.\.\) first",
    ):
        set_model_state_dict(model, dict(weights), options=options)
    assert all(param.is_meta for param in model.parameters())


class Counted(nn.Module):
    """Its only buffers are a number that is saved and one that is not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.tensor(seed + 4))
        self.register_buffer("scratch", torch.tensor(1.0), persistent=False)


@pytest.mark.parametrize("everywhere", [True, False])
@on_ranks(2)
def test_a_buffer_without_dimensions_that_is_alone_on_the_meta_device_is_loaded(everywhere: bool) -> None:
    rank = dist.get_rank()
    with torch.device("meta" if everywhere or rank else "cpu"):
        model = Counted(seed=1)
    torch_impl.fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, Counted(seed=2).state_dict() if rank == 0 else {}, options=options)
    assert (model.count.device.type, model.count.item()) == ("cpu", 6)
    assert model.scratch.is_meta == (everywhere or rank > 0)


class Buffered(nn.Module):
    """Without a scalar parameter, which FSDP2 refuses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed, self.norm = nn.Embedding(9, 5), nn.BatchNorm1d(5)
            self.head = nn.Linear(5, 1)
            self.norm.running_mean.uniform_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)).relu()).squeeze(-1)


@pytest.mark.fast_cases(
    "True-cpu-False-None",
    "False-meta-False-optim",
    "False-meta-True-no_shard",
    "False-cpu-False-None",
    "False-meta-True-None",
)
@pytest.mark.parametrize(
    ("theirs", "elsewhere", "empty", "strategy"),
    [
        (True, "meta", True, None),
        (True, "cpu", False, None),
        (False, "meta", True, None),
        (False, "meta", False, None),
        (False, "cpu", False, None),
        (False, "meta", True, "no_shard"),
        (False, "meta", False, "optim"),
    ],
)
@on_ranks(3)
def test_the_first_ranks_weights_are_loaded_on_all_ranks(
    theirs: bool, elsewhere: str, empty: bool, strategy: str | None
) -> None:
    """As verl loads: the first rank has the weights; others are ``elsewhere``, without values or with other ones."""
    rank = dist.get_rank()
    with torch.device("cpu" if rank == 0 else elsewhere):
        model = Buffered(seed=rank)
    weights = {name: value.clone() for name, value in model.state_dict().items()} if rank == 0 else {}
    fully_shard = fsdp.fully_shard if theirs else torch_impl.fully_shard
    options = {} if strategy is None else {"strategy": strategy}
    for layer in (model.embed, model.head):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if empty:
        model = model.to("cpu") if rank == 0 else model.to_empty(device="cpu")
    whole_from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=whole_from_first)
    reference = Buffered(seed=0)
    for name, value in reference.state_dict().items():
        mine = model.state_dict()[name]
        assert torch.equal(mine.full_tensor() if isinstance(mine, DTensor) else mine, value), name
    # The statistics of a batch would be those of each rank's own.
    model.eval(), reference.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad(), expected.zero_grad()
        local_loss(model, step).backward()
        full_batch_loss(reference, step).backward()
        optimizer.step(), expected.step()
    for param, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor().detach(), want.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("empty", [False, True])
@on_ranks(3)
def test_ranks_that_differ_and_load_nothing_are_refused_on_all_ranks(empty: bool) -> None:
    rank = dist.get_rank()
    with torch.device("cpu" if rank == 0 else "meta"):
        model = sharded_toy()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    if empty:
        model.to_empty(device="cpu")
        message = "sharded with values on some ranks and on the meta device on others, and no values were loaded since"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                model(torch.arange(4))
    else:
        with pytest.raises(
            Exception, match=r"expected strict=True.*call model\.to_empty\(device=\.\.\.\) first"
        ):
            set_model_state_dict(model, Toy().state_dict() if rank == 0 else {}, options=options)
        assert all(param.is_meta == (rank > 0) for param in model.parameters())
        # Waits for nobody: collectives after the error go on.
        dist.barrier()
        model.to_empty(device="cpu")
    set_model_state_dict(model, Toy(seed=2).state_dict() if rank == 0 else {}, options=options)
    assert_same_weights(model, Toy(seed=2), rtol=0, atol=0)
    model(torch.arange(4)).sum().backward()


@on_ranks(3)
def test_whole_tensors_of_another_shape_are_refused_on_all_ranks() -> None:
    model = sharded_toy()
    weights = {name: torch.zeros(2, 2) for name in model.state_dict()}
    before = {name: whole(value) for name, value in model.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(
        RuntimeError, match=r"^embed.weight: expected .* \(9, 5\) .*, got one of shape \(2, 2\)"
    ):
        set_model_state_dict(model, weights if dist.get_rank() == 0 else {}, options=options)
    assert all(torch.equal(whole(value), before[name]) for name, value in model.state_dict().items())


@on_ranks(3)
def test_torchs_own_tensors_load_as_before() -> None:
    """Torch's own sharded tensors in the same process are loaded as before."""
    linear = fsdp.fully_shard(nn.Linear(3, 5))
    weights = {"weight": torch.arange(15.0).view(5, 3), "bias": torch.ones(5)}
    for broadcast in (False, True):
        nn.init.zeros_(linear.weight)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(linear, dict(weights), options=options)
        assert torch.equal(linear.weight.full_tensor(), weights["weight"])
