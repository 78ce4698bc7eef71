"""Lanes: the CPU's, and the order of what the CUDA lanes enqueue, on streams that only take notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from torch_impl.comm import streams
from torch_impl.comm.streams import CpuStreams, CudaStreams


class Work:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"{self.name} done")


def test_on_the_cpu_the_first_step_runs_at_once_and_the_others_when_the_transfer_is_finished() -> None:
    log: ClassVar[list[str]] = []

    def step(name: str, works: bool = True) -> Any:
        def issue(async_op: bool) -> Work | None:
            assert async_op
            log.append(name)
            return Work(log, name) if works else None

        return issue

    transfer = CpuStreams().start(
        [("reduce", step("a")), ("outer", step("b", works=False)), ("outer", step("c"))]
    )
    assert log == ["a"]
    transfer.finish()
    assert log == ["a", "a done", "b", "c", "c done"]


LANES = ("gather", "reduce", "outer", "fetch", "send")


class NotedStream:
    """Notes who waits for whom; ``current`` is the stream in whose context the program runs."""

    log: ClassVar[list[str]] = []
    current: NotedStream
    count = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.name = LANES[NotedStream.count % len(LANES)]
        NotedStream.count += 1

    def wait_stream(self, other: NotedStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: NotedEvent) -> None:
        self.log.append(f"{self.name} waits for the end on {event.on}")


class NotedEvent:
    on = ""

    def record(self, stream: NotedStream) -> None:
        self.on = stream.name

    def synchronize(self) -> None:
        NotedStream.log.append(f"the program waits for the end on {self.on}")


@contextmanager
def entered(stream: NotedStream) -> Iterator[None]:
    before, NotedStream.current = NotedStream.current, stream
    try:
        yield
    finally:
        NotedStream.current = before


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams do, which take notes instead."""
    compute = NotedStream()
    compute.name, NotedStream.current, NotedStream.count = "compute", compute, 0
    NotedStream.log = []
    for name, noted in (
        ("Stream", NotedStream),
        ("Event", NotedEvent),
        ("stream", entered),
        ("current_stream", lambda: NotedStream.current),
    ):
        monkeypatch.setattr(streams.torch.cuda, name, noted)
    return NotedStream.log


def test_on_cuda_each_step_waits_for_what_came_before_it_and_finish_waits_for_the_last(
    log: list[str],
) -> None:
    def step(async_op: bool) -> None:
        assert not async_op
        log.append(f"step on {NotedStream.current.name}")

    lanes = CudaStreams(torch.device("cuda", 0))
    transfer = lanes.start([("reduce", step), ("outer", step)])
    other = lanes.start([("gather", step)])
    transfer.finish()
    other.finish()
    assert log == [
        "reduce waits for compute",
        "step on reduce",
        "outer waits for reduce",
        "step on outer",
        "gather waits for compute",
        "step on gather",
        "compute waits for the end on outer",
        "compute waits for the end on gather",
    ]


def test_on_cuda_finish_also_makes_the_program_wait_for_copies_from_and_to_the_host(log: list[str]) -> None:
    lanes = CudaStreams(torch.device("cuda", 0))
    weights = lanes.start([("fetch", lambda async_op: None), ("gather", lambda async_op: None)])
    gradients = lanes.start([("reduce", lambda async_op: None), ("send", lambda async_op: None)])
    assert log == [
        "fetch waits for compute",
        "gather waits for fetch",
        "reduce waits for compute",
        "send waits for reduce",
    ]
    del log[:]
    weights.finish()
    gradients.finish()
    assert log == [
        "compute waits for the end on gather",
        "the program waits for the end on fetch",
        "compute waits for the end on send",
        "the program waits for the end on send",
    ]


def test_on_the_cpu_a_fetch_runs_before_the_collective_and_a_send_when_the_transfer_is_finished() -> None:
    log: list[str] = []

    def step(name: str, work: bool) -> Any:
        def issue(async_op: bool) -> Work | None:
            log.append(name)
            return Work(log, name) if work else None

        return issue

    steps = [("fetch", step("in", False)), ("reduce", step("sum", True)), ("send", step("out", False))]
    transfer = CpuStreams().start(steps)
    assert log == ["in", "sum"]
    assert transfer.only_waits
    transfer.finish()
    assert log == ["in", "sum", "sum done", "out"]
    several = CpuStreams().start([("reduce", step("a", True)), ("outer", step("b", True))])
    assert not several.only_waits
    several.finish()


def test_the_computation_waits_for_a_transfer_that_is_dropped_unfinished(log: list[str]) -> None:
    transfer = CudaStreams(torch.device("cuda", 0)).start([("reduce", lambda async_op: None)])
    del log[:]
    del transfer
    assert log == ["compute waits for the end on reduce"]


def test_the_computation_waits_for_a_transfer_whose_second_step_raises(log: list[str]) -> None:
    def stop(async_op: bool) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaStreams(torch.device("cuda", 0)).start([("reduce", lambda async_op: None), ("outer", stop)])
    assert log == [
        "reduce waits for compute",
        "outer waits for reduce",
        "compute waits for outer",
    ]


def test_ranges_are_marked_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[str] = []

    @contextmanager
    def noting(name: str) -> Iterator[None]:
        marked.append(name)
        yield

    monkeypatch.setattr(streams.torch.cuda.nvtx, "range", noting)
    with CpuStreams().range("0 all-gather"):
        pass
    assert marked == []
    monkeypatch.setattr(streams.torch.cuda, "Stream", NotedStream)
    with CudaStreams(torch.device("cuda", 0)).range("0 all-gather"):
        pass
    assert marked == ["0 all-gather"]
