"""SIGINT, SIGTERM and SIGHUP: the command cleans up as after an error, says what is left, and ends with 128 + n.

Slurm and Kubernetes send SIGTERM some seconds before SIGKILL, and a closing terminal sends SIGHUP. A conversion with
`--resume` syncs what it has written and notes it in its journal before the process ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(SystemExit):
    """A signal ended the command. It is an exception, because unwinding the stack removes a half-written destination.

    left: the message about the state that the command leaves.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number, self.left = number, ""

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}{f': {self.left}' if self.left else ''}"


def stop_on_signals() -> None:
    """Let the signals raise `Stopped` in the main thread, except ignored signals, such as SIGHUP under nohup."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, _: object) -> None:
    # A closing terminal may send its signal twice, and a second signal must not interrupt the cleaning up.
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


@contextmanager
def leaving(tell: Callable[[], str]) -> Iterator[None]:
    """If the command is stopped inside, let ``tell`` say, after the clean-up, what is left."""
    try:
        yield
    except Stopped as stopped:
        stopped.left = tell()
        raise
