"""Loading moments that were saved in another format: refused by default, converted when asked for."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from bridge.core.formats import CheckpointError
from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import sharded_toy
from tests.torch_impl.optimizer.test_moment_dtypes import random_gradients, same_bits, train, whole_state
from torch_impl import MainWeightAdamW, load_checkpoint, save_checkpoint
from torch_impl.optimizer.moments import MomentFormat

FLOAT8, WIDE_FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16, FLOAT8, WIDE_FLOAT8]
MOMENTS = {"exp_avg": False, "exp_avg_sq": True}


def made(dtype: torch.dtype, strategy: str = "optim_grads_params") -> tuple[nn.Module, MainWeightAdamW]:
    model = sharded_toy(strategy=strategy)
    optimizer = MainWeightAdamW(model.parameters(), lr=3e-2, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    return model, optimizer


def save(path: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model, optimizer = made(dtype)
    for step in range(3):
        random_gradients(model, step)
        optimizer.step()
    save_checkpoint(path, model, optimizer)
    return whole_state(model, optimizer)


def converted(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the whole state is in another format, parameter by parameter, from the definition."""
    tensors = {name: value for name, value in state.items() if ".exp_avg" not in name}
    for name in (name for name in state if f"{name}.exp_avg" in state):
        weight = state[name]
        for key, positive in MOMENTS.items():
            moment_format = MomentFormat(key, dtype, positive)
            values = state[f"{name}.{key}"].float() * state.get(f"{name}.{key}_scale", torch.ones(()))
            new = moment_format.zeros(weight, False)
            moment_format.encode(values, new[key], new.get(f"{key}_scale"), 0, 3)
            tensors |= {f"{name}.{key}": value.float() for key, value in new.items()}
    return tensors


def load(path: str, dtype: torch.dtype, strategy: str) -> dict[str, torch.Tensor]:
    model, optimizer = made(dtype, strategy)
    load_checkpoint(path, model, optimizer, moments="convert")
    state = whole_state(model, optimizer)
    assert math.isfinite(train(model, optimizer, range(3, 5)))
    return state


@pytest.mark.fast_cases("saved1-wanted1")
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.float32, FLOAT8),
        (torch.float32, WIDE_FLOAT8),
        (FLOAT8, torch.float32),
        (FLOAT8, WIDE_FLOAT8),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (WIDE_FLOAT8, FLOAT8),
    ],
)
def test_moments_become_the_optimizers_as_on_whole_tensors(
    ranks: RankGroup, tmp_path: Path, saved: torch.dtype, wanted: torch.dtype
) -> None:
    path = str(tmp_path / "a")
    expected = converted(ranks.run(4, save, path, saved)[0], wanted)
    for world, strategy in ((3, "optim_grads_params"), (2, "optim")):
        for state in ranks.run(world, load, path, wanted, strategy):
            assert state.keys() == expected.keys()
            for name in expected:
                assert same_bits(state[name], expected[name]), name


@pytest.mark.fast_cases("dtype3")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_load_in_the_same_format_converts_nothing(
    ranks: RankGroup, tmp_path: Path, dtype: torch.dtype
) -> None:
    path = str(tmp_path / "a")
    expected = ranks.run(3, save, path, dtype)[0]
    for state in ranks.run(2, load, path, dtype, "optim_grads_params"):
        for name in expected:
            assert same_bits(state[name], expected[name]), name


def refused(path: str, dtype: torch.dtype) -> str:
    model, optimizer = made(dtype)
    random_gradients(model, 9)
    optimizer.step()
    before = whole_state(model, optimizer)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, model, optimizer)
    after = whole_state(model, optimizer)
    assert all(same_bits(after[name], before[name]) for name in before)
    return str(error.value)


@pytest.mark.fast_cases("saved0-wanted0")
@pytest.mark.parametrize(("saved", "wanted"), [(torch.float32, FLOAT8), (FLOAT8, torch.bfloat16)])
def test_another_format_is_refused_by_name_with_the_way_out_and_nothing_changes(
    ranks: RankGroup, tmp_path: Path, saved: torch.dtype, wanted: torch.dtype
) -> None:
    path = str(tmp_path / "a")
    ranks.run(2, save, path, saved)
    words = {torch.float32: "float32", FLOAT8: "float8_e4m3fn with scales", torch.bfloat16: "bfloat16"}
    for text in ranks.run(2, refused, path, wanted):
        assert 'load_checkpoint(..., moments="convert") converts them' in text
        assert re.search(rf": expected {words[wanted]}, found {words[saved]}(?! with)", text), text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_scales_that_lie_by_columns_are_read_where_they_lie(tmp_path: Path) -> None:
    model = nn.Linear(6, 4)
    optimizer = MainWeightAdamW(model.parameters(), exp_avg_dtype=FLOAT8, exp_avg_sq_dtype=FLOAT8)
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, param in model.named_parameters():
        state[name] = {"step": torch.tensor(3.0)}
        for key in MOMENTS:
            values = torch.rand(param.shape, generator=generator)
            state[name][key] = values
            if param.ndim > 1:
                state[name][key] = (100 * values).to(FLOAT8)
                state[name][f"{key}_scale"] = torch.rand(1, 6, generator=generator)
    groups = [{"lr": 1e-3, "params": [*state]}]
    tree = {"model": dict(model.state_dict()), "optimizer": {"state": state, "param_groups": groups}}
    dcp.save(tree, checkpoint_id=tmp_path / "a", no_dist=True)
    load_checkpoint(tmp_path / "a", model, optimizer, moments="convert")
    for key, positive in MOMENTS.items():
        moment_format = MomentFormat(key, FLOAT8, positive)
        saved = state["weight"]
        expected = moment_format.zeros(model.weight, False)
        moment_format.encode(saved[key].float() * saved[f"{key}_scale"], *expected.values(), 0, 3)
        for name, value in expected.items():
            assert same_bits(optimizer.state[model.weight][name], value)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["step"].item() == 4


def test_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="moments: expected 'same' or 'convert', got 'cast'"):
        load_checkpoint(tmp_path, nn.Linear(2, 2), moments="cast")
