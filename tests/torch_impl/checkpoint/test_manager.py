"""A run that saves by the manager, ends, and goes on; on several ranks, each with its own slice of the batch."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError
from bridge.core.formats.saving import manager as manager_module
from tests.support.torch_impl import async_jobs as jobs
from torch_impl import CheckpointManager, load_checkpoint, save_checkpoint, save_checkpoint_async
from torch_impl.checkpoint.saving import PlannedSave


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_the_latest_step_as_if_nothing_had_happened(ranks, tmp_path, asynchronous):
    whole = ranks.run(2, jobs.managed_run, "optim_grads_params", str(tmp_path / "a"), 0, 5)[0]
    path = str(tmp_path / "b")
    first = ranks.run(2, jobs.managed_run, "optim_grads_params", path, 0, 3, asynchronous)[0]
    rest = ranks.run(2, jobs.managed_run, "optim_grads_params", path, 3, 5, asynchronous)[0]
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert all(np.array_equal(rest["state"][name], whole["state"][name]) for name in whole["state"])
    # The score falls with every step.
    assert (rest["steps"], rest["best"]) == ([1, 4, 5], 1)
    assert sorted(os.listdir(path)) == ["1", "4", "5"]
    for step in (1, 4, 5):
        assert verify(Path(path) / str(step)).good


def test_steps_removed_by_hand_and_unfinished_ones_are_passed_over(ranks, tmp_path):
    path = tmp_path / "a"
    ranks.run(2, jobs.managed_run, "optim", str(path), 0, 4)
    shutil.rmtree(path / "4")
    (path / "9.tmp-0a1b2c3d").mkdir()
    (path / "7").mkdir()
    (path / "notes.txt").touch()
    rest = ranks.run(3, jobs.managed_run, "optim_grads", str(path), 3, 5)
    assert {tuple(outcome["steps"]) for outcome in rest} == {(1, 4, 5)}
    assert sorted(os.listdir(path)) == ["1", "4", "5", "7", "notes.txt"]


def test_a_place_that_cannot_be_written_is_an_error_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").touch()
    for load, save in ranks.run(2, jobs.manager_in_a_place_that_cannot_be_written, str(tmp_path / "file")):
        assert "expected a complete step, got none" in load
        assert "file is a file: expected a directory" in save


def test_a_step_goes_only_when_its_successor_is_complete(tmp_path, monkeypatch):
    renamed, seen = manager_module._renamed, []

    def watched(step: Path) -> Path:
        seen.append((step.name, verify(tmp_path / str(int(step.name) + 1)).good))
        return renamed(step)

    monkeypatch.setattr(manager_module, "_renamed", watched)
    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, nn.Linear(2, 2))
    assert seen == [("1", True), ("2", True)]
    assert os.listdir(tmp_path) == ["3"]


def test_steps_that_no_manager_saved_stay(tmp_path):
    save_checkpoint(tmp_path / "1", nn.Linear(2, 2))
    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        for step in (2, 3):
            manager.save(step, nn.Linear(2, 2))
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]


def test_ranks_fail_together_over_metrics_and_only_rank_0s_count(ranks, tmp_path):
    for error, steps in ranks.run(2, jobs.metrics_of_one_rank, str(tmp_path)):
        assert error == "rank 0 of 2: ValueError: metrics: loss: expected a number, got None"
        assert steps == [2]


def test_a_load_takes_what_is_still_being_saved(tmp_path, monkeypatch):
    write = PlannedSave.write

    def late(self, *args):
        time.sleep(0.3)
        write(self, *args)

    monkeypatch.setattr(PlannedSave, "write", late)
    save_checkpoint_async(tmp_path / "1", nn.Linear(2, 2), None, {"step": 1}).wait()
    save_checkpoint_async(tmp_path / "2", nn.Linear(2, 2), None, {"step": 2})
    assert load_checkpoint(tmp_path, nn.Linear(2, 2)) == {"step": 2}


@pytest.mark.parametrize("step", ["1", True, 1.0])
def test_a_step_that_is_no_int_is_refused(tmp_path, step):
    save_checkpoint(tmp_path / "1", nn.Linear(2, 2))
    with pytest.raises(ValueError, match="step: expected an int or None, got"):
        load_checkpoint(tmp_path, nn.Linear(2, 2), step=step)


def test_urls_of_object_stores_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    for call in (
        lambda url: CheckpointManager(url),
        lambda url: save_checkpoint(url, model),
        lambda url: load_checkpoint(url, model),
    ):
        with pytest.raises(
            CheckpointError, match="s3://bucket/run is in an object store: expected a directory"
        ):
            call("s3://bucket/run")
    assert os.listdir() == []
    assert CheckpointManager(f"file://{tmp_path}/run").directory == tmp_path / "run"
