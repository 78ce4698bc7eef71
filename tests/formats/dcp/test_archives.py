"""Archives that are alike are parsed once, and found exactly as each of them alone."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from bridge.core.formats.dcp import archives as module
from bridge.core.formats.dcp.archive import StoredTensor, find_records
from bridge.core.formats.dcp.archive_writer import tensor_archive
from bridge.core.formats.dcp.archives import Archives
from bridge.core.formats.reading.source_files import FileView
from bridge.core.formats.reading.zip_directory import END, END64, END64_LOCATOR
from bridge.core.formats.tensors.base import CheckpointError
from tests.support.bridge.dcp_files import find_tensor
from tests.support.bridge.file_views import elements, viewed


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of archives that were parsed."""
    offsets: list[int] = []
    parse = module.records_and_places

    def counted(file: FileView, offset: int, length: int, what: str) -> object:
        offsets.append(offset)
        return parse(file, offset, length, what)

    monkeypatch.setattr(module, "records_and_places", counted)
    return offsets


def ours(array: np.ndarray, offset: int) -> bytes:
    data = array.tobytes()
    before, after = tensor_archive(array.dtype, array.shape, offset, zlib.crc32(data))
    return before + data + after


def outcome(archives: Archives | None, file: FileView, offset: int, length: int) -> StoredTensor | str:
    try:
        find = find_tensor if archives is None else archives.find
        return find(file, offset, length, "w")
    except CheckpointError as error:
        return str(error)


def test_alike_archives_are_parsed_once_for_each_place_in_a_row_of_64(
    tmp_path: Path, parsed: list[int]
) -> None:
    data, spans = b"xyz", []
    for k in range(500):
        array = np.full((3, 5) if k % 2 else (5, 3), k, np.float32)
        archive = ours(array, len(data))
        spans.append((len(data), len(archive), array))
        data += archive
    file, archives = viewed(tmp_path / "f", data), Archives()
    known = 0
    for offset, length, array in spans:
        like = archives.known(file, offset, length)
        known += like is not None
        stored = archives.find(file, offset, length, "w")
        assert stored == find_tensor(file, offset, length, "w")
        assert like in (None, stored)
        assert np.array_equal(elements(file, stored), array)
    assert len(parsed) <= 2 * 64
    assert known >= len(spans) - 2 * 64


def test_archives_of_torch_are_parsed_once(tmp_path: Path, parsed: list[int]) -> None:
    """Checksums of elements are behind them there, 0 in the headers; as of a matrix and of its transpose by turns."""
    data, spans = b"", []
    for k in range(40):
        buffer = io.BytesIO()
        torch.save(torch.full((2, 8) if k % 2 else (8, 2), float(k)), buffer)
        spans.append((len(data), len(buffer.getvalue())))
        data += buffer.getvalue() + bytes(-len(buffer.getvalue()) % 64)
    file, archives = viewed(tmp_path / "f", data), Archives()
    for k, (offset, length) in enumerate(spans):
        stored = archives.find(file, offset, length, "w")
        assert stored == find_tensor(file, offset, length, "w")
        assert (elements(file, stored) == k).all()
        assert stored.shape == ((2, 8) if k % 2 else (8, 2))
    assert parsed == [offset for offset, _ in spans[:2]]


def test_a_checksum_is_not_sought_in_the_next_header(tmp_path: Path) -> None:
    """What could be the first half of a checksum's record, with the header of the elements right behind it."""
    good = bytearray(ours(np.arange(64, dtype=np.float32), 0))
    header = good.index(b"PK\3\4", good.index(b"archive/version"))
    good[header:header] = b"PK\7\x08"
    # All places behind have moved: that of the elements' header, of the directory and of its end record.
    last = good.rindex(b"PK\1\2")
    end64, locator = good.index(b"PK\6\6"), good.index(b"PK\6\7")
    for layout, at in (("<L", last + 42), ("<Q", end64 + 48), ("<Q", locator + 8)):
        struct.pack_into(layout, good, at, struct.unpack_from(layout, good, at)[0] + 4)
    bad = bytearray(good)
    bad[header + 4] ^= 1
    padding = bytes(-len(good) % 64)
    file, archives = viewed(tmp_path / "f", bytes(good + padding + bad)), Archives()
    assert archives.find(file, 0, len(good), "w").shape == (64,)
    offset = len(good + padding)
    assert archives.known(file, offset, len(bad)) is None
    assert outcome(archives, file, offset, len(bad)) == outcome(None, file, offset, len(bad))


@pytest.mark.parametrize("bit", [0, 7])
def test_with_any_bit_flipped_the_outcome_is_that_of_a_parser_that_knows_no_other(
    tmp_path: Path, bit: int
) -> None:
    good = ours(np.arange(15, dtype=np.float32).reshape(3, 5), 0)
    good += bytes(-len(good) % 64)
    length = len(ours(np.arange(15, dtype=np.float32).reshape(3, 5), 0))
    copies = []
    for position in range(length):
        bad = bytearray(good)
        bad[position] ^= 1 << bit
        copies.append(bytes(bad))
    file = viewed(tmp_path / "f", good + b"".join(copies))
    for number in range(1, length + 1):
        # Anew: a harmless flip is learned, too.
        archives = Archives()
        archives.find(file, 0, length, "w")
        offset = number * len(good)
        assert archives.known(file, offset, length) in (None, outcome(None, file, offset, length)), number
        assert outcome(archives, file, offset, length) == outcome(None, file, offset, length), number


def test_records_that_nobody_looks_at_may_differ(tmp_path: Path, parsed: list[int]) -> None:
    """All bytes are compared at once first; what then differs may be what does not matter."""
    data = ours(np.arange(6, dtype=np.float32), 0)
    version = find_records(viewed(tmp_path / "g", data), 0, len(data), "w")["version"].start
    other = bytearray(data + bytes(-len(data) % 64))
    other[version] ^= 1
    file, archives = viewed(tmp_path / "f", bytes(other) + data), Archives()
    archives.find(file, 0, len(data), "w")
    assert archives.known(file, len(other), len(data)) == find_tensor(file, len(other), len(data), "w")
    assert parsed == [0]


def test_what_may_begin_a_safetensors_file_is_not_taken_for_known(tmp_path: Path) -> None:
    """The local header's method, which nobody reads, as the brace after the header's length."""
    data = bytearray(ours(np.arange(6, dtype=np.float32), 0))
    data += bytes(-len(data) % 64)
    length = len(ours(np.arange(6, dtype=np.float32), 0))
    assert Archives().find(viewed(tmp_path / "f", bytes(data)), 0, length, "w").shape == (6,)
    data[8:9] = b"{"
    file, archives = viewed(tmp_path / "f", bytes(data) * 2), Archives()
    assert archives.find(file, 0, length, "w").shape == (6,)
    assert archives.find(file, len(data), length, "w").shape == (6,)
    assert archives.known(file, len(data), length) is None


def test_records_that_overlap_are_parsed_each_time(tmp_path: Path, parsed: list[int]) -> None:
    """The elements hold the directory: in another archive of the same form they would say something else."""
    archive = bytearray(ours(np.zeros(4096, np.uint8), 0))
    size = END64.size + END64_LOCATOR.size + END.size
    directory = struct.unpack_from("<Q", archive, len(archive) - size + 48)[0]
    tail = bytes(archive[directory : len(archive) - size])
    inside = archive.index(bytes(4096))
    archive[inside : inside + len(tail)] = tail
    struct.pack_into("<Q", archive, len(archive) - size + 48, inside)
    file, archives = viewed(tmp_path / "f", bytes(archive)), Archives()
    for _ in range(2):
        archives.find(file, 0, len(archive), "w")
    assert parsed == [0, 0]
