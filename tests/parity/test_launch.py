"""How a leg's processes are followed and stopped, with short programs in the place of a leg."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext

from bridge.relay import launch
from bridge.relay.config import Leg, RelayConfig
from bridge.relay.job import Job


def run(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``program`` as a leg, with the leg's folder as its first argument."""
    config = RelayConfig.load("quick")
    leg = Leg("torch", 1, "optim", steps=1)
    job = Job(config.model, config.data, config.optimizer, leg, folder / "leg", None, None)
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", program, str(job.folder)])
    launch.run_leg(job, lambda step, loss: None)


def test_of_several_ranks_errors_the_oldest_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import os, sys
for rank, second in ((0, 2000), (1, 1000), (2, 3000)):
    path = f"{sys.argv[1]}/error-rank{rank}"
    open(path, "w").write(f"ValueError: from rank {rank}")
    os.utime(path, (second, second))
sys.exit(1)
"""
    with pytest.raises(launch.LegError, match=r"^rank1: ValueError: from rank 1"):
        run(tmp_path, program, monkeypatch)


def test_a_leg_in_which_no_step_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STALL_SECONDS", 1.0)
    with pytest.raises(launch.LegError, match="no step ended within 1 s; the output is in"):
        run(tmp_path, "import time; time.sleep(30)", monkeypatch)


def test_steps_that_end_in_time_do_not_count_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import sys, time
with open(f"{sys.argv[1]}/metrics.jsonl", "w", buffering=1) as metrics:
    for step in range(10):
        time.sleep(0.5)
        metrics.write('{"step": %d, "loss": 1.0}\\n' % step)
"""
    monkeypatch.setattr(launch, "STALL_SECONDS", 4.0)
    run(tmp_path, program, monkeypatch)


def test_torchrun_has_the_time_to_kill_its_workers_before_it_is_killed_itself() -> None:
    assert inspect.signature(PContext.close).parameters["timeout"].default + 10 <= launch.STOP_SECONDS


@pytest.mark.slow
def test_a_rehearsal_that_dies_ends_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RelayConfig.load("quick")
    job = Job(config.model, config.data, config.optimizer, config.legs[0], tmp_path / "leg", None, None)
    # Taken for a job file, which is not there.
    monkeypatch.setattr(launch, "REHEARSE", "no-job.json")
    with pytest.raises(launch.LegError, match=r"^torch: exit status 1; .*(?s:.*)no-job\.json"):
        launch.rehearse([job])


def test_a_rehearsal_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RelayConfig.load("quick")
    job = Job(config.model, config.data, config.optimizer, config.legs[1], tmp_path / "leg", None, None)
    monkeypatch.setattr(launch, "REHEARSE_SECONDS", 0.2)
    with pytest.raises(launch.LegError, match=r"^jax: expected the rehearsal to end within 0 s, it did not"):
        launch.rehearse([job])
