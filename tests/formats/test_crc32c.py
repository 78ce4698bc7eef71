"""CRC-32C of memory: right at all sizes, and other threads run meanwhile."""

from __future__ import annotations

import threading
import time

import google_crc32c
import numpy as np
import pytest

from bridge.core.formats.tensors import arrays
from bridge.core.formats.tensors.arrays import array_checksum


@pytest.mark.parametrize("size", [0, 1, 9, (64 << 10) - 1, 64 << 10, (1 << 20) + 3])
def test_every_size_has_the_checksum_of_the_library(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    expected = google_crc32c.value(data.tobytes())
    assert arrays.extend(0, data) == arrays.extend(0, data.tobytes()) == array_checksum(data) == expected
    half = size // 2
    assert array_checksum(data[half:], crc=array_checksum(data[:half])) == expected


def test_without_a_library_of_its_own_the_extension_calculates(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(1 << 20, dtype=np.uint8)
    expected = arrays.extend(0, data)
    monkeypatch.setattr(arrays, "_unlocked", None)
    assert arrays.extend(0, data) == expected


def test_other_threads_run_while_a_large_buffer_is_summed() -> None:
    """A thread that waits 0.1 ms at a time goes on meanwhile: the extension alone would let it run at the ends only."""
    data = np.zeros(256 << 20, np.uint8)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(1e-4)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        while not ticks:
            time.sleep(1e-3)
        began = time.perf_counter()
        arrays.extend(0, data)
        ended = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    assert sum(began < moment < ended for moment in ticks) > 5
