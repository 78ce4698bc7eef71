"""MainWeightMuon is torch.optim.Muon of whole matrices, bit for bit, however their rows are cut."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bridge.core.sharding.layout.matrices import balanced, rounds, rows_by_shard
from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import Toy, full_batch_loss, local_loss, sharded_toy, whole
from tests.torch_impl.optimizer.test_moment_dtypes import random_gradients
from tests.torch_impl.runtime.test_two_axes import spelled_out
from torch_impl import MainWeightMuon, count_collectives, load_checkpoint, save_checkpoint
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.tensor import RowDTensor
from torch_impl.optimizer import muon_update

OPTIONS: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.1}
PLACED: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "optim_grads_params": {"strategy": "optim_grads_params"},
    "tensor": {"strategy": "optim_grads_params", "granularity": "tensor"},
    "optim": {"strategy": "optim"},
    "optim_grads": {"strategy": "optim_grads"},
    "hsdp": {"axes": (1, 1, 1)},
    "hfsdp": {"axes": (1, 2, 2)},
    "both axes": {"axes": (2, 2, 2)},
}


def placed(name: str, **more: Any) -> Toy:
    options = {**PLACED[name], **more}
    axes = options.pop("axes", None)
    if axes is not None:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
        options |= {"placements": spelled_out(*axes), "mesh": mesh}
    return sharded_toy(**options)


def matrices_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Of each parameter of two dimensions or more, its matrices, as parameters of their own."""
    matrices = []
    for param in model.parameters():
        if param.ndim >= 2:
            parts = param.detach().reshape(-1, *param.shape[-2:]).unbind()
            matrices.append([nn.Parameter(part.clone()) for part in parts])
    return matrices


class Reference:
    """torch.optim.Muon on whole matrices, and AdamW on the rest of a plain model."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model, self.matrices = model, matrices_of(model)
        self.muon = torch.optim.Muon(list(itertools.chain(*self.matrices)), **options)
        self.params = [param for param in model.parameters() if param.ndim >= 2]
        rest = [param for param in model.parameters() if param.ndim < 2]
        self.adamw = torch.optim.AdamW(rest, lr=options["lr"], weight_decay=0.01, fused=True)

    def step(self) -> None:
        for param, parts in zip(self.params, self.matrices, strict=True):
            for part, grad in zip(parts, param.grad.reshape(-1, *param.shape[-2:]), strict=True):
                part.grad = grad.clone()
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for param, parts in zip(self.params, self.matrices, strict=True):
                param.copy_(torch.stack([part.detach() for part in parts]).view(param.shape))

    def momentum(self) -> list[torch.Tensor]:
        return [
            torch.stack([self.muon.state[part]["momentum_buffer"] for part in parts]).view(param.shape)
            for param, parts in zip(self.params, self.matrices, strict=True)
        ]


def bitwise(name: str, options: dict[str, Any], offload: float, together: int) -> tuple[int, dict[str, int]]:
    # Rank processes serve further tests, with other ranks beside them: all must agree on the rounds.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon_update, "TOGETHER", together)
        return bitwise_in_rounds(name, options, offload)


def bitwise_in_rounds(name: str, options: dict[str, Any], offload: float) -> tuple[int, dict[str, int]]:
    model = placed(name)
    reference = Reference(Toy(), **OPTIONS, **options)
    optimizer = MainWeightMuon(model.parameters(), **OPTIONS, **options, offload_fraction=offload)
    for step in range(4):
        for module in (model, reference.model):
            random_gradients(module, step)
        with count_collectives() as count:
            optimizer.step()
        reference.step()
        for param, want in zip(model.parameters(), reference.model.parameters(), strict=True):
            if param.ndim >= 2:
                assert torch.equal(whole(param), want.detach())
            else:
                torch.testing.assert_close(whole(param), want.detach(), rtol=1e-6, atol=1e-6)
    buffers = [optimizer.state[param] for param in model.parameters() if param.ndim >= 2]
    for state, want in zip(buffers, reference.momentum(), strict=True):
        assert set(state) == {"step", "momentum_buffer"}
        assert type(state["momentum_buffer"]) is RowDTensor
        assert torch.equal(whole(state["momentum_buffer"]), want)
    assert set(count.calls_of) <= {("muon", "all_to_all")}
    empty = sum(local_of(param).numel() == 0 for param in model.parameters())
    return empty, {"calls": count.calls["all_to_all"], "bytes": count.nbytes["all_to_all"]}


@pytest.mark.fast_cases("no_shard", "optim_grads_params", "tensor", "hfsdp")
@pytest.mark.parametrize("name", PLACED)
def test_updates_equal_muon_of_whole_matrices_bit_for_bit(ranks: RankGroup, name: str) -> None:
    results = ranks.run(4, bitwise, name, {}, 0.0, 1 << 22)
    if name != "no_shard":
        assert any(empty for empty, _ in results), "no rank had an empty shard: the test proves too little"
    calls = {counts["calls"] for _, counts in results}
    # Out and back over each axis that cuts rows, in one round.
    expected = {"no_shard": 0, "tensor": 0, "hfsdp": 4, "both axes": 4}.get(name, 2)
    assert calls == {expected}


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.4, "ns_steps": 2},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    ],
)
def test_every_option_is_torch_s(ranks: RankGroup, options: dict[str, Any]) -> None:
    ranks.run(2, bitwise, "optim_grads_params", options, 0.5, 1 << 22)


def test_small_rounds_and_offload_change_nothing_but_the_calls(ranks: RankGroup) -> None:
    single = ranks.run(2, bitwise, "optim_grads_params", {}, 0.0, 1 << 22)
    many = ranks.run(2, bitwise, "optim_grads_params", {}, 1.0, 1)
    assert many[0][1]["calls"] > single[0][1]["calls"] == 2
    assert many[0][1]["bytes"] == single[0][1]["bytes"]


def trained(name: str) -> list[torch.Tensor]:
    """Other data on every rank, against the full batch in one process."""
    model, reference = placed(name), Toy()
    optimizer = MainWeightMuon(model.parameters(), **OPTIONS)
    expected = Reference(reference, **OPTIONS)
    for step in range(3):
        local_loss(model, step).backward()
        full_batch_loss(reference, step).backward()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        reference.zero_grad()
    return [
        (whole(param) - want.detach()).abs().max()
        for param, want in zip(model.parameters(), reference.parameters(), strict=True)
    ]


@pytest.mark.parametrize("name", ["optim_grads_params", "hsdp"])
def test_training_equals_the_full_batch_on_one_process(ranks: RankGroup, name: str) -> None:
    # Gradients differ by rounding; orthogonalizing in bfloat16 makes one step of 2 ** -8 of some of their differences.
    for distances in ranks.run(4, trained, name):
        assert max(distances) < 2e-3


def continued(path: str, dtype: torch.dtype, name: str, saves: bool) -> list[torch.Tensor]:
    model = placed(name)
    low = {"momentum_dtype": dtype, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    optimizer = MainWeightMuon(model.parameters(), **OPTIONS, **low, offload_fraction=0.5)
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
        assert torch.isfinite(full_batch_loss(model))
    return [whole(param) for param in model.parameters() if param.ndim >= 2]


@pytest.mark.fast_cases("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_checkpoint_goes_on_on_other_ranks(ranks: RankGroup, tmp_path: Any, dtype: torch.dtype) -> None:
    path = str(tmp_path / "checkpoint")
    saved = ranks.run(4, continued, path, dtype, "hfsdp", True)[0]
    loaded = ranks.run(2, continued, path, dtype, "tensor", False)[0]
    assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))


def test_state_of_torch_muon_is_taken_over() -> None:
    params, others = ([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.eye(5))] for _ in range(2))
    stock, mine = torch.optim.Muon(others, **OPTIONS), MainWeightMuon(params, **OPTIONS)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param, other in zip(params, others, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            other.grad = param.grad.clone()
        if step == 2:
            state = copy.deepcopy(stock.state_dict())
            for group, own in zip(state["param_groups"], mine.state_dict()["param_groups"], strict=True):
                group["use_muon"] = own["use_muon"]
            mine.load_state_dict(state)
        stock.step()
        mine.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_groups_are_split_by_the_rule_and_keep_their_own_numbers() -> None:
    model = Toy()
    optimizer = MainWeightMuon(
        [{"params": list(model.named_parameters()), "lr": 0.5}],
        adamw_betas=(0.8, 0.9),
        use_muon=lambda name, param: param.ndim >= 2 and name is not None and "embed" not in name,
    )
    muon, adamw = optimizer.param_groups
    assert (muon["use_muon"], adamw["use_muon"]) == (True, False)
    assert "embed.weight" in adamw["param_names"]
    assert "head.weight" in muon["param_names"]
    assert muon.keys() & {"betas"} == adamw.keys() & {"momentum", "ns_steps"} == set()
    assert (muon["lr"], adamw["lr"], adamw["betas"], adamw["eps"]) == (0.5, 0.5, (0.8, 0.9), 1e-8)
    with pytest.raises(ValueError, match=r"expected matrices where use_muon is True, got .* \(3,\)"):
        optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(3)))], "use_muon": True})
    assert len(optimizer.param_groups) == 2
    again = copy.deepcopy(optimizer)
    again.add_param_group({"params": [("x", nn.Parameter(torch.ones(3)))]})
    assert [group["use_muon"] for group in again.param_groups] == [True, False, False]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "expected lr >= 0"),
        ({"adamw_betas": (1.0, 0.9)}, "use_muon=False: expected two betas"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn: expected one of"),
        ({"ns_steps": 100}, "expected 0 <= ns_steps < 100"),
        ({"momentum_dtype": torch.int8}, "momentum_dtype: expected one of float32"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MainWeightMuon([nn.Parameter(torch.ones(2, 2))], **options)


def test_owners_are_balanced_and_rounds_bounded() -> None:
    costs = [9.0, 1.0, 5.0, 4.0, 4.0, 1.0]
    owners = balanced(costs, [0.0, 3.0, 0.0])
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(3)]
    assert max(loads[0], loads[1] + 3, loads[2]) == 9
    turns = rounds([0, 0, 1, 0, 1], [4, 4, 9, 2, 1], 6)
    assert sorted(itertools.chain(*turns)) == list(range(5))
    for turn in turns:
        for owner in (0, 1):
            own = [number for number in turn if [0, 0, 1, 0, 1][number] == owner]
            assert len(own) < 2 or sum([4, 4, 9, 2, 1][number] for number in own) <= 6


@pytest.mark.parametrize(("shape", "bounds"), [((5, 3), (0, 0, 2, 5)), ((3, 2, 4), (0, 3, 3, 5, 6))])
def test_rows_of_matrices_by_shard(shape: tuple[int, ...], bounds: tuple[int, ...]) -> None:
    matrices = rows_by_shard(shape, bounds)
    owners: Sequence[int] = [
        next(s for s, (a, b) in enumerate(itertools.pairwise(bounds)) if a <= row < b)
        for row in range(bounds[-1])
    ]
    for number, rows in enumerate(matrices):
        held = owners[number * shape[-2] : (number + 1) * shape[-2]]
        assert list(rows) == [held.count(shard) for shard in range(len(bounds) - 1)]
    assert sum(map(sum, matrices)) == math.prod(shape[:-1])
