"""Communication beside computation: streams on CUDA, and their twin for the CPU.

A transfer is a sequence of steps, each on a lane: "gather", "reduce" or "outer" (the outer mesh axis). Lanes run
beside each other and beside the computation:

    compute  | forward of unit 1 | forward of unit 2 |          the computation waits for a transfer when it finishes it
    gather   | weights of unit 2 | weights of unit 3 |          a transfer starts after what the computation did before

* On CUDA a lane is a stream. All steps are enqueued at the start, each after everything that was enqueued on the stream
  from which it is called; ``finish`` makes the current stream wait. Memory that outlives a step is allocated before the
  transfer starts and freed after it is finished, on the computation's stream: so none is reused too early, and none
  needs ``record_stream``.
* On the CPU the first step's collective runs on the backend's own threads; later steps run when the transfer is
  finished.

CUDA has not been run by this repository's tests unless ``tests/gpu`` is: they are skipped without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from torch_impl.comm.collectives import Work

# A lane and what to issue there: called with whether to issue asynchronously, it returns what to wait for, if anything.
Step = tuple[str, Callable[[bool], Work | None]]


class Transfer(Protocol):
    """Steps under way.

    ``only_waits``: to finish neither issues collectives, whose order matters, nor delays what the program computes next
    on the device.
    """

    @property
    def only_waits(self) -> bool: ...

    def finish(self) -> None:
        """Return when (on CUDA: make the current stream wait until) all steps are done. To be called once."""


class Streams(Protocol):
    """What units need of a device."""

    def start(self, steps: Sequence[Step]) -> Transfer: ...

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Mark what runs inside for a profiler."""
        ...


def streams_for(device: torch.device) -> Streams:
    """New lanes for units on ``device``."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()


class _CpuTransfer:
    def __init__(self, steps: Sequence[Step]) -> None:
        (_, first), *later = steps
        self.only_waits = not later
        self._work = first(True)
        # The first step is not held: gloo has copied what it reduces, and holds what it still reads.
        self._later = later

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
        for _, step in self._later:
            work = step(True)
            if work is not None:
                work.wait()


_NO_RANGE = nullcontext()


class CpuStreams:
    """Collectives run on the threads of gloo."""

    def start(self, steps: Sequence[Step]) -> Transfer:
        return _CpuTransfer(steps)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return _NO_RANGE


class _CudaTransfer:
    only_waits = False

    def __init__(self, steps: Sequence[Step], done: torch.cuda.Event) -> None:
        # The steps hold the tensors that are read and written until then.
        self._steps = steps
        self._done: torch.cuda.Event | None = done

    def finish(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    def __del__(self) -> None:
        # Dropped with its model or by an exception: the computation would use the memory again at once.
        self.finish()


class CudaStreams:
    """One stream for each lane."""

    def __init__(self, device: torch.device) -> None:
        # Transfers are what the computation waits for, so their kernels go first.
        self._lanes = {name: torch.cuda.Stream(device, priority=-1) for name in ("gather", "reduce", "outer")}

    def start(self, steps: Sequence[Step]) -> Transfer:
        computation = before = torch.cuda.current_stream()
        done = torch.cuda.Event()
        try:
            for lane, step in steps:
                stream = self._lanes[lane]
                stream.wait_stream(before)
                before = stream
                with torch.cuda.stream(stream):
                    step(False)
        except BaseException:
            # The caller will free memory that is still written to.
            computation.wait_stream(before)
            raise
        done.record(before)
        return _CudaTransfer(steps, done)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)
