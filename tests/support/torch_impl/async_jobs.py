"""Rank functions of the tests of asynchronous saves and of the manager."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from bridge.core.formats.files.atomic import AtomicDirectory
from bridge.core.formats.saving.pending import SaveExtras
from tests.support.torch_impl.checkpoint_jobs import RUNS, State, full_state, global_loss, step
from torch_impl import CheckpointManager, load_checkpoint, save_checkpoint, save_checkpoint_async
from torch_impl.checkpoint.contents import named_tensors, state_tree
from torch_impl.checkpoint.saving import ChunkPlanner, PlannedSave


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Block the writes of copied chunks until the yielded function is called."""
    gate, resolve = threading.Event(), ChunkPlanner.resolve_data

    def waiting(self: ChunkPlanner, item: Any) -> Any:
        assert gate.wait(60)
        return resolve(self, item)

    with mock.patch.object(ChunkPlanner, "resolve_data", waiting):
        yield gate.set


def save_both_ways(run_name: str, strategy: str, path: str) -> list[float]:
    """Save at once, then asynchronously the same state, of which nothing is written before two more steps."""
    model, optimizer = RUNS[run_name](strategy, seed=1)
    step(model, optimizer, 0)
    train = {"step": 1, "sha": np.arange(4, dtype=np.uint8)}
    save_checkpoint(f"{path}/now/1", model, optimizer, train)
    with held_back() as release:
        pending = save_checkpoint_async(f"{path}/later/1", model, optimizer, train)
        train["sha"][:] = 9
        optimizer.param_groups[0]["betas"] = (0.5, 0.5)
        losses = [step(model, optimizer, 1), step(model, optimizer, 2)]
        assert not pending.done()
        assert not os.path.exists(f"{path}/later/1")
        release()
        # The collectives of this step and of the save run at the same time.
        losses.append(step(model, optimizer, 3))
        pending.wait()
    return losses


def resume(run_name: str, strategy: str, path: str, last: int) -> tuple[float, float, State]:
    """Load the latest step of a directory; a forward; a step; the state."""
    model, optimizer = RUNS[run_name](strategy, seed=5)
    assert load_checkpoint(path, model, optimizer)["step"] == last
    loss = global_loss(model, 7)
    return loss, step(model, optimizer, last), full_state(model, optimizer)


def copied(run_name: str, strategy: str, path: str) -> tuple[int, int, int]:
    """Bytes that were copied, bytes of the storages that hold them, and bytes of the whole state."""
    model, optimizer = RUNS[run_name](strategy, seed=1)
    step(model, optimizer, 0)
    planned = PlannedSave(path, lambda: state_tree(model, optimizer, None), SaveExtras(), copy=True)
    copies = [t for t in planned._planner._copies.values() if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in copies}
    whole = sum(t.nbytes for _, t in named_tensors(state_tree(model, optimizer, None)))
    planned.write()
    return planned.copied_bytes, sum(storages.values()), whole


@contextmanager
def full_disk(where: str, rank: int) -> Iterator[None]:
    """One rank's writes, or the commit, fail as on a full disk."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    target = {"write": (ChunkPlanner, "resolve_data"), "commit": (AtomicDirectory, "commit")}[where]
    if dist.get_rank() != rank:
        yield
        return
    with mock.patch.object(*target, side_effect=full):
        yield


def _error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing(where: str, rank: int, path: str) -> dict[str, Any]:
    """Errors of ``wait`` and of the next save after an unawaited failure; the files on disk; training continues."""
    model, optimizer = RUNS["decoder"]("optim_grads_params", seed=1)
    outcome: dict[str, Any] = {}
    with full_disk(where, rank):
        pending = save_checkpoint_async(f"{path}/1", model, optimizer)
        outcome["losses"] = [step(model, optimizer, 0), step(model, optimizer, 1)]
        outcome["wait"] = _error_of(pending.wait)
    with full_disk(where, rank):
        untold = save_checkpoint_async(f"{path}/2", model, optimizer)
        # Only some ranks know the error, but the next save fails on all ranks.
        if dist.get_rank() == 0:
            _error_of(untold.wait)
        untold._thread.join()  # type: ignore[union-attr]  # a save in the background has one
    outcome["next"] = _error_of(save_checkpoint_async, f"{path}/3", model, optimizer)
    dist.barrier()
    outcome["left"] = sorted(os.listdir(path)) if os.path.isdir(path) else []
    dist.barrier()
    save_checkpoint_async(f"{path}/4", model, optimizer).wait()
    outcome["after"] = sorted(os.listdir(path))
    return outcome


def second_save_waits(path: str) -> list[bool]:
    """Whether the first save had ended when the second one returned."""
    model, optimizer = RUNS["decoder"]("optim", seed=1)
    with held_back() as release:
        first = save_checkpoint_async(f"{path}/1", model, optimizer)
        threading.Timer(0.3, release).start()
        second = save_checkpoint_async(f"{path}/2", model, optimizer)
        ended = first.done() and Path(path, "1", ".metadata").exists()
        second.wait()
    return [ended, second.done()]


def destroyed_too_early(path: str) -> str:
    model, optimizer = RUNS["decoder"]("optim", seed=1)
    with held_back() as release:
        pending = save_checkpoint_async(f"{path}/1", model, optimizer)
        dist.barrier()
        dist.destroy_process_group()
        release()
        return _error_of(pending.wait)


def managed_run(strategy: str, path: str, first: int, last: int, asynchronous: bool = True) -> dict[str, Any]:
    """Continue from the latest step, if there is one, and save every step."""
    model, optimizer = RUNS["decoder"](strategy, seed=1 + first)
    losses = []
    with CheckpointManager(
        path, max_to_keep=2, best_metric="score", best_mode="max", asynchronous=asynchronous
    ) as manager:
        assert manager.latest_step() == (first or None)
        if first:
            assert manager.load(model, optimizer)["step"] == first
        for index in range(first, last):
            losses.append(step(model, optimizer, index))
            manager.save(index + 1, model, optimizer, {"step": index + 1}, metrics={"score": -index})
        steps, best = manager.all_steps(), manager.best_step()
    return {"losses": losses, "steps": steps, "best": best, "state": full_state(model, optimizer)}


def manager_in_a_place_that_cannot_be_written(path: str) -> tuple[str, str]:
    model, optimizer = RUNS["decoder"]("optim", seed=1)
    manager = CheckpointManager(path)
    load = _error_of(manager.load, model, optimizer)
    return load, _error_of(manager.save, 1, model, optimizer)


def metrics_of_one_rank(path: str) -> tuple[str, list[int]]:
    """The error if rank 0 has no number, and the steps after a save in which another rank has none."""
    model, optimizer = RUNS["decoder"]("optim", seed=1)
    mine, others = (
        ({"loss": None}, {"loss": 1.0}) if dist.get_rank() == 0 else ({"loss": 1.0}, {"loss": None})
    )
    error = ""
    with CheckpointManager(path) as manager:
        try:
            manager.save(1, model, optimizer, metrics=mine)
        except ValueError as raised:
            error = str(raised)
        manager.save(2, model, optimizer, metrics=others)
        return error, manager.all_steps()
