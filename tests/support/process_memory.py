"""Memory of the current process from Linux's /proc, for programs that tests start."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


def status_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS, RssAnon, or VmHWM (the peak of VmRSS).

    The maximum of getrusage is of no use: it starts at the maximum of the parent process.
    """
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(field)).split()[1]) * 1024


class AnonymousPeak:
    """The largest RssAnon (no file pages) during the block, sampled every two milliseconds.

    ``above`` is the peak so far minus the value at the start, in bytes.
    """

    def __init__(self) -> None:
        self._start = self._peak = status_bytes("RssAnon")
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    @property
    def above(self) -> int:
        return self._peak - self._start

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._peak = max(self._peak, status_bytes("RssAnon"))

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._watcher.join()
