"""Communication during computation: streams on CUDA, and their counterpart on the CPU.

A transfer is a sequence of steps, each on a lane: "gather", "reduce", "outer" (the outer mesh axis), or "fetch" and
"send", copies from and to the host's memory. Lanes run concurrently with each other and with the computation:

    compute  | forward of unit 1 | forward of unit 2 |          the computation waits for a transfer when it finishes it
    gather   | weights of unit 2 | weights of unit 3 |          a transfer starts after the earlier computation

* On CUDA a lane is a stream. All steps are enqueued at the start, each after everything that was
  enqueued on the stream from which it is called. ``finish`` makes the current stream wait. For copies from and to the
  host's memory, ``finish`` makes the program wait, because the program accesses host memory without a stream. Memory
  that outlives a step is allocated before the transfer starts and freed after it is finished, on the computation's
  stream. So no memory is reused too early, and no memory needs ``record_stream``.
* On the CPU the first collective runs on the backend's own threads, after the preceding steps. All
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

# A lane and a function that issues the work there. The function's argument says whether to issue
# asynchronously; it returns an object to wait for, or None.
Step = tuple[str, Callable[[bool], Work | None]]


class Transfer(Protocol):
    """Steps in progress.

    ``only_waits``: finishing neither issues collectives, whose order matters, nor delays the
    program's next computation on the device.
    """

    @property
    def only_waits(self) -> bool: ...

    def finish(self) -> None:
        """Return when all steps are done; on CUDA the current stream waits. To be called once.

        Copies from and to the host's memory are done when it returns, also on CUDA.
        """


class Streams(Protocol):
    """What units need from a device. ``copies``: collectives work on copies."""

    @property
    def copies(self) -> bool: ...

    def start(self, steps: Sequence[Step]) -> Transfer: ...

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Mark the code that runs inside the context for a profiler."""
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
        # Steps that have begun are not kept: gloo has copied what it reduces, and references what it reads.
        self._later = later

    def finish(self) -> None:
        # gloo's own threads run the collective, and use the buffers until it is done.
        if self._work is not None:
            self._work.wait()
        for _, step in self._later:
            # One after the other: each step reads the result of the previous one.
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
        # The steps hold the tensors that are read and written until the transfer is finished.
        self._steps = steps
        self._done: torch.cuda.Event | None = done
        self._copied = copied

    def finish(self) -> None:
        # Once: ``__del__`` also calls this, and must not wait again.
        done, self._done = self._done, None
        if done is not None:
            # The stream waits, not the program, which continues to enqueue the computation.
            torch.cuda.current_stream().wait_event(done)
            if self._copied is not None:
                # The CPU reads host memory, as an optimizer does, without a stream.
                self._copied.synchronize()

    def __del__(self) -> None:
        # Dropped with its model or by an error: without a wait, its memory would be reused at once.
        self.finish()


class CudaStreams:
    """One stream for each lane."""

    copies = False

    def __init__(self, device: torch.device) -> None:
        # The computation waits for transfers, so their kernels have priority.
        self._lanes = {name: torch.cuda.Stream(device, priority=-1) for name in _LANES}

    def start(self, steps: Sequence[Step]) -> Transfer:
        computation = before = torch.cuda.current_stream()
        done, copied = torch.cuda.Event(), None
        try:
            for lane, step in steps:
                stream = self._lanes[lane]
                # The first step reads the result of the computation: main weights of the last update, or a gradient.
                # Without this wait, a gather would send older weights (a convergence bug of Megatron-FSDP, pull request
                # 4435). Later steps read the result of the previous lane.
                stream.wait_stream(before)
                before = stream
                with torch.cuda.stream(stream):
                    # Not async: so the lane waits for NCCL's stream, and the next lane for this one.
                    step(False)
                if lane in _HOST_LANES:
                    copied = torch.cuda.Event()
                    # Right after the copy: the last event of the transfer may be on another lane.
                    copied.record(stream)
        except BaseException:
            # The caller will free memory that is still being written.
            computation.wait_stream(before)
            raise
        # After the last step, which has waited for all other steps: one event covers the transfer.
        done.record(before)
        return _CudaTransfer(steps, done, copied)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)
