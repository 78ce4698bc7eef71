"""Large tensors go from file to file with one read of each byte, and without a copy in memory."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.files import data_file
from bridge.core.formats.reading.read_memory import SCRATCH, array_for, memory_for
from bridge.core.formats.tensors.base import DTYPES, Box
from tests.support.bridge.verify_files import write

SHAPE = (1000, 2051)
FORMATS = ("dcp", "orbax", "safetensors")


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"w.{k}": rng.standard_normal(SHAPE, np.float32) for k in range(3)}


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(FORMATS, 2)])
def test_each_byte_is_read_once_and_written_from_where_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    arrays = tensors()
    write(tmp_path / "a", source, arrays, SHAPE)
    read = 0
    preadv, copyto = os.preadv, np.copyto
    copied: list[int] = []

    def counted(descriptor: int, parts: Any, offset: int) -> int:
        nonlocal read
        count = preadv(descriptor, parts, offset)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(data_file.np, "copyto", lambda *args: (copied.append(args[1].nbytes), copyto(*args)))
    convert(tmp_path / "a", tmp_path / "b", to=target)
    assert read == sum(array.nbytes for array in arrays.values())
    assert copied == []
    with open_checkpoint(tmp_path / "b") as reader:
        for name, array in zip(reader.tensors, arrays.values(), strict=True):
            assert np.array_equal(reader.read(name), array)


@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_says_where_the_elements_of_each_chunk_will_be(tmp_path: Path, format: str) -> None:
    array = tensors()["w.0"]
    positions = {}
    with create_checkpoint(tmp_path / "a", format) as writer:
        name = writer.add_tensor(("w",), array.shape, array.dtype, (400, 2051)).name
        for box in writer.chunks(name):
            positions[box] = writer.position(name, box)
            writer.write(name, box, array[box.slices()])
    for box, (file, byte) in positions.items():
        part = array[box.slices()].tobytes()
        # Found by its name: the folder is renamed when the checkpoint is complete.
        (data,) = [path.read_bytes() for path in (tmp_path / "a").rglob(Path(file).name) if path.is_file()]
        assert data[byte : byte + len(part)] == part


@pytest.mark.parametrize("offset", [0, 64, 4095, 12345])
@pytest.mark.parametrize("format", FORMATS)
def test_loans_are_as_far_from_a_page_as_the_byte_that_they_go_to(
    tmp_path: Path, format: str, offset: int
) -> None:
    arrays = tensors()
    write(tmp_path / "a", format, arrays, SHAPE)
    with open_checkpoint(tmp_path / "a") as reader:
        for name, array in zip(reader.tensors, arrays.values(), strict=True):
            loan = reader.lend(name, Box.whole(SHAPE), offset)
            assert loan is not None
            assert loan.array.ctypes.data % 4096 == offset % 4096
            assert np.array_equal(loan.array, array)
            loan.give_back()


@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, (9 << 20) + 3])
def test_large_memory_begins_where_pages_are_copied_fast(tmp_path: Path, nbytes: int) -> None:
    write(tmp_path / "a", "dcp", {"x": np.zeros((nbytes, 1), np.int8)})
    with open_checkpoint(tmp_path / "a") as reader:
        info = reader.tensors["x"]
        made = [array_for(info, Box.whole(info.shape), "a"), reader.read("x")]
    assert made[0].dtype == DTYPES["int8"]
    for memory in (memory_for(nbytes), SCRATCH.take(nbytes), *made):
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % 64 == 0
