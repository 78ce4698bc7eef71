"""Directories of steps: which step is loaded, and what stock Orbax's ``CheckpointManager`` makes of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1

from bridge.core.formats import CheckpointError
from jax_impl import load_checkpoint, save_checkpoint, unshard
from tests.support.jax_impl import checkpoint_runs as runs


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 3, 10 and 9 of one run, saved in that order, each with other weights."""
    path, plan, state = tmp_path_factory.mktemp("steps"), runs.plan_of(2), runs.fresh(2)
    for step in (3, 10, 9):
        save_checkpoint(path / str(step), plan, runs.perturbed(state), {"step": step})
        state = runs.perturbed(state)
    return path


def load(path: Path, **options: Any) -> Any:
    return load_checkpoint(path, runs.plan_of(4), runs.OPTIMIZER, **options)


def test_the_latest_step_is_loaded_or_the_one_that_is_named(steps: Path) -> None:
    assert load(steps).train == {"step": 10}
    for step in (3, 9, 10):
        loaded, direct = load(steps, step=step), load(steps / str(step))
        assert loaded.train == direct.train == {"step": step}
        runs.assert_same_bits(
            runs.logical(runs.plan_of(4), loaded.state), runs.logical(runs.plan_of(4), direct.state)
        )
    _, losses = runs.train(load(steps).state, 4, runs.DEFAULT, first=0, count=2)
    _, expected = runs.train(
        load_checkpoint(steps / "10", runs.plan_of(2), runs.OPTIMIZER).state, 2, first=0, count=2
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_steps_whose_save_did_not_finish_are_passed_over(steps: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(steps, run)
    shutil.copytree(run / "10", run / "11.orbax-checkpoint-tmp")
    shutil.copytree(run / "10", run / "12.orbax-checkpoint-tmp-17955")
    (run / "13").mkdir()
    shutil.copytree(run / "10", run / "14")
    (run / "14" / "_METADATA").unlink()
    shutil.copytree(run / "10", run / "15")
    (run / "15" / "commit_success.txt").unlink()
    (run / "16").touch()
    assert load(run).train == {"step": 10}
    for step in (13, 15):
        with pytest.raises(
            CheckpointError,
            match=rf"step {step} in .*, got one whose save did not finish: complete are 3, 9, 10",
        ):
            load(run, step=step)
    for step in (11, 12, 16):
        with pytest.raises(CheckpointError, match=rf"step {step} in .*, got none: complete are 3, 9, 10"):
            load(run, step=step)
    for step in (3, 9, 10, 14, 15):
        shutil.rmtree(run / str(step))
    with pytest.raises(CheckpointError, match=r"expected a complete step, got only .*: 13"):
        load(run)


def test_steps_may_have_prefixes_and_zeros_but_not_one_number(steps: Path, tmp_path: Path) -> None:
    for step in (3, 9, 10):
        shutil.copytree(steps / str(step), tmp_path / f"step_{step:06}")
    assert load(tmp_path).train == {"step": 10}
    assert load(tmp_path, step=9).train == {"step": 9}
    shutil.copytree(steps / "9", tmp_path / "9")
    assert load(tmp_path).train == {"step": 10}
    with pytest.raises(CheckpointError, match=r"one complete step 9 in .*, got 9 and step_000009"):
        load(tmp_path, step=9)


def test_a_single_checkpoint_has_no_steps(steps: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step: expected a directory of steps at .*: leave step out"):
        load(steps / "10", step=10)


def test_steps_of_stock_orbax_are_loaded(tmp_path: Path) -> None:
    plan, state = runs.plan_of(2), runs.fresh(2)
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            state = runs.perturbed(state)
            tree = runs.nested(runs.logical(plan, state)) | {"step": step}
            manager.save(step, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
    assert load(tmp_path).train == {"step": 2}
    runs.assert_same_bits(runs.logical(runs.plan_of(4), load(tmp_path).state), runs.logical(plan, state))
    assert load(tmp_path, step=1).train == {"step": 1}
    assert load(tmp_path / "1").train == {"step": 1}


@pytest.mark.parametrize("restore_call", ["nothing", "standard", "pytree", "named", "sharded"])
def test_stock_checkpoint_manager_restores_steps_with_an_item(tmp_path: Path, restore_call: str) -> None:
    plan, state = runs.plan_of(2), runs.perturbed(runs.fresh(2))
    for step in (7, 8):
        save_checkpoint(
            tmp_path / str(step),
            plan,
            state,
            {"step": step},
            item="state" if restore_call == "named" else "default",
        )
    expected = runs.logical(plan, state)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [7, 8]
        if restore_call == "nothing":
            restored = manager.restore(7)
        elif restore_call == "named":
            restored = manager.restore(7, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
        elif restore_call == "sharded":
            mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
            target = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    np.shape(x),
                    np.asarray(x).dtype,
                    sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
                ),
                runs.nested(expected) | {"train": {"step": np.int64(7)}},
            )
            restored = manager.restore(7, args=ocp.args.StandardRestore(target))
        else:
            args = ocp.args.StandardRestore() if restore_call == "standard" else ocp.args.PyTreeRestore()
            restored = manager.restore(7, args=args)
    assert int(restored["train"].pop("step")) == 7
    named = {"/".join(key.key for key in keys): value for keys, value in jax.tree.leaves_with_path(restored)}
    runs.assert_same_bits(named, expected)


def test_a_step_with_an_item_goes_on_here(tmp_path: Path) -> None:
    plan, state = runs.plan_of(2), runs.perturbed(runs.fresh(2))
    save_checkpoint(tmp_path / "7", plan, state, {"step": 7}, item="default")
    handlers = json.loads((tmp_path / "7" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert list(handlers) == ["default"]
    for path in (tmp_path, tmp_path / "7", tmp_path / "7" / "default"):
        loaded = load(path)
        assert loaded.train == {"step": 7}
        runs.assert_same_bits(runs.logical(runs.plan_of(4), loaded.state), runs.logical(plan, state))
    _, losses = runs.train(load(tmp_path).state, 4, runs.DEFAULT, first=0, count=2)
    _, expected = runs.train(state, 2, first=0, count=2)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "7" / "default")
    assert v1.load(tmp_path / "7").keys() == restored.keys()
    np.testing.assert_array_equal(
        restored["params"]["norm"]["scale"],
        unshard(runs.plan_of(4), load(tmp_path).state.weights)["norm/scale"],
    )
    for name in ("", "a/b", "..", "3"):
        with pytest.raises(ValueError, match="item: expected letters"):
            save_checkpoint(tmp_path / "8", plan, load_checkpoint(tmp_path, plan).state, item=name)
    assert [child.name for child in tmp_path.iterdir()] == ["7"]
