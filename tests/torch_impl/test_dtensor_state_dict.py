"""State dicts of sharded models, gathered, offloaded, broadcast and assigned: right or an error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.ranks import RankGroup
from tests.torch_impl.toy import Toy, sharded_toy, whole
from torch_impl.dtensor import RowDTensor


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def gathered(cpu_offload: bool) -> None:
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


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_full_state_dicts_hold_the_whole_values(ranks: RankGroup, cpu_offload: bool) -> None:
    ranks.run(3, gathered, cpu_offload)


def sharded_round_trip(cpu_offload: bool) -> None:
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


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_sharded_state_dicts_load_what_they_saved(ranks: RankGroup, cpu_offload: bool) -> None:
    ranks.run(3, sharded_round_trip, cpu_offload)


def distributed_whole(broadcast: bool) -> None:
    model, reference = sharded_toy(), Toy()
    expected = trained(reference)
    weights, moments = get_model_state_dict(reference), get_optimizer_state_dict(reference, expected)
    if broadcast and dist.get_rank() > 0:
        weights, moments = {}, {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    before = {name: whole(value) for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError):
        set_model_state_dict(model, weights, options=options)
    with pytest.raises(RuntimeError):
        set_optimizer_state_dict(model, trained(model), moments, options=options)
    if not broadcast:
        model = sharded_toy()
        with pytest.raises(RuntimeError, match="unsupported placements RowShard"):
            set_model_state_dict(model, weights, options=options)
        assert all(torch.equal(whole(value), before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("broadcast", [False, True])
def test_whole_state_dicts_are_refused_by_the_functions_that_would_cut_them_evenly(
    ranks: RankGroup, broadcast: bool
) -> None:
    ranks.run(3, distributed_whole, broadcast)
