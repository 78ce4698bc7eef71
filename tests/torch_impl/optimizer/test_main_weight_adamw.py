"""MainWeightAdamW is fused AdamW, bit for bit, on whatever rows a rank holds."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Toy, local_loss, sharded_toy, whole
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.tensor import RowDTensor

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator) for param in Toy().parameters()]


def set_gradients(model: nn.Module, step: int) -> None:
    for param, value in zip(model.parameters(), gradients(step), strict=True):
        param.grad = torch.zeros_like(param).copy_(value)


def bitwise(strategy: str) -> tuple[int, int]:
    model, reference = sharded_toy(strategy=strategy), Toy()
    rows = [nn.Parameter(local_of(param).detach().clone()) for param in model.parameters()]
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), **OPTIONS)
    on_rows = torch.optim.AdamW(rows, fused=True, **OPTIONS)
    on_whole = torch.optim.AdamW(reference.parameters(), fused=True, **OPTIONS)
    for step in range(10):
        set_gradients(model, step)
        set_gradients(reference, step)
        for row, param in zip(rows, model.parameters(), strict=True):
            row.grad = local_of(param.grad).clone()
        for opt in (optimizer, on_rows, on_whole):
            opt.step()
        for param, row, want in zip(model.parameters(), rows, reference.parameters(), strict=True):
            assert torch.equal(local_of(param), row)
            torch.testing.assert_close(whole(param), want.detach(), rtol=1e-6, atol=1e-6)
            state = optimizer.state[param]
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            for key in ("exp_avg", "exp_avg_sq"):
                assert type(state[key]) is RowDTensor
                assert state[key].placements == param.placements
                assert torch.equal(local_of(state[key]), on_rows.state[row][key])
            assert type(state["step"]) is torch.Tensor
            assert (state["step"].dtype, state["step"].shape) == (torch.float32, ())
            assert state["step"].item() == step + 1
    empty = sum(local_of(param).numel() == 0 for param in model.parameters())
    return empty, len(optimizer.state)


@pytest.mark.fast_cases("no_shard", "optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_updates_equal_fused_adamw_on_the_same_rows_bit_for_bit(ranks: RankGroup, strategy: str) -> None:
    count = len(list(Toy().parameters()))
    results = ranks.run(4, bitwise, strategy)
    assert [entries for _, entries in results] == [count] * 4
    if strategy != "no_shard":
        assert any(empty for empty, _ in results), "no rank had an empty shard: the test proves too little"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ordinary_tensors_are_updated_like_fused_adamw(dtype: torch.dtype) -> None:
    mine, other = Toy().to(dtype), Toy().to(dtype)
    mine.head.bias.requires_grad_(False)
    other.head.bias.requires_grad_(False)
    stored = torch.float32 if dtype == torch.float64 else dtype
    optimizer = torch_impl.MainWeightAdamW(
        mine.parameters(), **OPTIONS, exp_avg_dtype=stored, exp_avg_sq_dtype=stored
    )
    expected = torch.optim.AdamW(other.parameters(), fused=True, **OPTIONS)
    for step in range(3):
        for model in (mine, other):
            for param, grad in zip(model.parameters(), gradients(step), strict=True):
                param.grad = grad.to(dtype) if param.requires_grad else None
        optimizer.step()
        expected.step()
    for param, want in zip(mine.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, want)


def groups_and_schedules() -> None:
    model, reference = sharded_toy(), Toy()

    def build(
        target: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: bool
    ) -> torch.optim.Optimizer:
        decayed = [param for param in target.parameters() if param.ndim >= 2]
        rest = [param for param in target.parameters() if param.ndim < 2]
        return optimizer_class(
            [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "lr": 1e-3}], lr=1e-2, **options
        )

    optimizers = [build(model, torch_impl.MainWeightAdamW), build(reference, torch.optim.AdamW, fused=True)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4) for opt in optimizers]
    for step in range(4):
        set_gradients(model, step)
        set_gradients(reference, step)
        if step == 2:  # a parameter without gradient keeps its weight and its step count
            model.head.weight.grad = reference.head.weight.grad = None
        for stepped in (*optimizers, *schedules):
            stepped.step()
    for param, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param), want.detach(), rtol=1e-6, atol=1e-7)
    assert optimizers[0].state[model.head.weight]["step"].item() == 3


def test_parameter_groups_schedules_and_missing_gradients_act_as_in_torch(ranks: RankGroup) -> None:
    ranks.run(3, groups_and_schedules)


@on_ranks(3)
def test_creating_state_changes_no_weight_and_keeps_existing_state() -> None:
    model = sharded_toy()
    model.blocks[0].gain.requires_grad_(False)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = [local_of(param)._version for param in model.parameters()]
    optimizer.init_state()
    for param, version, want in zip(model.parameters(), before, Toy().parameters(), strict=True):
        assert torch.equal(whole(param), want)
        assert local_of(param)._version == version
        if param.requires_grad:
            state = optimizer.state[param]
            assert state["step"].item() == 0
            assert not whole(state["exp_avg"]).any()
            assert not whole(state["exp_avg_sq"]).any()
    assert model.blocks[0].gain not in optimizer.state
    set_gradients(model, 0)
    optimizer.step()
    first = optimizer.state[model.head.weight]["exp_avg"]
    optimizer.init_state()
    assert optimizer.state[model.head.weight]["exp_avg"] is first


@pytest.mark.fast_cases("state_dict")
@pytest.mark.parametrize("how", ["state_dict", "get_optimizer_state_dict"])
@on_ranks(3)
def test_a_loaded_state_goes_on_bit_for_bit(how: str) -> None:

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            local_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = sharded_toy()
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), **OPTIONS)
    train(model, optimizer, range(3))
    other = sharded_toy()
    loaded = torch_impl.MainWeightAdamW(other.parameters(), lr=9.0, weight_decay=9.0)
    other.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    if how == "state_dict":
        loaded.load_state_dict(optimizer.state_dict())
    else:
        set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, optimizer))
        for param, want in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(whole(param), whole(want))
    for key, value in OPTIONS.items():
        assert tuple(torch.tensor(loaded.param_groups[0][key]).view(-1).tolist()) == tuple(
            torch.tensor(value).view(-1).tolist()
        )
    # The loaded state may share memory with its source, so each goes on from a state of its own.
    for state in loaded.state.values():
        for key in list(state):
            state[key] = state[key].clone()
    train(model, optimizer, range(3, 5))
    train(other, loaded, range(3, 5))
    for param, want in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(param), whole(want))


@on_ranks(2)
def test_state_of_another_layout_is_refused() -> None:
    rows = torch_impl.MainWeightAdamW(sharded_toy().parameters())
    rows.init_state()
    other = torch_impl.MainWeightAdamW(sharded_toy(granularity="tensor").parameters())
    with pytest.raises(ValueError, match=r"exp_avg of parameter .* of shape .*: expected placements"):
        other.load_state_dict(rows.state_dict())


@on_ranks(2)
def test_a_gradient_placed_otherwise_than_its_parameter_is_refused() -> None:
    model = sharded_toy()
    optimizer = torch_impl.MainWeightAdamW(model.parameters())
    set_gradients(model, 0)
    model.head.weight.grad = sharded_toy(strategy="no_shard").head.weight.detach()
    with pytest.raises(
        ValueError, match=r"gradient of parameter .head.weight. of shape \(1, 5\): expected placements"
    ):
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}, {"lr": float("nan")}],
)
def test_hyperparameters_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=f"expected .*{'betas' if 'betas' in options else next(iter(options))}"
    ):
        torch_impl.MainWeightAdamW([nn.Parameter(torch.ones(1))], **options)


def test_an_ordinary_state_dict_survives_torch_save() -> None:
    model = Toy()
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), **OPTIONS)
    set_gradients(model, 0)
    optimizer.step()
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    other = torch_impl.MainWeightAdamW(Toy().parameters())
    other.load_state_dict(torch.load(stream))
    assert other.param_groups[0]["betas"] == OPTIONS["betas"]
    assert all(state["step"].item() == 1 for state in other.state.values())


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "no 'eps' in group 0"),
        (lambda params: torch.optim.RMSprop(params), "no 'betas' in group 0"),
        (lambda params: torch.optim.Adafactor(params), "eps: expected a number, got"),
        (lambda params: torch.optim.Adamax(params), "expected exp_avg, exp_avg_sq, step"),
        (lambda params: torch_impl.MainWeightSGD(params, lr=0.1), "no 'eps' in group 0"),
    ],
)
def test_state_of_another_kind_of_optimizer_is_refused_by_name(other: Any, named: str) -> None:
    model = Toy()
    source = other(model.parameters())
    set_gradients(model, 0)
    source.step()
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), **OPTIONS)
    optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="expected") as raised:
        optimizer.load_state_dict(source.state_dict())
    assert named in str(raised.value)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    # With the state as it was, it goes on.
    optimizer.step()
    assert all(state["step"].item() == 2 for state in optimizer.state.values())


def test_a_closure_is_evaluated_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch_impl.MainWeightAdamW([weight], lr=0.1)

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert not torch.equal(weight, torch.ones(3))
