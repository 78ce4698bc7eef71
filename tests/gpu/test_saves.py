"""Saves from a GPU, behind training and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

from bridge.checkpoints.verify.verification import verify
from tests.gpu.devices import DEVICE, busy, needs_device
from tests.gpu.networks import Network, same_bits, sharded, train, values
from tests.support.torch_impl.async_jobs import held_back
from torch_impl import MainWeightAdamW, load_checkpoint, save_checkpoint, save_checkpoint_async
from torch_impl.dtensor.local import local_of

pytestmark = needs_device

FLOAT8: dict[str, Any] = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn}


def built(moments: dict[str, Any], **options: Any) -> tuple[Network, MainWeightAdamW]:
    model = sharded(**options)
    return model, MainWeightAdamW(model.parameters(), lr=1e-2, **moments)


def state_of(optimizer: MainWeightAdamW) -> list[torch.Tensor]:
    return [local_of(value) for state in optimizer.state.values() for _, value in sorted(state.items())]


@pytest.mark.parametrize(
    ("moments", "options"),
    [
        ({}, {}),
        (FLOAT8, {}),
        ({"offload_fraction": 1.0}, {}),
        ({}, {"offload_policy": CPUOffloadPolicy()}),
    ],
    ids=str,
)
def test_a_save_behind_training_holds_what_was_there_when_it_began(
    one_rank: None, tmp_path: Path, moments: dict[str, Any], options: dict[str, Any]
) -> None:
    model, optimizer = built(moments, **options)
    train(model, optimizer, range(2))
    weights, state = values(model), [tensor.cpu().clone() for tensor in state_of(optimizer)]
    # What is still under way on the device when the save begins belongs to the state.
    busy(100)
    with held_back() as release:
        pending = save_checkpoint_async(tmp_path / "later", model, optimizer, {"step": 2})
        losses = train(model, optimizer, range(2, 5))
        assert not same_bits(values(model), weights)
        release()
        pending.wait()
    assert verify(tmp_path / "later").good
    other, its = built(moments, **options)
    assert load_checkpoint(tmp_path / "later", other, its)["step"] == 2
    assert same_bits(values(other), weights)
    assert same_bits(state_of(its), state)
    assert train(other, its, range(2, 5)) == losses


def test_the_step_before_a_save_is_in_the_save(one_rank: None, tmp_path: Path) -> None:
    """Without a wait for the device in between."""
    model, optimizer = built({})
    with torch.no_grad():
        busy(200)
        for param in model.parameters():
            local_of(param).fill_(3.0)
    save_checkpoint_async(tmp_path / "later", model, optimizer).wait()
    other, its = built({})
    load_checkpoint(tmp_path / "later", other, its)
    assert all(bool((tensor == 3).all()) for tensor in values(other))


def test_stock_dcp_saves_and_loads_sharded_models(one_rank: None, tmp_path: Path) -> None:
    model, optimizer = built({})
    train(model, optimizer, range(2))
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "stock")
    other, _ = built({})
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=tmp_path / "stock")
    set_model_state_dict(other, state)
    assert same_bits(values(other), values(model))
    assert {param.device.type for param in other.parameters()} == {DEVICE}


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="older torch saves none of them so"
)
def test_stock_asynchronous_saves_hold_the_state_when_they_began(one_rank: None, tmp_path: Path) -> None:
    model, optimizer = built({})
    train(model, optimizer, range(2))
    weights = values(model)
    future = dcp.async_save(get_model_state_dict(model), checkpoint_id=tmp_path / "stock")
    train(model, optimizer, range(2, 4))
    future.result()
    other, _ = built({})
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=tmp_path / "stock")
    set_model_state_dict(other, state)
    assert same_bits(values(other), weights)


def test_a_checkpoint_moves_between_the_device_and_the_hosts_memory(one_rank: None, tmp_path: Path) -> None:
    model, optimizer = built({})
    train(model, optimizer, range(2))
    save_checkpoint(tmp_path / "device", model, optimizer)
    offloaded, its = built({}, offload_policy=CPUOffloadPolicy())
    load_checkpoint(tmp_path / "device", offloaded, its)
    assert same_bits(values(offloaded), values(model))
    save_checkpoint(tmp_path / "host", offloaded, its)
    back, again = built({})
    load_checkpoint(tmp_path / "host", back, again)
    assert same_bits(state_of(again), state_of(optimizer))
    assert train(back, again, range(2, 4)) == train(model, optimizer, range(2, 4))
