"""Hyperparameters that name weights, between conventions of PyTorch's kind and through a tree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats.tensors.base import TreePath
from bridge.core.mapping import MappingError, make_plan, parse_mapping
from bridge.core.mapping.states.hyperparameters import _is_list
from tests.support.bridge.memory_reader import MemoryReader

RULES = """
[convention.t]
[convention.u]
[convention.j]
[[rule]]
t = "blocks.{i}.weight : n m"
u = "h.{i}.weight : n m"
j = "blocks/kernel : {i} m n"
[[rule]]
t = "blocks.{i}.bias : n"
u = "h.{i}.bias : n"
j = "blocks/bias : {i} n"
"""
MAPPING = parse_mapping(RULES, "hyper")


class Model(torch.nn.Module):
    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        setattr(self, name, torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)]))


def optimizer_of(model: torch.nn.Module, seed: int) -> torch.optim.AdamW:
    """Two groups with other hyperparameters; two steps."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.3, "lr": 0.01 * seed}, {"params": biases, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("through", [False, True])
def test_a_stock_optimizer_loads_what_another_models_saved(tmp_path: Path, flat: bool, through: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = Model("blocks", 1)
    optimizer = optimizer_of(model, 1)
    saved = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(saved, checkpoint_id=tmp_path / "t", no_dist=True)
    if through:
        convert(tmp_path / "t", tmp_path / "j", mapping=MAPPING, into="j")
        convert(tmp_path / "j", tmp_path / "u", mapping=MAPPING, into="u")
        convert(tmp_path / "j", tmp_path / "back", mapping=MAPPING, into="t")
    else:
        convert(tmp_path / "t", tmp_path / "u", to="dcp", mapping=MAPPING, into="u")
        convert(tmp_path / "u", tmp_path / "back", to="dcp", mapping=MAPPING, into="t")
    for name, folder in (("h", "u"), ("blocks", "back")):
        other = Model(name, 2)
        fresh = optimizer_of(other, 2)
        state = {
            "model": other.state_dict(),
            "optimizer": get_optimizer_state_dict(other, fresh, options=options),
        }
        dcp.load(state, checkpoint_id=tmp_path / folder, no_dist=True)
        other.load_state_dict(state["model"])
        set_optimizer_state_dict(other, fresh, state["optimizer"], options=options)
        for k, group in enumerate(fresh.param_groups):
            assert {key: group[key] for key in ("lr", "weight_decay", "betas")} == {
                key: optimizer.param_groups[k][key] for key in ("lr", "weight_decay", "betas")
            }
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
            assert all(torch.equal(optimizer.state[a][k], fresh.state[b][k]) for k in optimizer.state[a])


def reader(format: str, objects: dict[TreePath, object]) -> MemoryReader:
    arrays = {f"model.h.{i}.weight": np.full((2, 3), i + 1.0, np.float32) for i in range(2)}
    arrays |= {f"model.h.{i}.bias": np.full(2, i + 5.0, np.float32) for i in range(2)}
    return MemoryReader(format, arrays, objects)


def test_lists_that_are_not_of_names_and_names_of_no_convention_stay() -> None:
    objects: dict[TreePath, object] = {
        ("optimizer", "param_groups", 0, "params"): [0, 1],
        ("optimizer", "param_groups", 1, "params"): ["strange.weight"],
        ("optimizer", "param_groups.h.0.weight.lr"): 0.5,
    }
    source = reader("dcp", objects)
    plan = make_plan(source, "dcp", MAPPING, into="t")
    assert {path: source.objects[name] for path, name in plan.objects.values()} == objects
    assert plan.notes == {}


def test_different_hyperparameters_of_weights_that_become_one_are_refused() -> None:
    fused = parse_mapping(
        '[convention.t]\n[convention.u]\n[[rule]]\nt = "all.x : (a + b) m"\nu = ["a.x : a m", "b.x : b m"]\n',
        "fused",
    )
    arrays = {"model.a.x": np.ones((2, 3), np.float32), "model.b.x": np.ones((1, 3), np.float32)}
    for lr, fits in ((0.5, True), (0.25, False)):
        objects: dict[TreePath, object] = {
            ("optimizer", "param_groups.a.x.lr"): 0.5,
            ("optimizer", "param_groups.b.x.lr"): lr,
        }
        source = MemoryReader("dcp", arrays, objects)
        if fits:
            plan = make_plan(source, "dcp", fused, into="t")
            assert plan.notes == {
                "optimizer.param_groups.all.x.lr": (("optimizer", "param_groups.all.x.lr"), 0.5)
            }
            continue
        with pytest.raises(
            MappingError, match=r"equal hyperparameters of weights that become all\.x, got 0\.5 in .* 0\.25"
        ):
            make_plan(source, "dcp", fused, into="t")


def test_a_list_of_parameters_is_known_by_its_place() -> None:
    groups = "param_groups"
    for path in ((groups, 0, "params"), ("optimizer", groups, 0, "params")):
        assert _is_list(path)
    for path in ((groups, "params"), (groups, 0, "lr"), (groups, 0, "params", 1), (0, groups, "params")):
        assert not _is_list(path)
