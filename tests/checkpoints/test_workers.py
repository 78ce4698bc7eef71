"""The threads of a command: their number, what they leave undone after an error, and memory that they give back."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest

from bridge.checkpoints.ground.workers import batches, default_workers, large_buffers_returned, ordered
from bridge.core.formats.tensors.base import CheckpointError


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (3, 3), (4, 4), (5, 4)])
def test_there_is_a_worker_for_each_core_of_the_process_up_to_four(
    cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(cores))}.__getitem__, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_workers() == workers
    monkeypatch.delattr(os, "sched_getaffinity")
    assert default_workers() == 1
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_workers() == workers


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_started_after_an_error(workers: int) -> None:
    started: list[int] = []

    def work(item: int) -> int:
        started.append(item)
        if item == 1:
            raise CheckpointError("damaged")
        return item

    results = ordered(work, range(100), workers)
    assert next(results) == 0
    with pytest.raises(CheckpointError, match="damaged"):
        list(results)
    assert sorted(started) == [0, 1, 2][: 1 + workers]


def test_a_batch_ends_with_the_item_that_fills_it() -> None:
    assert [len(batch) for batch in batches([(0, "x")] * 1025)] == [512, 512, 1]
    assert list(batches([(8 << 20, "a"), (4 << 20, "b"), (4 << 20, "c"), (1, "d")])) == [
        ["a"],
        ["b", "c"],
        ["d"],
    ]


def test_glibc_gives_large_buffers_back_until_the_last_user_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    trim, mmap = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
    glibc = SimpleNamespace(mallopt=lambda *call: calls.append(call))
    monkeypatch.setattr(ctypes, "CDLL", {None: glibc}.__getitem__)
    with large_buffers_returned():
        with large_buffers_returned():
            assert calls == [(mmap, 4 << 20)] * 2
        assert len(calls) == 2
    assert calls[2:] == [(mmap, 32 << 20), (trim, 64 << 20)]
    monkeypatch.setattr(ctypes, "CDLL", {None: SimpleNamespace()}.__getitem__)
    with large_buffers_returned():
        assert len(calls) == 4
