"""A chunk's life: claimed once, noted only when the disk has it, and looked at again before it is taken over."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from bridge.core.formats.files import record as record_module
from bridge.core.formats.files.data_file import DataFile
from bridge.core.formats.files.journal import Journal
from bridge.core.formats.files.journal import resume as resume_journal
from bridge.core.formats.files.record import ChunkRecord
from bridge.core.formats.files.sink import Place
from bridge.core.formats.tensors.base import DTYPES, Box, CheckpointError, TensorInfo

KEY = {"source": "a"}


class InOrder:
    """A format of nothing but elements: chunk after chunk of float32."""

    def __init__(self, file: DataFile, size: int = 1) -> None:
        self.file, self.size = file, 4 * size

    def place(self, info: TensorInfo, number: int) -> Place:
        return Place(self.file, self.size * number, self.size)

    def encode(
        self, info: TensorInfo, number: int, parts: list[np.ndarray], crc: int
    ) -> list[bytes | memoryview]:
        return [part.data for part in parts]

    def decode(self, info: TensorInfo, number: int, data: bytes) -> np.ndarray | None:
        return np.frombuffer(data, np.uint8) if len(data) == self.size else None


@pytest.mark.parametrize("lost", ["by the disk", "directory"])
def test_what_the_system_said_to_be_lost_is_never_noted(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says so once for each open file; a later sync of the same file succeeds."""
    working = tmp_path / "c.tmp-0123abcd"
    working.mkdir()
    key = {"source": "a"}
    record = ChunkRecord(tmp_path / "c", Journal.create(working, key))
    boxes = tuple(Box((k,), (1,)) for k in range(3))
    record.declare(TensorInfo("w", ("w",), (3,), DTYPES["float32"], boxes))
    sink = InOrder(record.open(working / "data"))
    operation = {"by the disk": "fdatasync", "directory": "fsync"}[lost]
    answers = iter([OSError(errno.EIO, "Input/output error")])

    def once(descriptor: int) -> None:
        if (error := next(answers, None)) is not None:
            raise error

    monkeypatch.setattr(os, operation, once)
    for number in range(3):
        record.write("w", boxes[number], np.full(1, number, np.float32), sink)
        with pytest.raises(OSError, match="Input/output"):
            record.sync()
    record._journal.kept = True  # type: ignore[union-attr]  # there is one, made above
    record.close()
    record._journal.close()  # type: ignore[union-attr]  # there is one, made above
    resumed = resume_journal(tmp_path / "c", key)
    assert resumed is not None
    assert resumed.done == {}
    resumed.close()


def test_entries_of_directories_are_on_disk_before_chunks_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = tmp_path / "c.tmp-0123abcd"
    (working / "d").mkdir(parents=True)
    events: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        events.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(Journal, "record", lambda *_: events.append("noted"))
    record = ChunkRecord(tmp_path / "c", Journal.create(working, KEY))
    sink = InOrder(record.open(working / "d" / "data"))
    boxes = (Box((0,), (1,)), Box((1,), (1,)))
    record.declare(TensorInfo("w", ("w",), (2,), DTYPES["float32"], boxes))
    events.clear()
    for box in boxes:
        record.write("w", box, np.ones(1, np.float32), sink)
        record.sync()
    record.close()
    root = os.path.realpath(tmp_path)
    assert sorted(events[:3]) == [root, f"{root}/c.tmp-0123abcd", f"{root}/c.tmp-0123abcd/d"]
    assert events[3:] == ["noted", "noted"]


def three_chunks(tmp_path: Path) -> tuple[TensorInfo, Path]:
    working = tmp_path / "c.tmp-0123abcd"
    working.mkdir()
    boxes = tuple(Box((4 * k,), (4,)) for k in range(3))
    return TensorInfo("w", ("w",), (12,), DTYPES["float32"], boxes), working


def test_chunks_are_noted_after_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, working = three_chunks(tmp_path)
    monkeypatch.setattr(record_module, "SYNC_BYTES", 32)
    journal = Journal.create(working, KEY)
    record = ChunkRecord(tmp_path / "c", journal)
    sink = InOrder(record.open(working / "data"), 4)
    record.declare(info)
    noted = []
    for box in info.chunks:
        record.write("w", box, np.ones(4, np.float32), sink)
        noted.append(len((working / "twinshard.journal").read_bytes().splitlines()) - 1)
    # Two chunks of 16 bytes are one sync of 32; the third waits.
    assert noted == [0, 2, 2]
    record.close()
    journal.close()
    assert len((working / "twinshard.journal").read_bytes().splitlines()) == 3


def test_what_the_disk_has_of_noted_chunks_is_taken_over(tmp_path: Path) -> None:
    info, working = three_chunks(tmp_path)
    journal = Journal.create(working, KEY)
    journal.kept = True
    first = ChunkRecord(tmp_path / "c", journal)
    sink = InOrder(first.open(working / "data"), 4)
    first.declare(info)
    for k, box in enumerate(info.chunks[:2]):
        first.write("w", box, np.full(4, k, np.float32), sink)
    first.close()
    journal.close()
    content = bytearray((working / "data").read_bytes())
    content[3] ^= 1
    (working / "data").write_bytes(content)
    resumed = resume_journal(tmp_path / "c", KEY)
    assert resumed is not None
    second = ChunkRecord(tmp_path / "c", resumed)
    sink = InOrder(second.open(working / "data"), 4)
    second.declare(info)
    assert second.stored("w", sink) == {info.chunks[1]}
    with pytest.raises(CheckpointError, match="written once"):
        second.write("w", info.chunks[1], np.ones(4, np.float32), sink)
    for k in (0, 2):
        second.write("w", info.chunks[k], np.full(4, k, np.float32), sink)
    second.require_complete()
    # Chunks that this attempt has written need no look at the disk.
    (working / "data").write_bytes(b"")
    assert second.stored("w", sink) == set(info.chunks)
    second.close()
    resumed.close()


def test_a_chunk_whose_write_failed_is_neither_counted_nor_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, working = three_chunks(tmp_path)
    record = ChunkRecord(tmp_path / "c")
    sink = InOrder(record.open(working / "data"), 4)
    record.declare(info)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DataFile, "write_parts", full)
        patch.setattr(record_module, "SMALL", 0)
        with pytest.raises(OSError, match="No space left") as caught:
            record.write("w", info.chunks[0], np.ones(4, np.float32), sink)
    assert record.failure is caught.value
    with pytest.raises(CheckpointError, match="3 of 3 chunks were not written"):
        record.require_complete()
    with pytest.raises(CheckpointError, match="written once"):
        record.write("w", info.chunks[0], np.ones(4, np.float32), sink)
    record.close()
