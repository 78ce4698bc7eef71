"""The part of the managers that is of no framework: steps in a directory, and what is removed from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.core.formats import CheckpointError, create_checkpoint
from bridge.core.formats.files.journal import JOURNAL_FILE
from bridge.core.formats.saving import pending
from bridge.core.formats.saving.manager import StepManager
from bridge.core.formats.saving.steps import METRICS_FILE
from bridge.core.formats.whole.replaceable import require_replaceable


def write(path: Path) -> None:
    with create_checkpoint(path, "dcp") as writer:
        writer.add_tensor(("w",), (2,), np.dtype(np.float32))
        for box in writer.chunks("w"):
            writer.write("w", box, np.ones(box.sizes, np.float32))


def save(manager: StepManager, step: int, metrics: Mapping[str, Any] | None = None) -> None:
    """As a half's manager saves."""
    path, extras = manager.path_of(step), manager.extras(step, metrics)
    extras.before()
    write(path)
    for name, content in extras.files.items():
        (path / name).write_bytes(content)
    extras.committed()


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_superseded_steps_go_and_the_best_stays(tmp_path: Path) -> None:
    manager = StepManager(tmp_path / "run", max_to_keep=2, keep_period=4, best_metric="loss")
    for step, loss in enumerate([0.5, 0.1, 0.4, 0.3, 0.6, 0.7, 0.8]):
        save(manager, step, {"loss": loss})
        assert manager.latest_step() == step
    assert manager.all_steps() == [0, 1, 4, 5, 6]
    assert manager.best_step() == 1
    assert manager.metrics(5) == {"loss": 0.7}
    save(manager, 7, {"loss": 0.05})
    assert manager.all_steps() == [0, 4, 6, 7]
    assert names(tmp_path / "run") == ["0", "4", "6", "7"]


def test_a_step_whose_metrics_are_damaged_stays_since_it_may_be_the_best(tmp_path: Path) -> None:
    manager = StepManager(tmp_path, max_to_keep=1, best_metric="loss")
    save(manager, 0, {"loss": 0.1})
    (tmp_path / "0" / METRICS_FILE).write_text('{"loss": ')
    for step in (1, 2):
        with pytest.warns(UserWarning, match=r"metrics\.json: .* the step is kept, since it may be the best"):
            save(manager, step, {"loss": 0.4 + step / 10})
    assert manager.all_steps() == [0, 1, 2]
    with pytest.raises(CheckpointError, match=r"0/twinshard_metrics\.json: expected the metrics of a step"):
        manager.best_step()
    assert StepManager(tmp_path).best_step() is None


def test_only_what_a_manager_saved_is_removed(tmp_path: Path) -> None:
    for name in ("backup_0", "1", "01.tmp-0a1b2c3d", "2.tmp-0a1b2c3d", "3.tmp-0a1b2c3d"):
        write(tmp_path / name.replace(".tmp-", "-"))
        (tmp_path / name.replace(".tmp-", "-")).rename(tmp_path / name)
    # Saved by stock PyTorch, which writes no manifest; a conversion that can be resumed; files of others.
    (tmp_path / "1" / "twinshard_manifest.json").unlink()
    (tmp_path / "3.tmp-0a1b2c3d" / JOURNAL_FILE).touch()
    (tmp_path / "notes.tmp-0a1b2c3d").mkdir()
    (tmp_path / "notes.txt").touch()
    manager = StepManager(tmp_path, max_to_keep=1)
    save(manager, 5)
    save(manager, 6)
    assert names(tmp_path) == sorted(
        ["1", "6", "backup_0", "3.tmp-0a1b2c3d", "notes.tmp-0a1b2c3d", "notes.txt"]
    )
    assert manager.all_steps() == [0, 1, 6]


def test_a_step_with_metrics_is_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    save(StepManager(tmp_path), 1, {"loss": 0.5})
    require_replaceable(tmp_path / "1")


def test_unfinished_steps_and_those_removed_by_hand_are_none(tmp_path: Path) -> None:
    manager = StepManager(tmp_path, max_to_keep=2)
    assert manager.all_steps() == []
    assert manager.latest_step() is None
    assert manager.best_step() is None
    for step in (1, 2, 3):
        save(manager, step)
    shutil.rmtree(tmp_path / "3")
    (tmp_path / "9").mkdir()
    assert manager.latest_step() == 2
    save(manager, 4)
    assert manager.all_steps() == [2, 4]
    with pytest.raises(CheckpointError, match=r"expected one complete step 3 in .* complete are 2, 4"):
        manager.metrics(3)


def test_a_directory_without_a_complete_step_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none: expected a complete step, got none: call latest_step"):
        StepManager(tmp_path / "none").require_step()


def test_a_step_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = StepManager(tmp_path, max_to_keep=1)
    save(manager, 1)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("bridge.core.formats.saving.manager._renamed", refuse)
        with pytest.warns(UserWarning, match=r"1: the step is superseded and cannot be removed.*denied"):
            save(manager, 2)
    assert manager.all_steps() == [1, 2]


def test_steps_that_are_no_numbers_and_a_closed_manager_are_refused(tmp_path: Path) -> None:
    manager = StepManager(tmp_path)
    for step in (-1, True, 1.0, "3"):
        with pytest.raises(ValueError, match="step: expected an int of at least 0"):
            manager.path_of(step)  # type: ignore[arg-type]  # the case
    assert manager.path_of(np.int64(12)) == tmp_path / "12"  # type: ignore[arg-type]  # an int to Python
    manager.close()
    with pytest.raises(ValueError, match="got one that was closed"):
        manager.path_of(1)


def test_every_method_tells_of_a_save_that_failed(tmp_path: Path) -> None:
    manager = StepManager(tmp_path)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    for method in (manager.all_steps, manager.latest_step, manager.best_step, manager.wait, manager.close):
        pending.start(tmp_path / "1", fail)
        with pytest.raises(CheckpointError, match=r"asynchronous save of .*1 failed: OSError"):
            method()
        method()
    pending.start(tmp_path / "1", fail)
    # The block's own error is raised, with a note of the other.
    with pytest.raises(KeyError) as raised, manager:
        raise KeyError("own")
    assert "No space left on device" in raised.value.__notes__[0]
