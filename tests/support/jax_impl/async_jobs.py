"""Jobs of processes in the tests of asynchronous saves and of the manager, and ways to hold writes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import multihost_utils

from bridge.core.formats.orbax.writer import OrbaxPart
from jax_impl import CheckpointManager, save_checkpoint, save_checkpoint_async
from jax_impl.checkpoint.contents import Contents
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl.process_job import small_chunks


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Block all writes until the yielded function is called."""
    gate, write = threading.Event(), Contents.write

    def waiting(self: Contents, *args: Any, **options: Any) -> None:
        assert gate.wait(60)
        write(self, *args, **options)

    with mock.patch.object(Contents, "write", waiting):
        yield gate.set


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_both_ways(path: str) -> dict[str, Any]:
    """Save at once, then asynchronously, of which nothing is written before two more steps; donated, as by default."""
    case = (len(jax.devices()),)
    plan, state = runs.plan_of(*case), runs.fresh(*case)
    state, _ = runs.train(state, *case, first=0, count=1)
    with small_chunks():
        save_checkpoint(f"{path}/now/1", plan, state, {"step": 1}, timeout=60)
        with held_back() as release:
            pending = save_checkpoint_async(f"{path}/later/1", plan, state, {"step": 1}, timeout=60)
            state, _ = runs.train(state, *case, first=1, count=2)
            done = pending.done()
            # Other saves or loads in the foreground run while the background save runs.
            release()
            state, losses = runs.train(state, *case, first=3, count=1)
            pending.wait()
    return {"done": done, "losses": losses}


def fail(path: str, process: int) -> dict[str, Any]:
    """Errors of ``wait``, and of the save after one of which only process 0 was told."""
    count = len(jax.devices())
    plan, state = runs.plan_of(count), runs.fresh(count)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", f"{path}/d/1")

    fault = mock.patch.object(OrbaxPart, "finish", full)
    answer: dict[str, Any] = {}
    for name in ("1", "2"):
        if jax.process_index() == process:
            fault.start()
        pending = save_checkpoint_async(f"{path}/{name}", plan, state, timeout=60)
        if name == "1":
            answer["wait"] = error_of(pending.wait)
        elif jax.process_index() == 0:
            error_of(pending.wait)
        pending._thread.join()  # type: ignore[union-attr]  # a save in the background has one
        if jax.process_index() == process:
            fault.stop()
    answer["next"] = error_of(save_checkpoint, f"{path}/3", plan, state, timeout=60)
    # The first process may still remove files of a save that failed on the other process.
    multihost_utils.sync_global_devices("listed")
    answer["left"] = sorted(os.listdir(path)) if Path(path).is_dir() else []
    with CheckpointManager(path) as manager:
        manager.save(4, plan, state, {"step": 4}, timeout=60)
        answer["steps"] = manager.all_steps()
    return answer


def managed_run(path: str, first: int, last: int, asynchronous: bool = True) -> dict[str, Any]:
    """Continue from the latest step, if there is one, and save every step."""
    case = (len(jax.devices()),)
    plan, state = runs.plan_of(*case), runs.fresh(*case)
    losses = []
    with CheckpointManager(
        path, max_to_keep=2, best_metric="score", best_mode="max", asynchronous=asynchronous
    ) as manager:
        assert manager.latest_step() == (first or None)
        if first:
            loaded = manager.load(plan, runs.OPTIMIZER, timeout=60)
            assert loaded.train["step"] == first
            state = loaded.state
        for index in range(first, last):
            state, loss = runs.train(state, *case, first=index, count=1)
            losses += loss
            manager.save(index + 1, plan, state, {"step": index + 1}, metrics={"score": -index}, timeout=60)
        steps, best = manager.all_steps(), manager.best_step()
    return {"losses": losses, "steps": steps, "best": best}
