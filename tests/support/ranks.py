"""A group of rank processes that lives longer than a single test.

The import of torch takes seconds, so one process imports torch and forks the ranks, which then run one function after
another. So four ranks train their first step after 6.5 CPU seconds instead of 13.1. For each call, every participating
process joins a new gloo process group of the requested size, so four processes serve worlds of 1 to 4 ranks.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from tests.support.costs import trees_seconds

MAX_WORLD = 4
RESTING_SECONDS = 20.0
"""If all ranks wait for this long, they hang. Ranks of tests sleep for fractions of a second only."""
PRELOADED = ["torch", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"]


class RankError(AssertionError):
    """A function raised on at least one rank. The text has the traceback of each such rank."""


def _serve(rank: int, pipe: Connection, port: int) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        pipe.send(store.port)
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        number, world, module, name, args, timeout = job
        try:
            # A rank that waits for a dead rank must fail well before the parent gives up on the group.
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(number), store),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout / 2),
            )
            # Without a barrier, a function without communication would end its group while other ranks still connect.
            dist.barrier()
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            reply: tuple[str, Any] = ("ok", function(*args))  # type: ignore[operator]  # a module-level function
        except BaseException:  # DCP's CheckpointException derives from BaseException
            reply = ("error", traceback.format_exc())
        try:
            message = pickle.dumps(reply)
        except Exception:
            message = pickle.dumps(("error", traceback.format_exc()))
        pipe.send_bytes(message)
        # gloo takes 10 ms or more to close each connection. The test continues meanwhile.
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()


@functools.cache
def _dtensor_caches() -> list[Any]:
    """Functions of DTensor that cache results, and with them meshes, for the life of the process."""
    wrapper = type(_dtensor_caches)
    wrappers = [entry for entry in gc.get_objects() if type(entry) is wrapper]
    return [entry for entry in wrappers if (entry.__module__ or "").startswith("torch.distributed.tensor")]


def _forget_meshes() -> None:
    """Clear DTensor's caches, which would return meshes with ended process groups for equal meshes.

    A mesh also keeps its process groups alive. Each gloo group has three threads that wake a hundred times a second.
    After 2,900 fast tests a rank had 300 such threads and used a tenth of a core while it waited.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    for cache in _dtensor_caches():
        cache.cache_clear()
    # Some versions of torch lack these two functions.
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()


@contextmanager
def children() -> Iterator[None]:
    """Allow a rank process, which is a daemon, to start child processes."""
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # there is no public way
    before = config["daemon"]
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = before


class _Work:
    """Tells whether rank processes and their children still work. Asked every second."""

    def __init__(self, pids: list[int | None]) -> None:
        self._pids = [pid for pid in pids if pid is not None]
        self._since, self._seconds = time.monotonic(), 0.0

    def rests(self) -> bool:
        seconds, runs = trees_seconds(self._pids)
        # Ranks that use less than 2 % of a core rest, since gloo's threads poll a hundred times a second. A process
        # works if it is ready to run or waits for the disk, however little CPU time a busy machine gives it.
        if runs or seconds - self._seconds > 0.02 * (time.monotonic() - self._since):
            self._since, self._seconds = time.monotonic(), seconds
        return self.resting_seconds() > RESTING_SECONDS

    def resting_seconds(self) -> float:
        return time.monotonic() - self._since


class RankGroup:
    """Up to ``MAX_WORLD`` processes with one thread each, started at the first use."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._jobs = 0

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        """Run a module-level ``function(*args)`` on ``world`` ranks. Returns the results of all ranks, rank 0 first.

        ``args`` and results travel by pickle. Raises ``RankError`` with the tracebacks of all failing ranks. Also
        raises it if a rank does not answer in ``timeout`` seconds, or if all ranks wait for each other; then the next
        call starts a new group.
        """
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"expected a world size of 1 to {MAX_WORLD}, got {world}")
        self._start()
        self._jobs += 1
        job = pickle.dumps((self._jobs, world, function.__module__, function.__qualname__, args, timeout))
        for _, pipe in self._workers[:world]:
            pipe.send_bytes(job)
        deadline, work = time.monotonic() + timeout, _Work([process.pid for process, _ in self._workers])
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self._workers[:world]):
            while not (answered := pipe.poll(1)) and time.monotonic() < deadline and not work.rests():
                continue
            if not answered:
                rested = work.resting_seconds()
                waits = (
                    f"and no rank has computed for {rested:.0f} s" if rested > 1 else f"within {timeout} s"
                )
                errors.append(f"rank {rank} of {world}: no answer {waits}")
                continue
            try:
                status, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                status, value = "error", "the process died"
            if status == "error":
                errors.append(f"rank {rank} of {world}: {value}")
            else:
                results.append(value)
        if any("no answer" in error or "process died" in error for error in errors):
            self.close()
        if errors:
            raise RankError("\n".join(errors))
        return results

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        if self._workers:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = 0
        for rank in range(MAX_WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            if rank == 0:
                port = ours.recv()


def on_ranks(world: int | str, timeout: float = 240) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test from a module-level function, which runs with the test's arguments on each of ``world`` ranks.

    world: the number of ranks, or the name of the test's parameter that holds the number.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: RankGroup, **arguments: Any) -> None:
            count = arguments[world] if isinstance(world, str) else world
            ranks.run(count, body, *(arguments[name] for name in taken), timeout=timeout)

        taken = inspect.signature(body).parameters
        asked = ["ranks", *([world] if isinstance(world, str) else [])]
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        vars(test).update(__signature__=inspect.Signature([*taken.values(), *more]), body=body)
        # The ranks find the function by this path.
        body.__qualname__ += ".body"
        return test

    return decorate
