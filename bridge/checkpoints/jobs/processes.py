"""A cluster of processes on this machine: each has an interpreter of its own, whose lock the others do not wait for."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from bridge.checkpoints.jobs.array_jobs import PartReport
from bridge.checkpoints.jobs.cluster import PartTask, Told, WorkerLost


class Running(NamedTuple):
    """A part in work: its process, and where what it tells and the result will come from."""

    process: BaseProcess
    messages: Connection


class Processes:
    """Runs parts in processes of this machine, `slots` at once; see `Cluster`."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"expected 1 process or more, got {slots}")
        self.slots = slots
        # Not forked: this process has threads, whose locks a copy would find closed for ever.
        self._context = multiprocessing.get_context("spawn")
        self._running: list[Running] = []
        self._results: dict[Running, PartReport | Exception | None] = {}

    def submit(self, task: PartTask) -> Running:
        """Begin a part in a new process."""
        messages, sender = self._context.Pipe(duplex=False)
        # Daemons end with the driver: nobody would read what they report.
        process = self._context.Process(target=_run, args=(task, sender), daemon=True)
        process.start()
        # The process has the other end: when it ends without a result, this end says so.
        sender.close()
        self._running.append(Running(process, messages))
        return self._running[-1]

    def wait(self, handles: Sequence[Running], hear: Callable[[Running, Told], None]) -> Running:
        """One of these that has ended, or has sent its result. hear: called with what they tell meanwhile."""
        while True:
            ready = multiprocessing.connection.wait([handle.messages for handle in handles])
            for handle in handles:
                if handle.messages not in ready:
                    continue
                messages = _received(handle.messages)
                if not isinstance(messages, Told):
                    self._results[handle] = messages
                    return handle
                hear(handle, messages)

    def result(self, handle: Running) -> PartReport:
        """The part's report. WorkerLost when its process ended without one; the part's own error otherwise."""
        self._running.remove(handle)
        result = self._results.pop(handle)
        handle.messages.close()
        handle.process.join()
        if result is None:
            raise WorkerLost(_end_of(handle.process))
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the processes that are still running. What their parts have written stays, to be resumed."""
        for handle in self._running:
            handle.process.terminate()
        for handle in self._running:
            handle.process.join()
            handle.messages.close()
        self._running.clear()


def _received(messages: Connection) -> PartReport | Exception | Told | None:
    """The next message; None when the process has ended without another one, or within one."""
    try:
        message = messages.recv()
    except (EOFError, OSError):
        return None
    assert isinstance(message, PartReport | Exception | Told)
    return message


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _run(task: PartTask, sender: Connection) -> None:
    # The driver ends its processes; an interrupt from the keyboard reaches all of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    result: PartReport | Exception
    try:
        result = task.run(sender.send)
    except Exception as error:
        result = error
    sender.send(result)
