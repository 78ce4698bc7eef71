"""A save in a background thread during training. Its error is raised at the next call, and never lost.

::

    caller    start | step | step | step | wait, or the next start or settle: raises the work's error
    thread          |--- work --------|
    exit                                   unreported errors go to stderr, and the status is not 0

One save per process at a time: two would write to one disk at once, and processes could meet in a different order.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from bridge.core.formats.tensors.base import CheckpointError


class PendingSave:
    """A save that was started, of the checkpoint at ``path``.

    The interpreter waits for the thread: a program that returns from its last line still completes its save.
    """

    def __init__(self, path: Path, work: Callable[[], None] | None) -> None:
        self.path = path
        self._error: BaseException | None = None
        # Whether the error was reported.
        self._told = False
        self._thread = None
        if work is not None:
            # Not a daemon: the interpreter waits for it at exit, so that the save of the last step completes.
            self._thread = threading.Thread(target=self._run, args=(work,), name=f"save of {path.name}")
            self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            # The error may be kept for long, and copies of a state are large: clear them from the error's frames.
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
        """How the save failed, if it did and this was not reported yet."""
        if self._error is None or self._told:
            return None
        return f"the asynchronous save of {self.path} failed: {type(self._error).__name__}: {self._error}"

    def settle(self) -> None:
        """Wait, and raise ``CheckpointError`` for a failure that was not reported yet."""
        if self._thread is not None:
            self._thread.join()
        text = self.untold()
        if text is not None:
            self._told = True
            raise CheckpointError(text) from self._error


_latest: PendingSave | None = None
# The process that reports errors at exit; in a forked process this is the parent's number.
_telling: int | None = None
_FAILED = 120


def start(path: Path, work: Callable[[], None]) -> PendingSave:
    """Run ``work`` in a thread; call ``settle`` first."""
    global _latest, _telling
    if _telling != os.getpid():
        _telling = os.getpid()
        atexit.register(_report)
        # Forked processes of multiprocessing exit without exit functions. Without this, a multiprocessing process whose
        # last save failed exited with status 0.
        if multiprocessing.parent_process() is not None:
            Finalize(None, _report_of_child, exitpriority=1000)
    _latest = PendingSave(path, work)
    return _latest


def finished(path: Path) -> PendingSave:
    """The result of a synchronous save where both kinds are allowed."""
    return PendingSave(path, None)


def settle() -> None:
    """Wait for the save that this process started last.

    Raises ``CheckpointError``, with the path and the reason, if that save failed and no earlier call said so.
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
    """Runs before a multiprocessing process ends, whose status comes from this ``SystemExit``."""
    own = sys.exc_info()[1]
    try:
        settle()
    except CheckpointError as error:
        print(f"twinshard: {error}", file=sys.stderr, flush=True)
        # The program's own error, or exit, already has a status.
        if own is None or (isinstance(own, SystemExit) and not own.code):
            raise SystemExit(_FAILED) from None


class _FailsAtExit(io.TextIOBase):
    """A stream whose last flush, by the interpreter, fails: then Python's exit status is 120.

    An exit function cannot set the status, and ``os._exit`` would skip other libraries' exit functions.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return int(self._stream.write(text))

    def flush(self) -> None:
        # Other exit functions call ``flush``, too, but they are Python code.
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            raise OSError("an asynchronous save failed")
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class SaveExtras:
    """``files``: contents of further files of the checkpoint, by name. With several processes, the first one's count.

    ``before``: called before the directory is made, when no save is pending. ``committed``: called when the checkpoint
    is complete and synced, by the thread that wrote it; it should not raise.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    before: Callable[[], None] = _nothing
    committed: Callable[[], None] = _nothing
