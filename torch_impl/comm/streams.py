"""Communication during computation: streams on CUDA, and their twin for the CPU.

A transfer is a sequence of steps, each on a lane: "gather", "reduce", "outer" (the outer mesh
axis), or "fetch" and "send", copies from and to the host's memory. Lanes run beside each other and
beside the computation:

    compute  | forward of unit 1 | forward of unit 2 |          the computation waits for a transfer when it finishes it
    gather   | weights of unit 2 | weights of unit 3 |          a transfer starts after what the computation did before

* On CUDA a lane is a stream. All steps are enqueued at the start, each after everything that was
  enqueued on the stream from which it is called; ``finish`` makes the current stream wait. It makes
  the program wait for copies from and to the host's memory, which the program reads and writes
  without asking a stream. Memory that outlives a step is allocated before the transfer starts and
  freed after it is finished, on the computation's stream: so none is reused too early, and none
  needs ``record_stream``.
* On the CPU the first collective runs on the backend's own threads, after the steps before it;
  later steps run when the transfer is finished.

``tests/gpu`` runs the CUDA lanes, with one rank: no collective of NCCL has run on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from torch_impl.comm.collectives import Work

_LANES = ("gather", "reduce", "outer", "fetch", "send")
_HOST_LANES = frozenset({"fetch", "send"})

# A lane and what to issue there: called with whether to issue asynchronously, it returns what to
# wait for, if anything.
Step = tuple[str, Callable[[bool], Work | None]]


class Transfer(Protocol):
    """Steps under way.

    ``only_waits``: to finish neither issues collectives, whose order matters, nor delays what the
    program computes next on the device.
    """

    @property
    def only_waits(self) -> bool: ...

    def finish(self) -> None:
        """Return when all steps are done; on CUDA the current stream waits. To be called once.

        Copies from and to the host's memory are done when it returns, on CUDA too.
        """


class Streams(Protocol):
    """What units need of a device. ``copies``: collectives work on copies."""

    @property
    def copies(self) -> bool: ...

    def start(self, steps: Sequence[Step]) -> Transfer: ...

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Mark what runs inside for a profiler."""
        ...


def streams_for(device: torch.device) -> Streams:
    """New lanes for units on ``device``."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()


class _CpuTransfer:
    def __init__(self, steps: Sequence[Step]) -> None:
        later = list(steps)
        self._work: Work | None = None
        while later and self._work is None:
            _, step = later.pop(0)
            # Steps before the first collective are copies and casts, done when they return.
            self._work = step(True)
        self.only_waits = all(lane in _HOST_LANES for lane, _ in later)
        # What has begun is not held: gloo has copied what it reduces, and holds what it reads.
        self._later = later

    def finish(self) -> None:
        # gloo's own threads run the collective, and use the buffers until it is done.
        if self._work is not None:
            self._work.wait()
        for _, step in self._later:
            # One after the other: each step reads what the one before has written.
            work = step(True)
            if work is not None:
                work.wait()


_NO_RANGE = nullcontext()


class CpuStreams:
    """Collectives run on the threads of gloo."""

    copies = True

    def start(self, steps: Sequence[Step]) -> Transfer:
        return _CpuTransfer(steps)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return _NO_RANGE


class _CudaTransfer:
    only_waits = False

    def __init__(
        self, steps: Sequence[Step], done: torch.cuda.Event, copied: torch.cuda.Event | None
    ) -> None:
        # The steps hold the tensors that are read and written until then.
        self._steps = steps
        self._done: torch.cuda.Event | None = done
        self._copied = copied

    def finish(self) -> None:
        # Once: ``__del__`` also calls this, and has nothing to wait for after a call.
        done, self._done = self._done, None
        if done is not None:
            # The stream waits, not the program, which goes on to enqueue the computation.
            torch.cuda.current_stream().wait_event(done)
            if self._copied is not None:
                # The CPU reads what lies in host memory, as an optimizer does, and asks no stream.
                self._copied.synchronize()

    def __del__(self) -> None:
        # Dropped with its model or by an error: its memory would be used again at once.
        self.finish()


class CudaStreams:
    """One stream for each lane."""

    copies = False

    def __init__(self, device: torch.device) -> None:
        # Transfers are what the computation waits for, so their kernels go first.
        self._lanes = {name: torch.cuda.Stream(device, priority=-1) for name in _LANES}

    def start(self, steps: Sequence[Step]) -> Transfer:
        computation = before = torch.cuda.current_stream()
        done, copied = torch.cuda.Event(), None
        try:
            for lane, step in steps:
                stream = self._lanes[lane]
                # The first step reads what the computation has written: main weights of the last
                # update, or a gradient. Without this wait a gather sends older weights (a
                # convergence bug of Megatron-FSDP, pull request 4435). Later steps read what the
                # lane before has filled.
                stream.wait_stream(before)
                before = stream
                with torch.cuda.stream(stream):
                    # Not async: the lane waits for NCCL's stream then, and the next for the lane.
                    step(False)
                if lane in _HOST_LANES:
                    copied = torch.cuda.Event()
                    # After the copy itself: the last event of all may be on another lane.
                    copied.record(stream)
        except BaseException:
            # The caller will free memory that is still written to.
            computation.wait_stream(before)
            raise
        # After the last step, which has waited for all others: one event stands for the transfer.
        done.record(before)
        return _CudaTransfer(steps, done, copied)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)
