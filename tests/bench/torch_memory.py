"""Bytes of live tensor storage at rest and at the peak of a step, measured in the same way for every engine.

On CPU the allocator reports each allocation and release to torch's profiler, including resized storages and gloo's
threads. The trace starts before the model exists, so the running sum counts all live bytes; nothing is sampled. It does
not count earlier memory, NumPy's memory, or gloo's own memory.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

_STEP = "twinshard: measured step"
_HAND_BACK_SECONDS = 0.02
_LOOK_SECONDS = 0.25
"""Longer than the interval of NCCL's watchdog, which holds the tensors of collectives until its next check."""


@dataclass(frozen=True)
class LiveBytes:
    """``rest``: bytes before the step. ``peak``: the most bytes during the step, including ``rest``.

    ``left``: bytes after the step and all its objects are deleted. More than a few KB mean a cache or a leak of the
    engine, or a release that the trace missed. A missed release makes ``rest`` and ``peak`` too large.
    """

    rest: int
    peak: int
    left: int


def live_bytes(build: Callable[[], Callable[[], Any]], device: torch.device, warm: int = 2) -> LiveBytes:
    """Measure one call of the step that ``build`` returns, after ``warm`` calls.

    Only allocations of ``build`` and of the step count. Raises RuntimeError if the profiler reports no memory.
    """
    if device.type == "cuda":
        return _on_cuda(build, device, warm)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace, _work_handed_back():
        step = build()
        for _ in range(warm):
            step()
        with record_function(_STEP):
            step()
        del step
        gc.collect()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return from_events(events)


def from_events(events: Iterable[dict[str, Any]]) -> LiveBytes:
    """Live bytes from the events of a Chrome trace, in order of time."""
    events = list(events)
    start, end = next((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == _STEP and "dur" in e)
    changes = sorted(
        ((e["ts"], e["args"]["Addr"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"),
        key=lambda change: change[0],
    )
    if not changes:
        raise RuntimeError("live bytes: expected memory events in the profiler's trace, got none")
    blocks: dict[int, int] = {}
    live = rest = peak = 0
    for moment, address, size in changes:
        # The trace missed the release of a block that is allocated again.
        live -= blocks.pop(address, 0)
        if size > 0:
            blocks[address] = size
            live += size
        if moment < start:
            rest = peak = live
        elif moment <= end:
            peak = max(peak, live)
    return LiveBytes(rest, peak, live)


@contextmanager
def _work_handed_back() -> Iterator[None]:
    """Wait until gloo's threads drop their tensors, because releases after the end of the work are not reported."""
    wait = dist.Work.wait

    def patient(work: dist.Work, *args: Any, **options: Any) -> Any:
        result = wait(work, *args, **options)
        time.sleep(_HAND_BACK_SECONDS)
        return result

    dist.Work.wait = patient  # type: ignore[method-assign]  # for the length of the context
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]  # puts torch's own method back


def _on_cuda(build: Callable[[], Callable[[], Any]], device: torch.device, warm: int) -> LiveBytes:
    before = _settled(device)
    step = build()
    for _ in range(warm):
        step()
    torch.cuda.synchronize(device)
    rest = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del step
    return LiveBytes(rest - before, peak - before, _settled(device) - before)


def _settled(device: torch.device) -> int:
    """Bytes of the process on ``device`` after garbage and tensors of NCCL's threads are freed."""
    allocated = torch.cuda.memory_allocated(device)
    while True:
        gc.collect()
        torch.cuda.synchronize(device)
        time.sleep(_LOOK_SECONDS)
        last, allocated = allocated, torch.cuda.memory_allocated(device)
        if allocated >= last:
            return allocated
