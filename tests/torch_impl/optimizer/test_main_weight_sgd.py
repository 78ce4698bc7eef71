"""MainWeightSGD is torch.optim.SGD, bit for bit, however rows are cut."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import Toy, full_batch_loss, sharded_toy, whole
from tests.torch_impl.optimizer.test_moment_dtypes import random_gradients
from torch_impl import MainWeightSGD, load_checkpoint, save_checkpoint
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.tensor import RowDTensor

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 3e-2},
    "momentum": {"lr": 3e-2, "momentum": 0.9},
    "dampening": {"lr": 3e-2, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"lr": 3e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"lr": 3e-2, "momentum": 0.9, "maximize": True, "weight_decay": 0.1},
}
LOW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def bitwise(strategy: str, name: str) -> int:
    model, reference = sharded_toy(strategy=strategy), Toy()
    optimizer = MainWeightSGD(model.parameters(), **OPTIONS[name])
    expected = torch.optim.SGD(reference.parameters(), **OPTIONS[name])
    for step in range(6):
        for module in (model, reference):
            random_gradients(module, step)
        optimizer.step()
        expected.step()
        for param, want in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(whole(param), want.detach())
            state = optimizer.state[param]
            if name == "plain":
                assert state == {}
                continue
            assert set(state) == {"step", "momentum_buffer"}
            assert type(state["momentum_buffer"]) is RowDTensor
            assert torch.equal(whole(state["momentum_buffer"]), expected.state[want]["momentum_buffer"])
            assert state["step"].item() == step + 1
    return sum(local_of(param).numel() == 0 for param in model.parameters())


@pytest.mark.fast_cases(
    "optim_grads_params-momentum", "no_shard-dampening", "no_shard-maximize", "no_shard-nesterov"
)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_updates_equal_sgd_of_whole_tensors_bit_for_bit(ranks: RankGroup, strategy: str, name: str) -> None:
    empty = ranks.run(4, bitwise, strategy, name)
    assert strategy == "no_shard" or any(empty), "no rank had an empty shard: the test proves too little"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["dampening", "nesterov"])
def test_ordinary_tensors_are_updated_like_sgd(dtype: torch.dtype, name: str) -> None:
    mine, other = Toy().to(dtype), Toy().to(dtype)
    optimizer = MainWeightSGD(mine.parameters(), **OPTIONS[name])
    expected = torch.optim.SGD(other.parameters(), foreach=True, **OPTIONS[name])
    for step in range(4):
        for module in (mine, other):
            random_gradients(module, step)
        optimizer.step()
        expected.step()
    for param, want in zip(mine.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, want)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("momentum", [torch.float32, torch.bfloat16])
def test_half_precision_weights_are_updated_in_float32_and_rounded_once(
    momentum: torch.dtype, name: str
) -> None:
    mine, exact = Toy().bfloat16(), Toy().bfloat16().float()
    optimizer = MainWeightSGD(mine.parameters(), **OPTIONS[name], momentum_dtype=momentum)
    expected = torch.optim.SGD(exact.parameters(), foreach=True, **OPTIONS[name])
    for step in range(4):
        random_gradients(mine, step)
        for param, exact_param in zip(mine.parameters(), exact.parameters(), strict=True):
            exact_param.grad = param.grad.float()
        optimizer.step()
        expected.step()
        for param, exact_param in zip(mine.parameters(), exact.parameters(), strict=True):
            assert torch.equal(param.detach(), exact_param.detach().bfloat16())
            exact_param.data.copy_(param)
            if name != "plain":
                kept = optimizer.state[param]["momentum_buffer"]
                assert kept.dtype == momentum
                assert torch.equal(kept, expected.state[exact_param]["momentum_buffer"].to(momentum))
                expected.state[exact_param]["momentum_buffer"].copy_(kept)


def test_gradients_are_left_alone() -> None:
    model = Toy()
    random_gradients(model, 0)
    before = [param.grad.clone() for param in model.parameters()]
    MainWeightSGD(model.parameters(), **OPTIONS["nesterov"]).step()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_momentum_is_that_of_float32_rounded_in_each_step(dtype: torch.dtype) -> None:
    model, reference = Toy(), Toy()
    optimizer = MainWeightSGD(model.parameters(), **OPTIONS["momentum"], momentum_dtype=dtype)
    expected = torch.optim.SGD(reference.parameters(), **OPTIONS["momentum"])
    (moment_format,) = optimizer._formats
    for step in range(5):
        for module in (model, reference):
            random_gradients(module, step)
        optimizer.step()
        expected.step()
        for param, want in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param, want)
            moment = expected.state[want]["momentum_buffer"]
            stored = moment_format.zeros(want, False)
            moment_format.encode(
                moment.clone(), stored["momentum_buffer"], stored.get("momentum_buffer_scale"), 0, 0
            )
            for key, value in stored.items():
                assert torch.equal(optimizer.state[param][key].float(), value.float())
            moment_format.decode(stored["momentum_buffer"], stored.get("momentum_buffer_scale"), moment)


def continued(path: str, dtype: torch.dtype, strategy: str, saves: bool) -> list[torch.Tensor]:
    """Three steps, saved or loaded, and two more; gradients of a loss, other data on every rank."""
    model = sharded_toy(strategy=strategy)
    optimizer = MainWeightSGD(
        model.parameters(), **OPTIONS["dampening"], momentum_dtype=dtype, offload_fraction=0.5
    )
    if saves:
        for step in range(3):
            random_gradients(model, step)
            optimizer.step()
        save_checkpoint(path, model, optimizer)
    else:
        optimizer.param_groups[0]["lr"] = 9.0
        load_checkpoint(path, model, optimizer)
    for step in range(3, 5):
        random_gradients(model, step)
        optimizer.step()
    with torch.no_grad():
        loss = full_batch_loss(model)
    return [loss, *(whole(param) for param in model.parameters())]


@pytest.mark.fast_cases("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_checkpoint_goes_on_on_other_ranks(ranks: RankGroup, tmp_path: Any, dtype: torch.dtype) -> None:
    path = str(tmp_path / "checkpoint")
    saved = ranks.run(4, continued, path, dtype, "optim_grads_params", True)[0]
    loaded = ranks.run(2, continued, path, dtype, "optim", False)[0]
    assert all(torch.equal(a, b) for a, b in zip(saved[1:], loaded[1:], strict=True))


def test_state_of_torch_sgd_is_taken_over_as_one_past_its_first_step() -> None:
    model, other = Toy(), Toy()
    stock = torch.optim.SGD(other.parameters(), **OPTIONS["dampening"])
    random_gradients(other, 0)
    stock.step()
    model.load_state_dict(other.state_dict())
    mine = MainWeightSGD(model.parameters(), **OPTIONS["dampening"])
    mine.load_state_dict(copy.deepcopy(stock.state_dict()))
    for module in (model, other):
        random_gradients(module, 1)
    mine.step()
    stock.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "expected lr >= 0, got -1"),
        ({"momentum": -0.1}, "expected momentum >= 0"),
        ({"nesterov": True}, "nesterov: expected momentum > 0 and dampening = 0"),
        ({"momentum_dtype": torch.int8}, "momentum_dtype: expected one of float32"),
        ({"offload_fraction": 2.0}, "offload_fraction: expected 0 to 1"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MainWeightSGD([nn.Parameter(torch.ones(2))], **options)


def test_momentum_may_be_switched_on_and_off() -> None:
    model = Toy()
    reference = copy.deepcopy(model)
    optimizer, expected = MainWeightSGD(model.parameters()), torch.optim.SGD(reference.parameters())
    for step, momentum in enumerate((0.0, 0.0, 0.9, 0.9, 0.0, 0.9)):
        for opt, own in ((optimizer, model), (expected, reference)):
            opt.param_groups[0]["momentum"] = momentum
            random_gradients(own, step)
            opt.step()
        for param, want in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param, want)


def test_a_checkpoint_without_momentum_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = MainWeightSGD(model.parameters(), lr=0.5)
    save_checkpoint(tmp_path / "a", model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    load_checkpoint(tmp_path / "a", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_without_momentum_there_is_no_state() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = MainWeightSGD([parameter], lr=0.1)
    optimizer.init_state()
    assert optimizer.state[parameter] == {}
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    assert optimizer.state[parameter] == {}
    assert optimizer.state_dict()["state"] in ({}, {0: {}})
