"""Small pieces reach their places whatever the order, neighbours in few writes, and a failing disk is never noted."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from bridge.core.formats.files import data_file
from bridge.core.formats.files.data_file import BLOCK, DataFile, Gathered
from bridge.core.formats.files.journal import JOURNAL_FILE, Journal
from bridge.core.formats.files.record import ChunkRecord
from bridge.core.formats.tensors.base import DTYPES, Box, CheckpointError, TensorInfo
from tests.formats.files.test_record import InOrder


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "_BYTES", 4 * BLOCK)
    monkeypatch.setattr(data_file, "_DIRECT_BYTES", 2 * BLOCK)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of every write."""
    calls: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def counted(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append((offset, len(data)))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    return calls


@pytest.mark.parametrize("first", [0, 1, BLOCK - 1, 3 * BLOCK + 17])
def test_neighbours_are_written_together(tmp_path: Path, first: int, writes: list[tuple[int, int]]) -> None:
    file, pieces = DataFile(tmp_path / "f"), Gathered()
    rng = random.Random(first)
    data = [rng.randbytes(rng.randrange(1, 700)) for _ in range(200)]
    offset = first
    for piece in data:
        half = len(piece) // 2
        pieces.add(file, offset, [piece[:half], memoryview(piece)[half:]])
        offset += len(piece)
    pieces.flush()
    size = sum(map(len, data))
    assert file.read(first, size) == b"".join(data)
    # Each full buffer is a write, or two around whole blocks; the rest at most three.
    assert len(writes) <= 3 * (size // (4 * BLOCK) + 2)
    file.close()


def test_pieces_in_any_order_reach_their_places(tmp_path: Path) -> None:
    file, pieces = DataFile(tmp_path / "f"), Gathered()
    rng = random.Random(0)
    parts = [(100 * k, rng.randbytes(100)) for k in range(300)]
    shuffled = rng.sample(parts, len(parts))
    for offset, data in shuffled:
        pieces.add(file, offset, [data])
    pieces.flush()
    assert file.read(0, 30_000) == b"".join(data for _, data in parts)
    file.close()


def test_pieces_of_two_files_stay_apart(tmp_path: Path) -> None:
    first, second, pieces = DataFile(tmp_path / "a"), DataFile(tmp_path / "b"), Gathered()
    pieces.add(first, 0, [b"a" * 10])
    pieces.add(second, 10, [b"b" * 10])
    pieces.flush()
    assert first.read(0, 100) == b"a" * 10
    assert second.read(0, 100) == bytes(10) + b"b" * 10


def recorded(tmp_path: Path, count: int) -> tuple[ChunkRecord, TensorInfo, InOrder, Path]:
    working = tmp_path / "c.tmp-0123abcd"
    working.mkdir()
    boxes = tuple(Box((k,), (1,)) for k in range(count))
    info = TensorInfo("w", ("w",), (count,), DTYPES["float32"], boxes)
    record = ChunkRecord(tmp_path / "c", Journal.create(working, {"source": "a"}))
    sink = InOrder(record.open(working / "data"))
    record.declare(info)
    return record, info, sink, working


def noted(working: Path) -> int:
    return len([json.loads(line) for line in (working / JOURNAL_FILE).read_bytes().splitlines()[1:]])


def test_a_gathered_chunk_is_noted_only_when_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, info, sink, working = recorded(tmp_path, 3)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for k in range(2):
        record.write("w", info.chunks[k], np.full(1, k, np.float32), sink)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            record.sync()
    assert noted(working) == 0
    assert isinstance(record.failure, OSError)
    record.close()


def test_syncing_writes_what_all_threads_have_gathered(tmp_path: Path) -> None:
    count = 64
    record, info, sink, working = recorded(tmp_path, count)
    ready = threading.Barrier(4)

    def write(first: int) -> None:
        # All threads live at once: each has pieces of its own.
        ready.wait()
        for k in range(first, count, 4):
            record.write("w", info.chunks[k], np.full(1, k, np.float32), sink)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record.require_complete()
    record.sync()
    assert noted(working) == count
    assert (working / "data").read_bytes() == np.arange(count, dtype=np.float32).tobytes()
    with pytest.raises(CheckpointError, match="written once"):
        record.write("w", info.chunks[0], np.zeros(1, np.float32), sink)
    record.close()
