"""Step counts that are numbers, have one element, or stand in a group; names that wrappers have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box, TensorInfo
from bridge.core.mapping import MappingError, MappingTable, parse_mapping
from bridge.core.mapping.plan.running import LoadedAs, RunState

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)
SHAPES = {"a": (2, 3), "b": (4, 5)}


def rules() -> MappingTable:
    return parse_mapping(
        "".join(f'[[rule]]\ntorch = "{n}.weight : o m"\njax = "{n}/kernel : m o"\n' for n in SHAPES),
        "steps.toml",
    )


def state_dict(step: object, *, numbered: bool = False, in_group: bool = False) -> dict[str, Any]:
    keys: dict[str, Any] = {n: number if numbered else f"{n}.weight" for number, n in enumerate(SHAPES)}
    state = {
        keys[n]: {
            "exp_avg": torch.full(shape, 1.0),
            "exp_avg_sq": torch.full(shape, 2.0),
            **({} if in_group else {"step": step}),
        }
        for n, shape in SHAPES.items()
    }
    group = {"params": [*keys.values()], "lr": 0.1, **({"step": step} if in_group else {})}
    model = {f"{n}.weight": torch.full(shape, 3.0) for n, shape in SHAPES.items()}
    return {"model": model, "optimizer": {"state": state, "param_groups": [group]}}


def count(folder: Path) -> int:
    with open_checkpoint(folder) as reader:
        return int(reader.read("opt_state/count"))


STEPS: dict[str, object] = {
    "int": 3,
    "float": 3.0,
    "NumPy": np.int64(3),
    "tensor": torch.tensor(3.0),
    "shape (1,)": torch.tensor([3.0]),
    "int64, shape (1,)": torch.tensor([3]),
}


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("form", STEPS)
def test_a_step_of_any_kind_is_the_count(tmp_path: Path, form: str, numbered: bool) -> None:
    torch.save(state_dict(STEPS[form], numbered=numbered), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "out", mapping=rules())
    assert count(tmp_path / "out") == 3


@pytest.mark.parametrize("numbered", [False, True])
def test_a_step_of_a_group_is_that_of_its_weights(tmp_path: Path, numbered: bool) -> None:
    torch.save(state_dict(7, numbered=numbered, in_group=True), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "out", mapping=rules())
    assert count(tmp_path / "out") == 7


def test_in_dcp_too_and_back_as_torch_has_it(tmp_path: Path) -> None:
    dcp.save(state_dict(3), checkpoint_id=tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "out", mapping=rules())
    assert count(tmp_path / "out") == 3
    convert(tmp_path / "out", tmp_path / "back", mapping=rules())
    with open_checkpoint(tmp_path / "back") as reader:
        step = reader.read("optimizer.state.a.weight.step")
    assert (step.dtype, step.shape, float(step)) == (np.float32, (), 3.0)


def test_a_flattened_optimizer(tmp_path: Path) -> None:
    tree = state_dict(3)
    flat = {f"state.{w}.{k}": v for w, s in tree["optimizer"]["state"].items() for k, v in s.items()}
    dcp.save({"model": tree["model"], "optimizer": flat}, checkpoint_id=tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "out", mapping=rules())
    assert count(tmp_path / "out") == 3


@pytest.mark.parametrize("step", [2.5, -1, 2**24 + 1, torch.tensor([3.0, 3.0]), True, None])
def test_what_is_no_count_is_refused(tmp_path: Path, step: object) -> None:
    torch.save(state_dict(step), tmp_path / "a.pt")
    with pytest.raises(MappingError, match=r"expected a whole number of steps|a\.weight\.step"):
        convert(tmp_path / "a.pt", tmp_path / "out", mapping=rules())
    convert(tmp_path / "a.pt", tmp_path / "w", mapping=rules(), selection=Selection(weights_only=True))


@pytest.mark.parametrize("step", [True, None])
def test_a_step_of_a_group_that_is_no_count_is_none(tmp_path: Path, step: object) -> None:
    torch.save(state_dict(step, in_group=True), tmp_path / "a.pt")
    with pytest.raises(MappingError, match=r"but optimizer\.state\.a\.weight\.step, .* are missing$"):
        convert(tmp_path / "a.pt", tmp_path / "out", mapping=rules())


def test_a_load_through_a_mapping_reads_numbers_and_names_as_a_conversion_does(tmp_path: Path) -> None:
    torch.save(state_dict(3, numbered=True), tmp_path / "a.pt")
    sizes = {f"params/{n}/kernel": shape[::-1] for n, shape in SHAPES.items()}
    own = {
        name: TensorInfo(name, tuple(name.split("/")), shape, np.dtype(np.float32), (Box.whole(shape),))
        for name, shape in sizes.items()
    }
    run = RunState("orbax", "the run", own, {}, {}, lambda _: None)
    with LoadedAs(open_checkpoint(tmp_path / "a.pt"), run, rules()) as loaded:
        assert int(loaded.read("opt_state/count")) == 3
        assert np.array_equal(loaded.read("opt_state/nu/b/kernel"), np.full((5, 4), 2.0))


def wrapped(state: dict[str, Any], how: str) -> dict[str, Any]:
    """The state dict with names as wrappers make them, in weights, moments and groups."""

    def name(plain: str) -> str:
        return how.format(*plain.split(".", 1))

    optimizer = state["optimizer"]
    groups = [{**group, "params": [*map(name, group["params"])]} for group in optimizer["param_groups"]]
    moments = {name(plain): values for plain, values in optimizer["state"].items()}
    model = {name(plain): value for plain, value in state["model"].items()}
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


@pytest.mark.parametrize("file", ["dcp", "torch"])
@pytest.mark.parametrize(
    "how",
    [
        "_orig_mod.{}.{}",
        "{}._orig_mod.{}",
        "{}._checkpoint_wrapped_module._orig_mod.{}",
        "_fsdp_wrapped_module.{}._fsdp_wrapped_module.{}",
        "module.{}.{}",
        "module._orig_mod.{}.{}",
        "net.inner.{}.{}",
    ],
)
def test_wrapped_names_are_the_models_own(tmp_path: Path, how: str, file: str) -> None:
    state = state_dict(torch.tensor(3.0))
    for number, tree in enumerate((state, wrapped(state, how))):
        if file == "dcp":
            dcp.save(tree, checkpoint_id=tmp_path / f"{number}")
        else:
            torch.save(tree, tmp_path / f"{number}")
        convert(tmp_path / f"{number}", tmp_path / f"jax{number}", mapping=rules())
    assert diff(tmp_path / "jax0", tmp_path / "jax1").same
    assert count(tmp_path / "jax1") == 3
    assert diff(tmp_path / "1", tmp_path / "jax0", mapping=rules()).same


def test_names_that_would_be_equal_without_wrappers_stay(tmp_path: Path) -> None:
    state = state_dict(torch.tensor(3.0))
    state["model"]["_orig_mod.a.weight"] = torch.zeros(2, 3)
    torch.save(state, tmp_path / "twice.pt")
    with pytest.raises(MappingError, match=r"1 of \d+ tensors match no rule: model\._orig_mod\.a\.weight"):
        convert(tmp_path / "twice.pt", tmp_path / "jax", mapping=rules())


def test_without_a_mapping_names_stay(tmp_path: Path) -> None:
    torch.save({"_orig_mod.a.weight": torch.zeros(2, 3)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    with open_checkpoint(tmp_path / "dcp") as reader:
        assert [*reader.tensors] == ["_orig_mod.a.weight"]


@pytest.mark.parametrize("how", ["_orig_mod.{}.{}", "{}._checkpoint_wrapped_module.{}", "module.{}.{}"])
def test_a_template_keeps_its_wrapped_names(tmp_path: Path, how: str) -> None:
    state = state_dict(torch.tensor(3.0))
    dcp.save(state, checkpoint_id=tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "jax", mapping=rules())
    fresh = {
        key: {n: torch.zeros_like(t) for n, t in values.items()}
        for key, values in state["optimizer"]["state"].items()
    }
    weights = {name: torch.zeros_like(t) for name, t in state["model"].items()}
    template = {"model": weights, "optimizer": {**state["optimizer"], "state": fresh}}
    dcp.save(wrapped(template, how), checkpoint_id=tmp_path / "template")
    report = convert(tmp_path / "jax", tmp_path / "back", mapping=rules(), like=tmp_path / "template")
    dcp.save(wrapped(state, how), checkpoint_id=tmp_path / "wrapped")
    assert diff(tmp_path / "back", tmp_path / "wrapped").same
    assert not any("exp_avg" in name or "weight" in name for name in report.filled if "params" not in name)


def test_rules_that_name_wrappers_mean_them(tmp_path: Path) -> None:
    state = state_dict(torch.tensor(3.0))
    dcp.save(wrapped(state, "{}._orig_mod.{}"), checkpoint_id=tmp_path / "torch")
    named = "".join(
        f'[[rule]]\ntorch = "{n}._orig_mod.weight : o m"\njax = "{n}/kernel : m o"\n' for n in SHAPES
    )
    convert(tmp_path / "torch", tmp_path / "jax", mapping=parse_mapping(named, "wrapped.toml"))
    assert diff(tmp_path / "torch", tmp_path / "jax", mapping=parse_mapping(named, "wrapped.toml")).same
