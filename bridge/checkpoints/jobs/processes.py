"""A cluster of processes on this machine: each has its own interpreter, and so its own interpreter lock."""

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
    """A running part: its process, and the connection for its progress and result."""

    process: BaseProcess
    messages: Connection


class Processes:
    """Runs parts in processes on this machine, `slots` at once; see `Cluster`."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"expected 1 process or more, got {slots}")
        self.slots = slots
        # Not forked: this process has threads, whose locks would stay locked forever in a copy.
        self._context = multiprocessing.get_context("spawn")
        self._running: list[Running] = []
        self._results: dict[Running, PartReport | Exception | None] = {}

    def submit(self, task: PartTask) -> Running:
        """Start a part in a new process."""
        messages, sender = self._context.Pipe(duplex=False)
        # Daemons end with the driver: nobody would read their reports.
        process = self._context.Process(target=_run, args=(task, sender), daemon=True)
        process.start()
        # The process has the other end: if it ends without a result, this end notices.
        sender.close()
        self._running.append(Running(process, messages))
        return self._running[-1]

    def wait(self, handles: Sequence[Running], hear: Callable[[Running, Told], None]) -> Running:
        """Wait for one of these that has ended, or sent its result. hear: called with their progress meanwhile."""
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
        """The part's report. WorkerLost if its process ended without one; otherwise the part's own error, if any."""
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
        """End the processes that are still running. Their parts' data stays, to be resumed."""
        for handle in self._running:
            handle.process.terminate()
        for handle in self._running:
            handle.process.join()
            handle.messages.close()
        self._running.clear()


def _received(messages: Connection) -> PartReport | Exception | Told | None:
    """The next message; None if the process has ended without another message, or within one."""
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
    # Ignore keyboard interrupts, which reach all processes: the driver ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    result: PartReport | Exception
    try:
        result = task.run(sender.send)
    except Exception as error:
        result = error
    sender.send(result)
