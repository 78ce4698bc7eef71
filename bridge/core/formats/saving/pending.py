"""A save that runs in a thread behind training. Its error is raised once somebody asks, and never lost.

::

    caller    start | step | step | step | wait, or the next start or settle: raises what the work raised
    thread          |--- work --------|
    exit                                   what nobody was told goes to stderr, and the status is not 0

One save a process at a time: two would write to one disk at once, and their processes could meet in another order.
"""

from __future__ import annotations

import atexit
import inspect
import io
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from bridge.core.formats.tensors.base import CheckpointError


class PendingSave:
    """A save that was started, of the checkpoint at ``path``.

    The thread ends with the interpreter: a program that returns from its last line still completes its save.
    """

    def __init__(self, path: Path, work: Callable[[], None] | None) -> None:
        self.path = path
        self._error: BaseException | None = None
        # Whether somebody was told of the error.
        self._told = False
        self._thread = None
        if work is not None:
            # No daemon: the interpreter waits for it at its end, so that the save of the last step
            # is complete.
            self._thread = threading.Thread(target=self._run, args=(work,), name=f"save of {path.name}")
            self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            # The error may be kept for long, and copies of a state are large: its frames let go of them.
            del work
            _clear_frames(error)

    def done(self) -> bool:
        """Whether the save has ended, well or not. Does not block."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete on disk; raise what the save raised, each time."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error

    def untold(self) -> str | None:
        """How the save failed, if it did and nobody was told yet."""
        if self._error is None or self._told:
            return None
        return f"the asynchronous save of {self.path} failed: {type(self._error).__name__}: {self._error}"

    def settle(self) -> None:
        """Wait, and raise ``CheckpointError`` for a failure of which nobody was told yet."""
        if self._thread is not None:
            self._thread.join()
        text = self.untold()
        if text is not None:
            self._told = True
            raise CheckpointError(text) from self._error


_latest: PendingSave | None = None
# The process that tells of errors at its end; a process that was forked has its parent's number.
_telling: int | None = None
_FAILED = 120


def start(path: Path, work: Callable[[], None]) -> PendingSave:
    """Run ``work`` in a thread; call ``settle`` first."""
    global _latest, _telling
    if _telling != os.getpid():
        _telling = os.getpid()
        atexit.register(_report)
        # Forked processes of multiprocessing end without exit functions.
        # Found with a process of multiprocessing whose last save failed: it ended with status 0.
        if multiprocessing.parent_process() is not None:
            Finalize(None, _report_of_child, exitpriority=1000)
    _latest = PendingSave(path, work)
    return _latest


def finished(path: Path) -> PendingSave:
    """What a save that was not asynchronous returns where either is allowed."""
    return PendingSave(path, None)


def settle() -> None:
    """Wait for the save that this process started last.

    Raises ``CheckpointError``, with the path and the reason, where that save failed and neither ``wait`` nor an earlier
    call said so.
    """
    if _latest is not None:
        _latest.settle()


def _clear_frames(error: BaseException) -> None:
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _report() -> None:
    # Threads have ended when exit functions run.
    text = None if _latest is None else _latest.untold()
    if text is not None:
        print(f"twinshard: {text}", file=sys.stderr, flush=True)
        sys.stderr = _FailsAtExit(sys.stderr)


def _report_of_child() -> None:
    """Before a process of multiprocessing ends, whose status is that of this ``SystemExit``."""
    own = sys.exc_info()[1]
    try:
        settle()
    except CheckpointError as error:
        print(f"twinshard: {error}", file=sys.stderr, flush=True)
        # The program's own error, or exit, has a status of its own.
        if own is None or (isinstance(own, SystemExit) and not own.code):
            raise SystemExit(_FAILED) from None


class _FailsAtExit(io.TextIOBase):
    """A stream whose last flush, the interpreter's own, fails: Python's exit status is 120 then.

    An exit function cannot set the status, and to leave by ``os._exit`` would skip other libraries' exit functions.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return int(self._stream.write(text))

    def flush(self) -> None:
        # ``flush`` is also what other exit functions call, but those are Python.
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            raise OSError("an asynchronous save failed")
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
