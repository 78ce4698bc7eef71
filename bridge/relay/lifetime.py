"""Processes that end with the process that started them, even if that process is killed.

A killed parent cannot stop its children, and the terminal's signals do not reach a leg in a session of its own. Linux
can send a signal to the child: the starting process puts its id into ``TWINSHARD_PARENT``, and the child requests the
signal. On other systems nothing happens.

Run as a module, this file requests the signal for another Python program, and then becomes that program::

    python -m bridge.relay.lifetime -m torch.distributed.run ...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PARENT = "TWINSHARD_PARENT"
_PR_SET_PDEATHSIG = 1


def parent_variables() -> dict[str, str]:
    """The variables to add to the environment of children that must end with this process."""
    return {_PARENT: str(os.getpid())}


def end_with_parent(number: signal.Signals) -> None:
    """Request signal ``number`` for the end of the process in ``TWINSHARD_PARENT``; without the variable, do nothing.

    Raises ``RuntimeError`` when that process has ended already, since no signal would be sent.
    """
    parent = os.environ.get(_PARENT)
    if parent is None or sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # After the request: a parent that ended in between is detected here, and a parent that ends later sends the signal.
    if os.getppid() != int(parent):
        raise RuntimeError(f"expected process {parent}, which started this process, to run, but it has ended")


if __name__ == "__main__":
    # A signal that the program can pass on to its own children.
    end_with_parent(signal.SIGTERM)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **parent_variables()})
