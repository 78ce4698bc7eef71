"""Moments in half precision and scaled float8: what is stored, what it loses, and that nothing else changes it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_impl
from bridge.core.formats import CheckpointError
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Toy, local_loss, sharded_toy
from torch_impl import MainWeightAdamW, MixedPrecisionPolicy, full_tensor, load_checkpoint, save_checkpoint
from torch_impl.dtensor.local import local_of, row_range_of
from torch_impl.dtensor.tensor import RowDTensor, wrap_like
from torch_impl.optimizer.moments import MomentFormat, _scale_like

FLOAT8, WIDE_FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {torch.float16: 65504.0, FLOAT8: 448.0, WIDE_FLOAT8: 57344.0}
SMALLEST = {torch.float16: 2.0**-24, FLOAT8: 2.0**-9, WIDE_FLOAT8: 2.0**-16}
# Bits after the leading one, and the exponent of the smallest normal number.
MANTISSA = {FLOAT8: (3, -6), WIDE_FLOAT8: (2, -14)}
OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def sharded(
    dtype: torch.dtype, second: torch.dtype | None = None, **options: object
) -> tuple[Toy, MainWeightAdamW]:
    model = sharded_toy(**{"strategy": "optim_grads_params", **options})
    dtypes = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype if second is None else second}
    return model, MainWeightAdamW(model.parameters(), **OPTIONS, **dtypes)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    for step in steps:
        loss = local_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def random_gradients(model: nn.Module, step: int, dtype: torch.dtype | None = None) -> None:
    """The same whole gradients on every rank, of very different sizes."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        whole = torch.randn(param.shape, generator=generator)
        whole *= torch.logspace(0, -3, param.shape[-1] if param.ndim else 1).view(whole.shape[-1:])
        grad = torch.zeros_like(param.detach()).copy_(whole)
        param.grad = grad if dtype is None else grad.to(dtype)


def stored_as(
    values: torch.Tensor, dtype: torch.dtype, turn: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The documented format, element by element: what is stored, and the scale of each row."""
    scale = torch.stack([row.abs().max() / LARGEST[dtype] for row in values]).view(-1, 1)
    stored = torch.empty(values.shape)
    for r, row in enumerate(values.tolist()):
        for c, value in enumerate(row):
            unit = float(torch.tensor(value) / scale[r, 0]) if scale[r, 0] > 0 else 0.0
            if turn is not None:
                bits, least = MANTISSA[dtype]
                exponent = max(math.frexp(unit)[1] - 1, least)
                spacing = 2.0 ** (exponent - bits)
                unit = math.floor(float(torch.tensor(unit / spacing) + turn[r, c])) * spacing
                unit = max(unit, SMALLEST[dtype] if value > 0 else 0.0)
            stored[r, c] = max(-LARGEST[dtype], min(LARGEST[dtype], unit))
    return stored.to(dtype), scale


def turns(rows: int, columns: int, first: int, step: int) -> torch.Tensor:
    """Where in the interval between two float8 numbers each element rounds up at a step."""
    row = (torch.arange(first, first + rows).double() * 0.7548776662466927 + step * 0.6180339887498949) % 1
    column = (torch.arange(columns).double() * 0.5698402909980532) % 1
    return (row.float()[:, None] + column.float()) % 1


def against_reference(dtype: torch.dtype) -> tuple[bool, bool]:
    model, optimizer = sharded(dtype)
    rows = [nn.Parameter(local_of(param).detach().clone()) for param in model.parameters()]
    moments = [[torch.zeros_like(row.detach()) for row in rows] for _ in range(2)]
    for step in range(1, 11):
        random_gradients(model, step)
        optimizer.step()
        kept = [index for index, row in enumerate(rows) if row.numel()]
        torch._fused_adamw_(
            [rows[i].detach() for i in kept],
            [local_of(list(model.parameters())[i].grad) for i in kept],
            [moments[0][i] for i in kept],
            [moments[1][i] for i in kept],
            [],
            [torch.tensor(float(step)) for _ in kept],
            lr=OPTIONS["lr"],
            beta1=OPTIONS["betas"][0],
            beta2=OPTIONS["betas"][1],
            weight_decay=OPTIONS["weight_decay"],
            eps=OPTIONS["eps"],
            amsgrad=False,
            maximize=False,
        )
        for index, (param, row) in enumerate(zip(model.parameters(), rows, strict=True)):
            state = optimizer.state[param]
            assert same_bits(local_of(param).detach(), row.detach())
            for order, key in enumerate(("exp_avg", "exp_avg_sq")):
                value, moment = moments[order][index], local_of(state[key])
                assert type(state[key]) is RowDTensor
                assert state[key].placements == param.placements
                if dtype == torch.bfloat16:
                    assert same_bits(moment, value.bfloat16())
                    value.copy_(moment)
                elif param.ndim < 2:
                    assert same_bits(moment, value)
                    assert f"{key}_scale" not in state
                elif row.numel():
                    dithered = order == 1 and dtype in MANTISSA
                    turn = turns(*row.shape, row_range_of(param)[0], step) if dithered else None
                    stored, scale = stored_as(value, dtype, turn)
                    assert same_bits(moment, stored)
                    assert same_bits(local_of(state[f"{key}_scale"]), scale)
                    value.copy_(stored.float() * scale)
    ranges = [row_range_of(param) for param in model.parameters() if param.ndim >= 2]
    return any(a == b for a, b in ranges), any(0 < a < b for a, b in ranges)


@pytest.mark.fast_cases("dtype0", "dtype2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FLOAT8, WIDE_FLOAT8])
def test_ten_updates_equal_fused_adamw_in_float32_with_moments_rounded_after_each(
    ranks: RankGroup, dtype: torch.dtype
) -> None:
    shards = ranks.run(4, against_reference, dtype)
    assert any(empty for empty, _ in shards), "no rank had an empty shard: the test proves too little"
    assert any(inside for _, inside in shards), "no rank began inside a parameter: the test proves too little"


@pytest.mark.parametrize("dtype", [torch.float16, FLOAT8, WIDE_FLOAT8])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8, 1e18])
def test_moments_of_any_size_neither_overflow_nor_vanish(dtype: torch.dtype, size: float) -> None:
    weight = nn.Parameter(torch.ones(3, 8))
    optimizer = MainWeightAdamW([weight], lr=1e-3, eps=0.0, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    spread = torch.logspace(0, -9, 8)
    for _ in range(20):
        weight.grad = size * spread * torch.ones(3, 1)
        optimizer.step()
    state = optimizer.state[weight]
    largest = (state["exp_avg"].float() * state["exp_avg_scale"])[:, 0]
    torch.testing.assert_close(largest, torch.full((3,), size * (1 - 0.9**20)), rtol=1e-3, atol=0)
    assert (state["exp_avg_sq"].float() > 0).all()
    assert weight.isfinite().all()
    # AdamW would move each weight by lr a step.
    assert ((1 - weight).abs() <= 20 * 1.2e-3).all()


@pytest.mark.parametrize("dtype", [torch.float16, FLOAT8])
def test_rows_that_never_got_a_gradient_keep_zero_moments(dtype: torch.dtype) -> None:
    table = nn.Embedding(4, 5)
    before = table.weight.detach().clone()
    optimizer = MainWeightAdamW(
        table.parameters(), weight_decay=0.0, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype
    )
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([1, 3])).square().sum().backward()
        optimizer.step()
    state = optimizer.state[table.weight]
    for key in ("exp_avg", "exp_avg_sq"):
        assert state[key].float().isfinite().all()
        assert (state[key].float() != 0).any(dim=1).tolist() == [False, True, False, True]
    assert (table.weight != before).all(dim=1).tolist() == [False, True, False, True]
    assert torch.equal(table.weight[::2], before[::2])


def test_a_gradient_that_is_not_a_number_stays_visible() -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    optimizer = MainWeightAdamW([weight], exp_avg_dtype=FLOAT8, exp_avg_sq_dtype=FLOAT8)
    weight.grad = torch.tensor([[1.0, float("nan"), 1.0, 1.0], [1.0] * 4])
    optimizer.step()
    weight.grad = torch.ones(2, 4)
    optimizer.step()
    assert weight[0, 1].isnan()
    assert optimizer.state[weight]["exp_avg_sq"].float()[0].isnan().any()
    assert weight[1].isfinite().all()


def test_float8_second_moments_follow_changes_far_below_their_spacing() -> None:
    moment_format = MomentFormat("exp_avg_sq", FLOAT8, positive=True)
    weight = torch.zeros(16, 64)
    state = moment_format.zeros(weight, False)
    stored, scale = state["exp_avg_sq"], state["exp_avg_sq_scale"]
    gradient = torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = torch.zeros_like(weight)
    for step in range(1, 4001):
        # The first column keeps each row's scale; all others shrink to a third after half of the steps.
        now = gradient.clone()
        now[:, 0] = 2.0
        now[:, 1:] /= 3 if step > 2000 else 1
        value = torch.empty_like(weight)
        moment_format.decode(stored, scale, value)
        moment_format.encode(value.mul_(0.999).add_(0.001 * now**2), stored, scale, 0, step)
        exact.mul_(0.999).add_(0.001 * now**2)
    decoded = stored.float() * scale
    # Rounding to nearest would have left them where they were, up to nine times too large.
    assert abs((decoded / exact).mean().item() - 1) < 0.12
    assert ((decoded / exact - 1).abs() < 0.35).all()


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8])
def test_a_stored_moment_that_is_as_wanted_is_taken_itself(dtype: torch.dtype, on_host: bool) -> None:
    moment_format, weight = MomentFormat("exp_avg", dtype), torch.zeros(4, 3)
    state = moment_format.zeros(weight, on_host)
    scale = state.get("exp_avg_scale")
    assert (scale is not None) == (dtype == FLOAT8)
    taken = moment_format.adopt(weight, state["exp_avg"], scale, step=1, on_host=on_host)
    assert taken.keys() == state.keys()
    assert all(taken[key] is state[key] for key in state)


def bytes_of_moments(dtype: torch.dtype) -> tuple[int, int]:
    model, optimizer = sharded(dtype)
    optimizer.init_state()
    expected = 0
    for param in model.parameters():
        local = local_of(param)
        scaled = param.ndim >= 2
        if dtype == torch.bfloat16:
            expected += 2 * 2 * local.numel()
        else:
            expected += 2 * (
                local.numel() * (dtype.itemsize if scaled else 4) + (4 * local.shape[0] if scaled else 0)
            )
    return model.memory_report(optimizer).moments, expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FLOAT8, WIDE_FLOAT8])
def test_moments_take_the_bytes_of_their_dtype_and_of_a_scale_per_row(
    ranks: RankGroup, dtype: torch.dtype
) -> None:
    for nbytes, expected in ranks.run(3, bytes_of_moments, dtype):
        assert nbytes == expected


def whole_state(model: nn.Module, optimizer: MainWeightAdamW) -> dict[str, torch.Tensor]:
    state = {name: full_tensor(param.detach()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            if isinstance(value, RowDTensor):
                # gloo gathers no float8; float32 holds them all exactly.
                value = full_tensor(wrap_like(value, local_of(value).float()))
            state[f"{name}.{key}"] = value.clone()
    return state


def save(path: str, dtype: torch.dtype, strategy: str) -> dict[str, torch.Tensor]:
    model, optimizer = sharded(dtype, strategy=strategy)
    train(model, optimizer, range(3))
    save_checkpoint(path, model, optimizer)
    dcp.save({"optimizer": optimizer.state_dict()["state"]}, checkpoint_id=f"{path}-plain")
    return whole_state(model, optimizer)


def load(path: str, dtype: torch.dtype, strategy: str) -> dict[str, torch.Tensor]:
    model, optimizer = sharded(dtype, strategy=strategy)
    train(model, optimizer, range(7, 8))
    load_checkpoint(path, model, optimizer)
    loaded = whole_state(model, optimizer)
    other = sharded(dtype, strategy=strategy)[1]
    other.init_state()
    state = {"optimizer": other.state_dict()["state"]}
    dcp.load(state, checkpoint_id=f"{path}-plain")
    for own, fresh in zip(optimizer.state.values(), other.state.values(), strict=True):
        for key, value in own.items():
            assert same_bits(local_of(value), local_of(fresh[key])), key
    assert math.isfinite(train(model, optimizer, range(3, 5)))
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "strategy"),
    [
        (torch.bfloat16, "optim"),
        (torch.float16, "optim_grads"),
        (FLOAT8, "optim_grads_params"),
        (WIDE_FLOAT8, "optim_grads_params"),
    ],
)
def test_a_checkpoint_of_four_ranks_loads_on_two_and_three_to_the_byte(
    ranks: RankGroup, tmp_path: Path, dtype: torch.dtype, strategy: str
) -> None:
    path = str(tmp_path / "a")
    saved = ranks.run(4, save, path, dtype, strategy)[0]
    assert any(name.endswith("_scale") for name in saved) == (dtype != torch.bfloat16)
    for world, loading in ((2, strategy), (3, "no_shard")):
        for loaded in ranks.run(world, load, path, dtype, loading):
            assert loaded.keys() == saved.keys()
            for name in saved:
                assert same_bits(loaded[name], saved[name]), name


def save_from_two_axes(path: str, strategy: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model, optimizer = sharded(FLOAT8, strategy=strategy, mesh=mesh)
    train(model, optimizer, range(3))
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert key == "step" or value.placements == param.placements
    save_checkpoint(path, model, optimizer)
    return whole_state(model, optimizer)


@pytest.mark.slow
@pytest.mark.fast_cases("hfsdp")
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_a_checkpoint_of_a_mesh_of_two_axes_loads_on_one_axis_to_the_byte(
    ranks: RankGroup, tmp_path: Path, strategy: str
) -> None:
    path = str(tmp_path / "a")
    saved = ranks.run(4, save_from_two_axes, path, strategy)
    loaded = ranks.run(3, load_only, path)
    for state in (*saved[1:], *loaded):
        assert state.keys() == saved[0].keys()
        for name in state:
            assert same_bits(state[name], saved[0][name]), name


def load_only(path: str) -> dict[str, torch.Tensor]:
    model, optimizer = sharded(FLOAT8)
    load_checkpoint(path, model, optimizer)
    return whole_state(model, optimizer)


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["state_dict", "get_optimizer_state_dict"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT8])
@on_ranks(3)
def test_a_loaded_state_keeps_its_dtypes_and_goes_on_bit_for_bit(how: str, dtype: torch.dtype) -> None:
    model, optimizer = sharded(dtype)
    train(model, optimizer, range(3))
    other, loaded = sharded(dtype)
    other.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    if how == "state_dict":
        loaded.load_state_dict(optimizer.state_dict())
    else:
        set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(model, optimizer))
    for mine, theirs in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert same_bits(local_of(mine[key]), local_of(theirs[key])), key
            assert not isinstance(mine[key], RowDTensor) or mine[key].placements == theirs[key].placements
            mine[key] = mine[key].clone()
    train(model, optimizer, range(3, 5))
    train(other, loaded, range(3, 5))
    for param, want in zip(other.parameters(), model.parameters(), strict=True):
        assert same_bits(local_of(param).detach(), local_of(want).detach())


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, FLOAT8, WIDE_FLOAT8])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, FLOAT8, WIDE_FLOAT8])
def test_state_saved_in_another_dtype_is_converted(saved: torch.dtype, wanted: torch.dtype) -> None:
    def run(dtype: torch.dtype) -> tuple[nn.Parameter, MainWeightAdamW]:
        weight = nn.Parameter(torch.ones(4, 6))
        return weight, MainWeightAdamW([weight], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)

    def values(state: dict[str, torch.Tensor], key: str) -> torch.Tensor:
        return state[key].float() * state.get(f"{key}_scale", torch.ones(()))

    weight, optimizer = run(saved)
    weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    other_weight, other = run(wanted)
    other.load_state_dict(optimizer.state_dict())
    mine, theirs = other.state[other_weight], optimizer.state[weight]
    assert mine["exp_avg"].dtype == wanted
    assert mine["step"].item() == 1
    for key in ("exp_avg", "exp_avg_sq"):
        assert (f"{key}_scale" in mine) == (wanted in LARGEST)
        allowed = {FLOAT8: 0.13, WIDE_FLOAT8: 0.26}.get(wanted, 1e-3)
        torch.testing.assert_close(values(mine, key), values(theirs, key), rtol=allowed, atol=allowed * 0.02)
    other_weight.grad = torch.ones(4, 6)
    other.step()


def test_float64_parameters_have_float64_moments_and_are_updated_in_float64() -> None:
    mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)) for _ in range(2))
    optimizer = MainWeightAdamW([mine], **OPTIONS)
    expected = torch.optim.AdamW([theirs], fused=True, **OPTIONS)
    low = nn.Parameter(theirs.detach().clone())
    rounded = MainWeightAdamW([low], **OPTIONS, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=FLOAT8)
    for step in range(10):
        grad = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine.grad, theirs.grad, low.grad = grad, grad.clone(), grad.clone()
        for opt in (optimizer, expected, rounded):
            opt.step()
    assert same_bits(mine.detach(), theirs.detach())
    assert (
        optimizer.state[mine]["exp_avg"].dtype == optimizer.state[mine]["exp_avg_sq"].dtype == torch.float64
    )
    assert rounded.state[low]["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(low, mine, rtol=0, atol=0.1)


def test_half_precision_parameters_are_updated_in_float32_and_rounded_once() -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.bfloat16).view(8, 8))
    optimizer = MainWeightAdamW([weight], **OPTIONS)
    exact = nn.Parameter(weight.detach().float())
    reference = torch.optim.AdamW([exact], fused=True, **OPTIONS)
    for step in range(5):
        weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        exact.grad = weight.grad.float()
        optimizer.step()
        reference.step()
        assert same_bits(weight.detach(), exact.detach().bfloat16())
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(optimizer.state[weight][key], reference.state[exact][key])
        with torch.no_grad():
            exact.copy_(weight)


def test_a_checkpoint_with_moments_of_other_dtypes_is_refused_with_a_hint(tmp_path: Path) -> None:
    def run(**dtypes: torch.dtype) -> tuple[nn.Module, MainWeightAdamW]:
        model = nn.Linear(4, 3)
        optimizer = MainWeightAdamW(model.parameters(), **dtypes)
        optimizer.init_state()
        return model, optimizer

    save_checkpoint(tmp_path / "a", *run())
    for dtypes in ({"exp_avg_dtype": torch.bfloat16}, {"exp_avg_sq_dtype": FLOAT8}):
        with pytest.raises(
            CheckpointError, match=r"another format than the optimizer.s exp_avg_dtype and exp_avg_sq_dtype"
        ):
            load_checkpoint(tmp_path / "a", *run(**dtypes))


@on_ranks(3)
def test_gradients_in_half_precision_update_as_if_they_had_been_cast() -> None:
    policy = MixedPrecisionPolicy(grad_dtype=torch.bfloat16)
    model, optimizer = sharded(torch.float32, mp_policy=policy)
    other, its_optimizer = sharded(torch.float32)
    for step in range(3):
        random_gradients(model, step, torch.bfloat16)
        for param, source in zip(other.parameters(), model.parameters(), strict=True):
            assert local_of(source.grad).dtype == torch.bfloat16
            param.grad = source.grad.to(torch.float32)
        optimizer.step()
        its_optimizer.step()
    for param, want in zip(model.parameters(), other.parameters(), strict=True):
        assert local_of(param).dtype == torch.float32
        assert same_bits(local_of(param).detach(), local_of(want).detach())


def stock_adamw_on_half_gradients(fused: bool) -> dict[str, str]:
    """What ``torch.optim.AdamW`` says to bfloat16 gradients of float32 weights: plain ones, FSDP2's, and ours."""
    plain, stock, ours = (nn.Linear(4, 4) for _ in range(3))
    torch.distributed.fsdp.fully_shard(stock)
    torch_impl.fully_shard(ours, mp_policy=MixedPrecisionPolicy(grad_dtype=torch.bfloat16))
    said = {}
    for name, model in (("plain", plain), ("FSDP2", stock), ("ours", ours)):
        model(torch.randn(2, 4)).sum().backward()
        for param in model.parameters():
            grad, param.grad = param.grad, None
            param.grad_dtype = torch.bfloat16
            param.grad = grad.to(torch.bfloat16)
        try:
            torch.optim.AdamW(model.parameters(), fused=fused).step()
        except RuntimeError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("fused", [False, True])
def test_stock_adamw_takes_half_precision_gradients_of_no_float32_weights(
    ranks: RankGroup, fused: bool
) -> None:
    for said in ranks.run(2, stock_adamw_on_half_gradients, fused):
        assert said.keys() == {"plain", "FSDP2", "ours"}
        # The last one is torch 2.11's, of fused updates.
        refusal = "expected (scalar type|dtype)|must be on the same device and the same dtype"
        assert all(re.search(refusal, text) for text in said.values()), said


@pytest.mark.parametrize("option", ["exp_avg_dtype", "exp_avg_sq_dtype"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fnuz])
def test_other_dtypes_are_refused(option: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError,
        match=f"{option}: expected one of float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, got",
    ):
        MainWeightAdamW([nn.Parameter(torch.ones(2))], **{option: dtype})


def full_moments(dtype: torch.dtype) -> bool:
    model, optimizer = sharded(dtype)
    train(model, optimizer, range(1))
    equal = []
    for param in model.parameters():
        moment = optimizer.state[param]["exp_avg"]
        own = local_of(moment)
        first, stop = row_range_of(param)
        gathered = full_tensor(moment)
        equal.append(
            gathered.dtype == moment.dtype and same_bits(gathered.view(-1, *own.shape[1:])[first:stop], own)
        )
    return all(equal)


@pytest.mark.parametrize("dtype", [FLOAT8, WIDE_FLOAT8])
def test_float8_moments_are_gathered_whole(ranks: RankGroup, dtype: torch.dtype) -> None:
    assert ranks.run(2, full_moments, dtype) == [True, True]


@on_ranks(2)
def test_scaled_moments_of_a_parameter_whose_rows_are_cut_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for dim, refused in ((0, False), (1, True)):
        param = distribute_tensor(torch.ones(4, 6), mesh, [Shard(dim)])
        if refused:
            with pytest.raises(
                ValueError, match=r"with a scale per row: expected a parameter of shape \(4, 6\)"
            ):
                _scale_like(param, torch.ones(4, 1))
        else:
            assert _scale_like(param, torch.ones(2, 1)).shape == (4, 1)
