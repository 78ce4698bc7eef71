"""A run that saves by the manager, ends, and goes on; several processes are in ``test_async.py``."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError
from bridge.core.formats.saving import manager as manager_module
from jax_impl import CheckpointManager, load_checkpoint, save_checkpoint, save_checkpoint_async
from jax_impl.checkpoint import checkpoint as checkpoint_module
from tests.support.jax_impl import checkpoint_runs as runs

CASE = (2,)


def go_on(path: Path, first: int, last: int, **options: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """From the latest step if there is one; every step is saved."""
    plan, state = runs.plan_of(*CASE), runs.fresh(*CASE)
    losses = []
    with CheckpointManager(path, **options) as manager:
        if first:
            loaded = manager.load(plan, runs.OPTIMIZER)
            assert loaded.train == {"step": first}
            state = loaded.state
        for index in range(first, last):
            state, loss = runs.train(state, *CASE, first=index, count=1)
            losses += loss
            manager.save(index + 1, plan, state, {"step": index + 1}, metrics={"loss": np.float32(index)})
    return losses, runs.logical(plan, state)


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_goes_on_from_the_latest_step_as_if_nothing_had_happened(
    tmp_path: Path, asynchronous: bool
) -> None:
    options: dict[str, Any] = {"max_to_keep": 2, "best_metric": "loss", "asynchronous": asynchronous}
    losses, arrays = go_on(tmp_path / "a", 0, 5, **options)
    before, _ = go_on(tmp_path / "b", 0, 3, **options)
    after, resumed = go_on(tmp_path / "b", 3, 5, **options)
    assert before + after == losses
    runs.assert_same_bits(resumed, arrays)
    assert sorted(os.listdir(tmp_path / "b")) == ["1", "4", "5"]
    assert all(verify(tmp_path / "b" / name).good for name in ("1", "4", "5"))
    manager = CheckpointManager(tmp_path / "b", best_metric="loss")
    assert (manager.all_steps(), manager.latest_step(), manager.best_step()) == ([1, 4, 5], 5, 1)
    assert manager.metrics(4) == {"loss": 3.0}
    plan = runs.plan_of(*CASE)
    assert manager.load(plan, runs.OPTIMIZER, step=4).train == {"step": 4}
    # Without the manager, the same.
    assert load_checkpoint(tmp_path / "b", plan, runs.OPTIMIZER).train == {"step": 5}


def test_steps_removed_by_hand_and_unfinished_ones_are_passed_over(tmp_path: Path) -> None:
    go_on(tmp_path, 0, 4, max_to_keep=3)
    shutil.rmtree(tmp_path / "4")
    (tmp_path / "9.tmp-0a1b2c3d").mkdir()
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes.txt").touch()
    go_on(tmp_path, 3, 5, max_to_keep=3)
    assert sorted(os.listdir(tmp_path)) == ["3", "4", "5", "5.orbax-checkpoint-tmp", "notes.txt"]


def test_a_directory_without_steps_and_a_place_that_cannot_be_written_are_errors(tmp_path: Path) -> None:
    plan, state = runs.plan_of(*CASE), runs.fresh(*CASE)
    manager = CheckpointManager(tmp_path / "none")
    assert manager.latest_step() is None
    with pytest.raises(CheckpointError, match="expected a complete step, got none"):
        manager.load(plan, runs.OPTIMIZER)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file: expected a directory"):
        CheckpointManager(tmp_path / "file").save(1, plan, state)
    with pytest.raises(ValueError, match="metrics: loss: expected a number"):
        manager.save(1, plan, state, metrics={"loss": "low"})  # type: ignore[dict-item]  # the case


def test_a_step_goes_only_when_its_successor_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed, seen = manager_module._renamed, []

    def watched(step: Path) -> Path:
        seen.append((step.name, verify(tmp_path / str(int(step.name) + 1)).good))
        return renamed(step)

    monkeypatch.setattr(manager_module, "_renamed", watched)
    go_on(tmp_path, 0, 3, max_to_keep=1)
    assert seen == [("1", True), ("2", True)]
    assert os.listdir(tmp_path) == ["3"]


def test_a_load_takes_what_is_still_being_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint_module._OpenedSave.write

    def late(self: Any) -> None:
        time.sleep(0.3)
        write(self)

    monkeypatch.setattr(checkpoint_module._OpenedSave, "write", late)
    plan, state = runs.plan_of(*CASE), runs.fresh(*CASE)
    save_checkpoint_async(tmp_path / "1", plan, state, {"step": 1}).wait()
    save_checkpoint_async(tmp_path / "2", plan, state, {"step": 2})
    assert load_checkpoint(tmp_path, plan, runs.OPTIMIZER).train == {"step": 2}


def test_a_metric_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    plan, state = runs.plan_of(*CASE), runs.fresh(*CASE)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="metrics: loss: expected a number, got None"):
            manager.save(1, plan, state, metrics={"loss": None})  # type: ignore[dict-item]
        assert manager.all_steps() == []


def test_urls_of_object_stores_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan, state = runs.plan_of(*CASE), runs.fresh(*CASE)
    for call in (
        lambda url: CheckpointManager(url),
        lambda url: save_checkpoint(url, plan, state),
        lambda url: load_checkpoint(url, plan, runs.OPTIMIZER),
    ):
        with pytest.raises(
            CheckpointError, match="s3://bucket/run is in an object store: expected a directory"
        ):
            call("s3://bucket/run")
    assert os.listdir() == []
    assert CheckpointManager(f"file://{tmp_path}/run").directory == tmp_path / "run"
