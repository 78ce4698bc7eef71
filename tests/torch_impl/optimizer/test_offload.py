"""Optimizer state in CPU memory: results and checkpoints are those of no offload, and no transfer is used too early.

On a CPU both sides are CPU memory; the loop of fetching, waiting and sending back is the one that CUDA runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import Toy, sharded_toy
from tests.torch_impl.optimizer.test_moment_dtypes import random_gradients, same_bits
from torch_impl import MainWeightAdamW, load_checkpoint, save_checkpoint
from torch_impl.dtensor.local import local_of
from torch_impl.optimizer import update
from torch_impl.optimizer.offload import Batch, CpuTransfers, Share, Transfers

DTYPES = {
    "float32": {},
    "bfloat16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "float8": {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn},
}


class LateTransfers(Transfers):
    """Every copy is made as late as the waits allow, and what is on the device is spoilt once it may be reused."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on_device = self.most = 0
        self._number = 0

    def fetch(self, homes: Sequence[torch.Tensor]) -> Batch:
        self._number += 1
        self.log.append(f"fetch {self._number}")
        self.on_device += 1
        self.most = max(self.most, self.on_device)
        return Batch(homes, [torch.full_like(home, float("nan")) for home in homes], self._number)

    def await_fetched(self, batch: Batch) -> None:
        self.log.append(f"use {batch.event}")
        for home, copy in zip(batch.homes, batch.copies, strict=True):
            copy.copy_(home)
            home.fill_(float("nan"))

    def send_back(self, batch: Batch) -> None:
        self.log.append(f"send {batch.event}")

    def await_sent(self, batch: Batch) -> None:
        self.log.append(f"sent {batch.event}")
        self.on_device -= 1
        for home, copy in zip(batch.homes, batch.copies, strict=True):
            home.copy_(copy)
            copy.fill_(float("nan"))


def sharded(dtype_name: str, fraction: float, seed_lr: float = 3e-2) -> tuple[Toy, MainWeightAdamW]:
    model = sharded_toy(strategy="optim_grads_params")
    return model, MainWeightAdamW(
        model.parameters(), lr=seed_lr, **DTYPES[dtype_name], offload_fraction=fraction
    )


def run(model: nn.Module, optimizer: MainWeightAdamW, steps: range) -> None:
    for step in steps:
        random_gradients(model, step)
        optimizer.step()


def assert_same(model: nn.Module, optimizer: MainWeightAdamW, other: nn.Module, its: MainWeightAdamW) -> None:
    for param, want in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(local_of(param).detach(), local_of(want).detach())
        mine, theirs = optimizer.state[param], its.state[want]
        assert list(mine) == list(theirs)
        for key in mine:
            assert same_bits(local_of(mine[key]), local_of(theirs[key])), key
            assert getattr(mine[key], "placements", None) == getattr(theirs[key], "placements", None)


def trained_with_and_without(dtype_name: str, path: str) -> None:
    plain, its = sharded(dtype_name, 0.0)
    run(plain, its, range(4))
    save_checkpoint(f"{path}-plain", plain, its, {"step": 4})
    for fraction in (0.3, 1.0):
        model, optimizer = sharded(dtype_name, fraction)
        run(model, optimizer, range(4))
        assert_same(model, optimizer, plain, its)
        save_checkpoint(f"{path}-{fraction}", model, optimizer, {"step": 4})
        other, loaded = sharded(dtype_name, 1.0 - fraction / 2, 9.0)
        load_checkpoint(f"{path}-{fraction}", other, loaded)
        again, by_dict = sharded(dtype_name, fraction, 9.0)
        again.load_state_dict(plain.state_dict())
        by_dict.load_state_dict(its.state_dict())
        for state in by_dict.state.values():
            for key in list(state):
                state[key] = state[key].clone()
        run(model, optimizer, range(4, 6))
        run(other, loaded, range(4, 6))
        run(again, by_dict, range(4, 6))
        assert_same(other, loaded, model, optimizer)
        assert_same(again, by_dict, model, optimizer)


def stored(path: Path) -> tuple[dict[str, bytes], tuple[object, object]]:
    """The data files of a checkpoint, and what its metadata says but for its name and the identity of the save."""
    metadata = FileSystemReader(path).read_metadata()
    data = {file.name: file.read_bytes() for file in sorted(path.glob("*.distcp"))}
    return data, (metadata.state_dict_metadata, metadata.storage_data)


@pytest.mark.fast_cases("bfloat16")
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_offload_changes_neither_results_nor_a_byte_of_a_checkpoint(
    ranks: RankGroup, tmp_path: Path, dtype_name: str
) -> None:
    ranks.run(4, trained_with_and_without, dtype_name, str(tmp_path / "a"))
    plain, entries = stored(tmp_path / "a-plain")
    assert len(plain) == 4
    for fraction in ("0.3", "1.0"):
        files, its_entries = stored(tmp_path / f"a-{fraction}")
        assert files.keys() == plain.keys()
        assert [name for name in plain if files[name] != plain[name]] == []
        assert its_entries == entries


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_results_are_right_when_every_copy_is_made_as_late_as_the_waits_allow(
    monkeypatch: pytest.MonkeyPatch, dtype_name: str
) -> None:
    monkeypatch.setattr(update, "CHUNK", 40)
    late = LateTransfers()
    models = [Toy(), Toy()]
    plain, offloaded = (
        MainWeightAdamW(model.parameters(), **DTYPES[dtype_name], offload_fraction=fraction)
        for model, fraction in zip(models, (0.0, 1.0), strict=True)
    )
    monkeypatch.setattr("torch_impl.optimizer.main_weight.transfers_for", lambda device: late)
    for step in range(3):
        late.log.clear()
        late._number = 0
        for model, optimizer in zip(models, (plain, offloaded), strict=True):
            random_gradients(model, step)
            optimizer.step()
        assert_same(models[1], offloaded, models[0], plain)
        assert late.on_device == 0
    assert late.most == 2
    assert late.log[:9] == [
        "fetch 1",
        "use 1",
        "send 1",
        "fetch 2",
        "use 2",
        "send 2",
        "sent 1",
        "fetch 3",
        "use 3",
    ]
    assert late.log[-1].startswith("sent ")


def test_what_is_fetched_lies_in_other_memory_until_it_is_sent_back() -> None:
    home = torch.arange(4.0)
    for copies in CpuTransfers().stream([[home]]):
        copies[0].mul_(2)
        assert home.tolist() == [0, 1, 2, 3]
    assert home.tolist() == [0, 2, 4, 6]
    assert list(CpuTransfers().stream([])) == []


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.77, 1.0])
def test_the_share_is_the_asked_fraction_to_within_a_tensor_at_any_point(fraction: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [int(torch.randint(0, 100, (), generator=generator)) for _ in range(200)]
    share = Share(fraction)
    seen = picked = 0
    for size in sizes:
        chosen = share.picks(size)
        seen, picked = seen + size, picked + size * chosen
        assert abs(picked - fraction * seen) <= 100
    assert fraction not in (0.0, 1.0) or picked == fraction * seen


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_groups_keep_their_own_rates_and_decay(fraction: float) -> None:
    def parameters() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(5)
        return [nn.Parameter(torch.randn(7, size, generator=generator)) for size in (5, 3, 9, 4)]

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": 0.1, "weight_decay": 0.0},
            {"params": params[2:], "lr": 0.01, "weight_decay": 0.3},
        ]

    mine, expected = parameters(), parameters()
    optimizer = MainWeightAdamW(groups(mine), offload_fraction=fraction)
    reference = torch.optim.AdamW(groups(expected), fused=True)
    generator = torch.Generator().manual_seed(6)
    for _ in range(4):
        for a, b in zip(mine, expected, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="offload_fraction: expected 0 to 1, got"):
        MainWeightAdamW([nn.Parameter(torch.ones(2))], offload_fraction=fraction)
