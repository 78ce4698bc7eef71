"""Boxes into chunks, in memory and through files, on one process and on several that do their steps in turn."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bridge.core.formats import Box, CheckpointError, open_checkpoint
from bridge.core.formats.orbax.writer import OrbaxPart, OrbaxWriter
from bridge.core.formats.tensors.boxes import grid_of_chunks
from jax_impl.checkpoint import chunks as checkpoint_chunks
from jax_impl.checkpoint.chunks import Chunks
from tests.support.bridge.bits import random_bits

TENSORS = {
    "matrix": random_bits((37, 11), np.dtype(np.float32), 1),
    "stack": random_bits((4, 6, 7), np.dtype(ml_dtypes.bfloat16), 2),
    "vector": random_bits((53,), np.dtype(np.float32), 3),
    "scalar": random_bits((), np.dtype(np.float32), 4),
    "empty": np.zeros((0, 3), np.float32),
}
CHUNKS = {"matrix": (5, 4), "stack": (3, 4, 5), "vector": (10,), "scalar": (), "empty": None}
# Other blocks than the chunks, dealt to the processes in turn.
BOXES = {"matrix": (4, 11), "stack": (1, 2, 7), "vector": (7,), "scalar": ()}


def save(path: Path, processes: int, leave_out: int | None = None) -> list[Chunks]:
    """Save ``TENSORS``, of which box ``leave_out`` is written by nobody."""
    writer = OrbaxWriter(path, process=0)
    parts = [writer, *(OrbaxPart(writer.path, writer.temporary, i) for i in range(1, processes))]
    spilled = writer.temporary / "spilled"
    made = [Chunks(part, spilled, process) for process, part in enumerate(parts)]
    for part, chunks in zip(parts, made, strict=True):
        for name, values in TENSORS.items():
            chunks.add_tensor(part.add_tensor(name, values.shape, values.dtype, CHUNKS[name]))
    count = 0
    for name, size in BOXES.items():
        for box in grid_of_chunks(TENSORS[name].shape, size):
            if count != leave_out:
                block = TENSORS[name][box.slices()].copy()
                made[count % processes].add(name, box, block)
                block[...] = 0
            count += 1
    try:
        for chunks in made:
            chunks.finish()
        for part, chunks in zip(parts, made, strict=True):
            chunks.write_spilled(range(processes))
            part.finish()
        for file in sorted(spilled.glob("*")):
            file.unlink()
        if spilled.exists():
            spilled.rmdir()
        writer.commit(range(processes))
    except BaseException:
        writer.abort()
        raise
    return made


@pytest.mark.parametrize("held", [0, 200, 1 << 20])
@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_tensors_come_out_whole_however_boxes_and_chunks_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, held: int
) -> None:
    monkeypatch.setattr(checkpoint_chunks, "_HELD", held)
    save(tmp_path / "c", processes)
    with open_checkpoint(tmp_path / "c") as reader:
        assert reader.tensors.keys() == TENSORS.keys()
        for name, values in TENSORS.items():
            assert reader.read(name).tobytes() == values.tobytes(), name


def test_nothing_is_spilled_where_one_process_gets_all_boxes_soon(tmp_path: Path) -> None:
    (chunks,) = save(tmp_path / "c", 1)
    assert chunks._spilled == []


def test_what_waits_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_chunks, "_HELD", 10_000)
    writer = OrbaxWriter(tmp_path / "c")
    chunks = Chunks(writer, writer.temporary / "spilled", 0)
    values = np.zeros((100, 10, 10), np.float32)
    chunks.add_tensor(writer.add_tensor("w", values.shape, values.dtype, (100, 10, 10)))
    for row in range(99):
        chunks.add("w", Box((row, 0, 0), (1, 10, 10)), values[:1])
        waiting = sum(held.nbytes for parts in chunks._waiting.values() for _, held in parts)
        assert chunks._waiting_bytes == waiting <= 10_000
    assert (writer.temporary / "spilled" / "0.data").stat().st_size > 20_000
    writer.abort()


@pytest.mark.parametrize("processes", [1, 2])
def test_elements_that_no_process_had_are_noticed(tmp_path: Path, processes: int) -> None:
    with pytest.raises(CheckpointError, match=r"'matrix': expected all \d+ elements of Box.*, got \d+$"):
        save(tmp_path / "c", processes, leave_out=3)
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_that_no_process_had_any_of_is_noticed(tmp_path: Path) -> None:
    last = sum(len(grid_of_chunks(TENSORS[name].shape, size)) for name, size in BOXES.items()) - 1
    with pytest.raises(CheckpointError, match=r"'scalar': chunk 'scalar/c' is stored by none of"):
        save(tmp_path / "c", 2, leave_out=last)
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_is_written_by_the_process_that_has_most_of_it(tmp_path: Path) -> None:
    def part(process: int, rows: int) -> checkpoint_chunks._Part:
        return checkpoint_chunks._Part(process, "w", 0, [0], [rows], 0)

    assert checkpoint_chunks._writer_of([part(2, 3), part(1, 2), part(1, 2)]) == 1
    assert checkpoint_chunks._writer_of([part(2, 3), part(1, 3)]) == 1
