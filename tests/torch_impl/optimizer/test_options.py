"""MainWeightAdamW among other optimizers: its options, its state dicts, and misuse that must not pass silently."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.toy import Toy, sharded_toy, whole
from tests.torch_impl.optimizer.test_main_weight_adamw import OPTIONS, gradients, set_gradients
from torch_impl import MainWeightAdamW
from torch_impl.dtensor.local import local_of


def weights(shape: tuple[int, ...] = (4, 6), count: int = 1) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]


def with_gradients(params: list[nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + index)
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)


@pytest.mark.parametrize("maximize", [False, True])
def test_a_tensor_learning_rate_and_maximize_act_as_in_torch(maximize: bool) -> None:
    mine, theirs = weights(count=2), weights(count=2)
    rates = [torch.tensor(0.1) for _ in range(2)]
    optimizer = MainWeightAdamW(mine, lr=rates[0], maximize=maximize)
    expected = torch.optim.AdamW(theirs, lr=rates[1], maximize=maximize, fused=True)
    schedules = [torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5) for opt in (optimizer, expected)]
    for step in range(5):
        with_gradients(mine, step)
        with_gradients(theirs, step)
        for stepped in (optimizer, expected, *schedules):
            stepped.step()
    assert optimizer.param_groups[0]["lr"] is rates[0]
    assert rates[0].item() == rates[1].item() != 0.1
    for param, want in zip(mine, theirs, strict=True):
        assert torch.equal(param, want)


def test_groups_added_later_are_updated_with_their_own_options() -> None:
    mine, theirs = weights(count=3), weights(count=3)
    optimizer = MainWeightAdamW(mine[:1], lr=0.1)
    expected = torch.optim.AdamW(theirs[:1], lr=0.1, fused=True)
    for step in range(4):
        if step == 2:
            for opt, params in ((optimizer, mine), (expected, theirs)):
                opt.add_param_group({"params": params[1:], "lr": 0.01, "weight_decay": 0.5})
        with_gradients(mine, step)
        with_gradients(theirs, step)
        optimizer.step()
        expected.step()
    for param, want in zip(mine, theirs, strict=True):
        assert torch.equal(param, want)
    with pytest.raises(ValueError, match="expected lr >= 0, got -1"):
        optimizer.add_param_group({"params": weights((2,)), "lr": -1})
    assert len(optimizer.param_groups) == 2


def test_amsgrad_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(ValueError, match="expected amsgrad=False, got True; use"):
        MainWeightAdamW(weights(), amsgrad=True)
    other = torch.optim.AdamW(weights(), amsgrad=True)
    with_gradients(other.param_groups[0]["params"], 0)
    other.step()
    optimizer = MainWeightAdamW(weights(), lr=0.5)
    with pytest.raises(ValueError, match="expected amsgrad=False, got True"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match=r"expected lr of one element, got a tensor of shape \(2,\)"):
        MainWeightAdamW(weights(), lr=torch.ones(2))


def test_the_state_of_stock_adamw_is_taken_over_bit_for_bit() -> None:
    mine, theirs = weights(), weights()
    expected = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    optimizer = MainWeightAdamW(mine, lr=9.0)
    for step in range(3):
        with_gradients(theirs, step)
        expected.step()
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    with torch.no_grad():
        mine[0].copy_(theirs[0])
    for step in range(3, 6):
        with_gradients(mine, step)
        with_gradients(theirs, step)
        optimizer.step()
        expected.step()
    assert torch.equal(mine[0], theirs[0])


def test_a_refused_state_changes_nothing() -> None:
    mine = weights(count=2)
    optimizer = MainWeightAdamW(mine, lr=0.1)
    with_gradients(mine, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = MainWeightAdamW([*weights(), *weights((3, 3))], lr=0.7)
    other.init_state()
    with pytest.raises(
        ValueError, match=r"exp_avg of a parameter of shape \(4, 6\): expected placements None, got"
    ):
        optimizer.load_state_dict(other.state_dict())
    momentum = torch.optim.SGD(weights(count=2), lr=0.1, momentum=0.9)
    with_gradients(momentum.param_groups[0]["params"], 0)
    momentum.step()
    with pytest.raises(
        ValueError,
        match=r"expected exp_avg, exp_avg_sq, step \(of AdamW without amsgrad\), got momentum_buffer",
    ):
        # The hyperparameters of another optimizer are not the point here.
        optimizer.load_state_dict({**other.state_dict(), "state": momentum.state_dict()["state"]})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["params"][0] is mine[0]
    for index, param in enumerate(mine):
        for key, value in saved["state"][index].items():
            assert torch.equal(optimizer.state[param][key], value)
    with_gradients(mine, 1)
    optimizer.step()


def test_load_hooks_see_the_true_state_before_and_after() -> None:
    source = MainWeightAdamW(weights(), exp_avg_dtype=torch.bfloat16)
    with_gradients(source.param_groups[0]["params"], 0)
    source.step()
    optimizer = MainWeightAdamW(weights(), exp_avg_dtype=torch.bfloat16)
    seen: list[object] = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, loaded: seen.append(loaded["state"][0]["exp_avg"].dtype)
    )
    optimizer.register_load_state_dict_post_hook(
        lambda opt: seen.append(next(iter(opt.state.values()))["exp_avg"].dtype)
    )
    for _ in range(2):
        optimizer.load_state_dict(source.state_dict())
    assert seen == [torch.bfloat16] * 4


@on_ranks(2)
def test_the_state_before_any_step_loads_without_touching_a_weight() -> None:
    model = sharded_toy()
    optimizer = MainWeightAdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    assert optimizer.state_dict()["state"] == {}
    other = sharded_toy()
    fresh = MainWeightAdamW(other.parameters(), lr=9.0, weight_decay=0.5)
    fresh.load_state_dict(optimizer.state_dict())
    optimizer.init_state()
    fresh.load_state_dict(optimizer.state_dict())
    for param, want in zip(other.parameters(), Toy().parameters(), strict=True):
        assert torch.equal(whole(param), want)
        assert fresh.state[param]["step"].item() == 0
    assert fresh.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("how", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copied_optimizer_of_ordinary_parameters_goes_on_alike(how: object) -> None:
    params = weights()
    optimizer = MainWeightAdamW(params, lr=0.1, exp_avg_dtype=torch.float16, offload_fraction=1.0)
    with_gradients(params, 0)
    optimizer.step()
    other = how(optimizer)  # type: ignore[operator]  # one of the two above
    (copied,) = other.param_groups[0]["params"]
    for step in (1, 2):
        with_gradients(params, step)
        with_gradients([copied], step)
        optimizer.step()
        other.step()
    assert copied is not params[0]
    assert torch.equal(copied, params[0])


def test_parameters_and_state_that_a_program_replaces_are_the_ones_updated() -> None:
    mine, theirs = weights(), weights()
    optimizer = MainWeightAdamW(mine, lr=0.1)
    expected = torch.optim.AdamW(theirs, lr=0.1, fused=True)
    for step in range(8):
        for (param,), opt in ((mine, optimizer), (theirs, expected)):
            if step == 2:
                param.data = param.data.clone()
            if step == 4:
                opt.state[param] = {key: value.clone() for key, value in opt.state[param].items()}
            if step == 6:
                opt.state.pop(param)
            with_gradients([param], step)
            opt.step()
    assert torch.equal(mine[0], theirs[0])
    mine[0].grad = None
    mine[0].data = mine[0].data.double()
    optimizer.state.pop(mine[0])
    before = mine[0].detach().clone()
    with_gradients(mine, 9)
    optimizer.step()
    assert optimizer.state[mine[0]]["exp_avg"].dtype == torch.float64
    assert not torch.equal(mine[0], before)


@pytest.mark.parametrize("which", ["gradient", "parameter", "moments"])
def test_tensors_in_another_memory_order_are_updated_element_by_element(which: str) -> None:
    mine, theirs = weights(), weights()
    if which == "parameter":
        mine = [nn.Parameter(mine[0].detach().t().contiguous().t())]
    optimizer, expected = MainWeightAdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        with_gradients(mine, step)
        with_gradients(theirs, step)
        if which == "gradient":
            mine[0].grad = mine[0].grad.t().contiguous().t()
        optimizer.step()
        expected.step()
        if which == "moments" and step == 0:
            state = optimizer.state[mine[0]]
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].t().contiguous().t()
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-7)


def test_sparse_gradients_and_complex_parameters_are_refused() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = MainWeightAdamW(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\): expected a dense tensor, got torch.sparse_coo"):
        optimizer.step()
    complex_ = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    complex_.grad = torch.ones_like(complex_)
    with pytest.raises(TypeError, match=r"shape \(2,\): expected real numbers, got torch.complex64"):
        MainWeightAdamW([complex_]).step()


@on_ranks(2)
def test_a_step_that_is_refused_updates_no_group() -> None:
    model = sharded_toy()
    optimizer = MainWeightAdamW(
        [{"params": list(model.blocks.parameters())}, {"params": list(model.head.parameters())}]
    )
    set_gradients(model, 0)
    optimizer.step()
    before = [local_of(param).detach().clone() for param in model.parameters()]
    set_gradients(model, 1)
    model.head.bias.grad = sharded_toy(strategy="no_shard").head.bias.detach()
    with pytest.raises(ValueError, match=r"gradient of parameter .* of shape \(1,\)"):
        optimizer.step()
    for param, want in zip(model.parameters(), before, strict=True):
        assert torch.equal(local_of(param), want)
    assert optimizer.state[model.head.weight]["step"].item() == 1


@pytest.mark.parametrize("when", ["built before", "trained before", "collected before"])
@on_ranks(2)
def test_parameters_collected_before_sharding_are_refused_by_name(when: str) -> None:
    model = Toy()
    early = list(model.named_parameters())
    message = r"parameter 'embed.weight' was collected before fully_shard took it into a Toy unit"
    if when == "built before":
        optimizer = MainWeightAdamW(early)
        torch_impl.fully_shard(model)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        return
    if when == "trained before":
        optimizer = MainWeightAdamW(early)
        for _, param in early:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        torch_impl.fully_shard(model)
        with pytest.raises(RuntimeError):
            optimizer.step()
        return
    torch_impl.fully_shard(model)
    with pytest.raises(RuntimeError, match=message):
        MainWeightAdamW(early)
    optimizer = MainWeightAdamW(model.parameters())
    with pytest.raises(
        RuntimeError, match=r"parameter 'embed.weight' of shape \(9, 5\) was collected before fully_shard"
    ):
        optimizer.add_param_group({"params": [early[0][1]]})
    assert len(optimizer.param_groups) == 1
    for param, value in zip(model.parameters(), gradients(0), strict=True):
        param.grad = torch.zeros_like(param).copy_(value)
    optimizer.step()
