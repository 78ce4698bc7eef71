"""Several items of a step read as one tree, and written as items again, beside stock Orbax."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import CheckpointError, open_checkpoint
from tests.support.bridge.bits import same_bits

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


def params(step: int) -> dict[str, Any]:
    return {"layer": {"kernel": jnp.arange(12.0).reshape(3, 4) + step, "bias": jnp.ones(4)}}


def state(step: int) -> dict[str, Any]:
    weights = params(step)
    moments = OPTIMIZER.init(weights)
    return {"params": weights, "opt_state": jax.tree.map(lambda x: x + step, moments)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("items") / "run"
    with ocp.CheckpointManager(path, item_names=("params", "opt_state", "metrics")) as manager:
        for step in (1, 2, 11):
            items = {name: ocp.args.StandardSave(tree) for name, tree in state(step).items()}
            manager.save(step, args=ocp.args.Composite(**items, metrics=ocp.args.JsonSave({"loss": 1.0})))
    return path


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_parts_of_one_train_state_are_found_and_read(run: Path) -> None:
    with open_checkpoint(run / "2") as reader:
        assert [info.path for info in reader.tensors.values()] == [
            ("params", "layer", "bias"),
            ("params", "layer", "kernel"),
            *(("opt_state", 1, 0, *rest) for rest in [("count",)]),
            *(("opt_state", 1, 0, m, "layer", w) for m in ("mu", "nu") for w in ("bias", "kernel")),
        ]
        assert same_bits(reader.read("params/layer/kernel"), np.asarray(params(2)["layer"]["kernel"]))
    assert verify(run / "2").good
    assert next(t.name for t in inspect(run / "2", items=["opt_state"]).tensors) == "1/0/count"
    both = inspect(run / "2", items=["opt_state", "params"])
    assert [t.path[0] for t in both.tensors] == ["opt_state"] * 5 + ["params"] * 2


@pytest.mark.parametrize("by", ["dcp", pytest.param("safetensors", marks=pytest.mark.slow), "orbax"])
def test_items_come_back_as_stock_orbax_restores_them(run: Path, tmp_path: Path, by: str) -> None:
    convert(run, tmp_path / "one", to=by, step="latest")
    assert diff(run, tmp_path / "one", step=11).within
    convert(tmp_path / "one", tmp_path / "back" / "11", write_items=["params", "opt_state"])
    assert diff(run / "11", tmp_path / "back" / "11").within
    report = verify(tmp_path / "back" / "11")
    assert report.good
    assert report.manifest
    expected = state(11)
    with ocp.CheckpointManager(tmp_path / "back", item_names=("params", "opt_state")) as manager:
        items = {name: ocp.args.StandardRestore(tree) for name, tree in expected.items()}
        restored = manager.restore(11, args=ocp.args.Composite(**items))
    chosen = {name: restored[name] for name in expected}
    assert jax.tree.structure(chosen) == jax.tree.structure(expected)
    assert all(same_bits(a, b) for a, b in zip(leaves(chosen), leaves(expected), strict=True))
    # A step with what was restored.
    updates, _ = OPTIMIZER.update(params(1), chosen["opt_state"], chosen["params"])
    others, _ = OPTIMIZER.update(params(1), expected["opt_state"], expected["params"])
    assert all(same_bits(a, b) for a, b in zip(leaves(updates), leaves(others), strict=True))


def test_a_mapping_works_over_both_items(run: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[convention.torch]\n[convention.flax]\n[[rule]]\ntorch = "fc.weight : o i"\nflax = "layer/kernel : i o"\n'
        '[[rule]]\ntorch = "fc.bias"\nflax = "layer/bias"\n'
    )
    convert(run, tmp_path / "dcp", mapping=rules, into="torch", step=2)
    with open_checkpoint(tmp_path / "dcp") as reader:
        assert {
            "model.fc.weight",
            "optimizer.state.fc.weight.exp_avg",
            "optimizer.state.fc.bias.step",
        } <= set(reader.tensors)
    convert(
        tmp_path / "dcp",
        tmp_path / "back",
        mapping=rules,
        into="flax",
        write_items=["params", "opt_state"],
    )
    assert diff(run / "2", tmp_path / "back", items=["params", "opt_state"]).max_ulp == 0


def test_damage_in_any_item_is_found(run: Path, tmp_path: Path) -> None:
    convert(run / "2", tmp_path / "ours", to="orbax", write_items=["params", "opt_state"])
    for item in ("params", "opt_state"):
        shutil.copytree(tmp_path / "ours", tmp_path / item)
        file = next((tmp_path / item / item / "d").iterdir())
        data = bytearray(file.read_bytes())
        data[3] ^= 1
        file.write_bytes(data)
        report = verify(tmp_path / item)
        assert not report.good
        assert all(problem.where.startswith(f"{item}/") for problem in report.problems)
        with pytest.raises(CheckpointError):
            convert(tmp_path / item, tmp_path / "out", to="dcp")
        assert not (tmp_path / "out").exists()


def test_what_is_no_item_is_named(run: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"items": ["x", "params"]}, r"expected the item x \(--item\), found opt_state, params"),
        ({"items": ["params", "params"]}, "expected each item once, got params twice"),
        ({"write_items": ["params"]}, r"'opt_state/0': expected leaves below params \(--write-item\)"),
        ({"write_items": ["params", "../x"]}, "expected names of items"),
        ({"write_items": ["params", "opt_state", "ema"]}, "expected a leaf below 'ema'"),
    ]
    for options, message in cases:
        with pytest.raises(CheckpointError, match=message):
            convert(run / "2", tmp_path / "out", to="orbax", **options)
        assert list(tmp_path.iterdir()) == []
    convert(run / "2", tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="expected a checkpoint of several items"):
        convert(tmp_path / "dcp", tmp_path / "out", items=["params"])
    with pytest.raises(ValueError, match="expected format orbax, which has items"):
        convert(run / "2", tmp_path / "out", to="dcp", write_items=["params"])
    result = CliRunner().invoke(app, ["inspect", str(run), "--step", "2", "--item", "opt_state,params"])
    assert result.exit_code == 0
    assert "opt_state/1/0/count" in result.stdout
    # Names that do not say what they are stay a question.
    shutil.copytree(run / "2", tmp_path / "odd")
    (tmp_path / "odd" / "opt_state").rename(tmp_path / "odd" / "other")
    with pytest.raises(CheckpointError, match="holds several items: other, params"):
        open_checkpoint(tmp_path / "odd")
    assert len(inspect(tmp_path / "odd", items=["other"]).tensors) == 5


@pytest.mark.parametrize("command", ["diff", "map"])
def test_items_of_two_checkpoints_that_have_none_are_refused(command: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", w=np.ones(3))
    done = CliRunner().invoke(
        app, [command, str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--item", "params"]
    )
    assert done.exit_code == 2
    assert done.output == (
        f"error: {tmp_path}/a.npz: expected a checkpoint of several items (--item), found one of npz\n"
    )


def test_what_a_conversion_notes_gets_an_item_of_its_own(tmp_path: Path) -> None:
    key = jax.random.key(0, impl="rbg")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"params": {"w": jnp.ones(3)}, "rng": {"key": key, "none": None}})
    convert(tmp_path / "a", tmp_path / "b", to="orbax", write_items=["params", "rng"])
    assert diff(tmp_path / "a", tmp_path / "b").within
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        target = {"key": key, "none": None}
        restored = checkpointer.restore(tmp_path / "b" / "rng", args=ocp.args.StandardRestore(target))
    assert restored["key"].dtype == key.dtype
    assert restored["none"] is None


def test_notes_of_places_are_an_item_that_is_read_with_the_others(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            tmp_path / "a", {"params": {"net": {"w": jnp.ones((2, 3))}}, "opt_state": {"x": jnp.ones(2)}}
        )
    rules = tmp_path / "rules.toml"
    rules.write_text('[convention.torch]\n[convention.flax]\n[[rule]]\ntorch = "v : o i"\nflax = "w : i o"\n')
    convert(
        tmp_path / "a",
        tmp_path / "dcp",
        mapping=rules,
        into="torch",
        selection=Selection(drop=("opt_state/*",)),
    )
    with open_checkpoint(tmp_path / "dcp") as reader:
        assert "twinshard.places" in reader.objects
    convert(tmp_path / "dcp", tmp_path / "b", write_items=["model"])
    assert {path.name for path in (tmp_path / "b").iterdir() if path.is_dir()} == {"model", "twinshard"}
    with open_checkpoint(tmp_path / "b") as reader:
        assert list(reader.tensors) == ["model/v"]
        assert "twinshard/places" in reader.objects
    assert verify(tmp_path / "b").good
