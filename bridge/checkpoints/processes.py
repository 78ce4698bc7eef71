"""A cluster of processes on this machine: each has an interpreter of its own, whose lock the others do not wait for."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from bridge.checkpoints.cluster import PartTask, WorkerLost
from bridge.checkpoints.parts import PartReport


class Running(NamedTuple):
    """A part in work: its process, and where the result will come from."""

    process: BaseProcess
    results: Connection


class Processes:
    """Runs parts in processes of this machine, `slots` at once; see `Cluster`."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"expected 1 process or more, got {slots}")
        self.slots = slots
        # Not forked: this process has threads, whose locks a copy would find closed for ever.
        self._context = multiprocessing.get_context("spawn")
        self._running: list[Running] = []

    def submit(self, task: PartTask) -> Running:
        """Begin a part in a new process."""
        results, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run, args=(task, sender), daemon=True)
        process.start()
        # The process has the other end: when it ends without a result, this end says so.
        sender.close()
        self._running.append(Running(process, results))
        return self._running[-1]

    def wait(self, handles: Sequence[Running]) -> Running:
        """One of these that has ended, or has sent its result."""
        ready = multiprocessing.connection.wait([handle.results for handle in handles])
        return next(handle for handle in handles if handle.results in ready)

    def result(self, handle: Running) -> PartReport:
        """The part's report. WorkerLost when its process ended without one; the part's own error otherwise."""
        self._running.remove(handle)
        try:
            found = handle.results.recv()
        except EOFError:
            handle.process.join()
            raise WorkerLost(_end_of(handle.process)) from None
        finally:
            handle.results.close()
        handle.process.join()
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, PartReport)
        return found

    def close(self) -> None:
        """End the processes that are still running. What their parts have written stays, to be resumed."""
        for handle in self._running:
            handle.process.terminate()
        for handle in self._running:
            handle.process.join()
            handle.results.close()
        self._running.clear()


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _run(task: PartTask, sender: Connection) -> None:
    # The driver ends its processes; an interrupt from the keyboard reaches all of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    found: PartReport | Exception
    try:
        found = task.run()
    except Exception as error:
        found = error
    sender.send(found)
