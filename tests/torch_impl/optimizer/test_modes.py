"""MainWeightAdamW as Adam with L2, without bias correction, and with its steps on the device."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Toy, batch, mse, sharded_toy
from tests.torch_impl.optimizer.test_main_weight_adamw import OPTIONS, set_gradients
from torch_impl import MainWeightAdamW
from torch_impl.dtensor.local import local_of

HOW: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}


def weights(dtype: torch.dtype = torch.float32, count: int = 2) -> list[nn.Parameter]:
    # 48 elements: whole vectors, and a tail beside them.
    return [
        nn.Parameter(torch.randn((4 + k, 12), generator=torch.Generator().manual_seed(k)).to(dtype))
        for k in range(count)
    ]


def with_gradients(params: list[nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + index)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@on_ranks(2)
def test_without_adam_w_mode_it_is_fused_adam_bit_for_bit() -> None:
    model = sharded_toy()
    rows = [nn.Parameter(local_of(param).detach().clone()) for param in model.parameters()]
    optimizer = MainWeightAdamW(model.parameters(), adam_w_mode=False, **OPTIONS)
    expected = torch.optim.Adam(rows, fused=True, **OPTIONS)
    for step in range(6):
        set_gradients(model, step)
        for row, param in zip(rows, model.parameters(), strict=True):
            row.grad = local_of(param.grad).clone()
        optimizer.step()
        expected.step()
        for row, param in zip(rows, model.parameters(), strict=True):
            assert torch.equal(local_of(param), row)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(local_of(optimizer.state[param][key]), expected.state[row][key])


@pytest.mark.parametrize(
    "options",
    [{"maximize": True}, {"exp_avg_dtype": torch.bfloat16}, {"offload_fraction": 1.0}],
    ids=["maximize", "staged", "offloaded"],
)
def test_l2_is_applied_in_every_kind_of_update(options: dict[str, Any]) -> None:
    mine, theirs = weights(), weights()
    optimizer = MainWeightAdamW(mine, adam_w_mode=False, **HOW, **options)
    expected = torch.optim.Adam(theirs, fused=True, maximize=bool(options.get("maximize")), **HOW)
    for step in range(3):
        with_gradients(mine, step)
        with_gradients(theirs, step)
        optimizer.step()
        expected.step()
        if "exp_avg_dtype" in options:
            for state in expected.state.values():
                state["exp_avg"].copy_(state["exp_avg"].bfloat16())
    for param, want in zip(mine, theirs, strict=True):
        assert torch.equal(param, want)


def uncorrected(weight: np.ndarray, grads: list[np.ndarray], l2: bool) -> np.ndarray:
    """Adam in the precision of ``weight``, as the docstring of ``optimizer.update`` has it, without correction."""
    scalar = weight.dtype.type
    b1, b2 = HOW["betas"]
    lr, eps, decay = HOW["lr"], HOW["eps"], HOW["weight_decay"]
    m, v = np.zeros_like(weight), np.zeros_like(weight)

    def fma(x: Any, y: Any, z: Any) -> np.ndarray:
        return np.asarray(np.longdouble(x) * np.longdouble(y) + np.longdouble(z), scalar)

    w = weight
    for g in grads:
        if l2:
            g = fma(w, scalar(decay), g)
        else:
            w = w * scalar(1 - lr * decay)
        m = fma(scalar(1 - b1), g - m, m)
        v = fma(scalar(1 - b2) * g, g, v * scalar(b2))
        w = w + (scalar(-lr) * m) / (np.sqrt(v) + scalar(eps))
    return w


@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_bias_correction_both_corrections_are_one(dtype: torch.dtype, l2: bool) -> None:
    (mine,) = weights(dtype, 1)
    start = mine.detach().numpy().copy()
    optimizer = MainWeightAdamW([mine], bias_correction=False, adam_w_mode=not l2, **HOW)
    grads = []
    for step in range(5):
        with_gradients([mine], step)
        assert mine.grad is not None
        grads.append(mine.grad.numpy().copy())
        optimizer.step()
    assert optimizer.state[mine]["step"].item() == 5
    want = uncorrected(start, grads, l2)
    if dtype == torch.float32:
        assert np.array_equal(mine.detach().numpy(), want)
    else:
        # A product of two doubles does not fit into a long double.
        np.testing.assert_allclose(mine.detach().numpy(), want, rtol=1e-13)


@pytest.mark.parametrize("beta", [0.9999999999999999, 0.0])
def test_no_beta_leaves_a_correction(beta: float) -> None:
    (mine,) = weights(torch.float64, 1)
    before = mine.detach().clone()
    optimizer = MainWeightAdamW(
        [mine], lr=0.1, betas=(0.0, beta), weight_decay=0.0, eps=0.5, bias_correction=False
    )
    mine.grad = torch.ones_like(mine)
    optimizer.step()
    torch.testing.assert_close(
        mine.detach(), before - 0.1 / ((1 - beta) ** 0.5 + 0.5), rtol=1e-15, atol=1e-15
    )


def test_modes_belong_to_groups_and_are_restored_with_them() -> None:
    mine = weights()
    groups = [{"params": mine[:1], "adam_w_mode": False}, {"params": mine[1:], "bias_correction": False}]
    optimizer = MainWeightAdamW(groups, **HOW)
    saved = copy.deepcopy(optimizer.state_dict())
    other = MainWeightAdamW([{"params": mine[:1]}, {"params": mine[1:]}], **HOW)
    other.load_state_dict(saved)
    for restored in (other, pickle.loads(pickle.dumps(optimizer))):
        assert [group["adam_w_mode"] for group in restored.param_groups] == [False, True]
        assert [group["bias_correction"] for group in restored.param_groups] == [True, False]
    for group in saved["param_groups"]:
        del group["adam_w_mode"], group["bias_correction"]
    older = MainWeightAdamW(
        [{"params": mine[:1]}, {"params": mine[1:]}], adam_w_mode=False, bias_correction=False
    )
    older.load_state_dict(saved)
    for group in older.param_groups:
        assert (group["adam_w_mode"], group["bias_correction"]) == (False, False)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_state_of_torchs_adam_and_adamw_goes_on_as_what_it_was(
    optimizer_class: type[torch.optim.Adam],
) -> None:
    mine, theirs = weights(), weights()
    expected = optimizer_class(theirs, fused=True, **HOW)
    optimizer = MainWeightAdamW(mine)
    for step in range(4):
        with_gradients(theirs, step)
        expected.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
            with torch.no_grad():
                for param, value in zip(mine, theirs, strict=True):
                    param.copy_(value)
        if step > 1:
            with_gradients(mine, step)
            optimizer.step()
    for param, want in zip(mine, theirs, strict=True):
        assert torch.equal(param, want)


def resumed(folder: str) -> None:
    def trained() -> tuple[Toy, MainWeightAdamW]:
        model = sharded_toy()
        return model, MainWeightAdamW(model.parameters(), lr=0.1)

    model = sharded_toy()
    optimizer = MainWeightAdamW(model.parameters(), adam_w_mode=False, bias_correction=False, **HOW)
    rank = torch.distributed.get_rank()

    def step(net: nn.Module, of: torch.optim.Optimizer, number: int) -> float:
        tokens, targets = batch(number, torch.distributed.get_world_size(), 1)
        of.zero_grad()
        loss = mse(net, tokens[rank], targets[rank])
        loss.backward()
        of.step()
        return loss.item()

    step(model, optimizer, 0)
    torch_impl.save_checkpoint(folder, model, optimizer)
    second, restored = trained()
    torch_impl.load_checkpoint(folder, second, restored)
    assert restored.param_groups[0]["adam_w_mode"] is restored.param_groups[0]["bias_correction"] is False
    for number in (1, 2):
        assert step(model, optimizer, number) == step(second, restored, number)
    for a, b in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(local_of(a), local_of(b))


def test_a_checkpoint_restores_the_modes(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(2, resumed, str(tmp_path / "checkpoint"))


def test_a_mode_that_is_no_bool_is_refused() -> None:
    for name in ("adam_w_mode", "bias_correction"):
        with pytest.raises(TypeError, match=f"{name}: expected True or False, got 'yes'"):
            MainWeightAdamW(weights(), **{name: "yes"})


def test_a_capturable_step_lies_on_the_parameters_device_and_changes_no_result() -> None:
    planned = nn.Parameter(torch.empty((3, 5), device="meta"))
    optimizer = MainWeightAdamW([planned], capturable=True)
    optimizer.init_state()
    assert optimizer.state[planned]["step"].device.type == "meta"
    usual = MainWeightAdamW([nn.Parameter(torch.empty((3, 5), device="meta"))])
    usual.init_state()
    assert next(iter(usual.state.values()))["step"].device.type == "cpu"
    mine, theirs = weights(), weights()
    optimizer = MainWeightAdamW(mine, capturable=True, **{**HOW, "lr": torch.tensor(0.1)})
    expected = torch.optim.AdamW(theirs, fused=True, capturable=True, **{**HOW, "lr": torch.tensor(0.1)})
    for step in range(3):
        with_gradients(mine, step)
        with_gradients(theirs, step)
        optimizer.step()
        expected.step()
    for param, want in zip(mine, theirs, strict=True):
        assert torch.equal(param, want)
    other = MainWeightAdamW(weights(), capturable=True)
    other.load_state_dict(expected.state_dict())
    assert [state["step"].item() for state in other.state.values()] == [3, 3]


def test_capturable_refuses_what_waits_for_the_device() -> None:
    with pytest.raises(ValueError, match=r"expected offload_fraction=0, got 0\.5: a step waits"):
        MainWeightAdamW(weights(), capturable=True, offload_fraction=0.5)
    with pytest.raises(
        ValueError, match=r"expected exp_avg_sq_dtype float32 or bfloat16, got torch\.float8_e4m3fn"
    ):
        MainWeightAdamW(weights(), capturable=True, exp_avg_sq_dtype=torch.float8_e4m3fn)
