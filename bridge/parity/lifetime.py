"""Processes that end with the process that started them, even when that one is killed.

A parent that is killed cannot stop its children, and a leg in a session of its own is not reached by the terminal's
signals either. Linux can tell a child: the starting process names itself in ``TWINSHARD_PARENT``, and the child asks
for a signal. Elsewhere nothing happens.

Run as a module, this asks on behalf of a Python program that knows nothing of it, and becomes that program::

    python -m bridge.parity.lifetime -m torch.distributed.run ...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PARENT = "TWINSHARD_PARENT"
_PR_SET_PDEATHSIG = 1


def naming_parent() -> dict[str, str]:
    """What to add to the environment of children that shall end with this process."""
    return {_PARENT: str(os.getpid())}


def end_with_parent(number: signal.Signals) -> None:
    """Get signal ``number`` when the process that ``TWINSHARD_PARENT`` names ends; does nothing where it names none.

    Raises ``RuntimeError`` when that process has ended already, as nothing would be sent then.
    """
    parent = os.environ.get(_PARENT)
    if parent is None or sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        raise RuntimeError(f"expected process {parent}, which started this one, to run, but it has ended")


if __name__ == "__main__":
    # A signal that the program can pass on to its own children.
    end_with_parent(signal.SIGTERM)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **naming_parent()})
