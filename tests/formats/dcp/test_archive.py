"""The zip archives inside `.distcp` files, against those of torch.save and against torch.load."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from bridge.core.formats.dcp import archive_writer as dcp_archive_writer
from bridge.core.formats.dcp.archive import read_value, verify_record
from bridge.core.formats.dcp.archive_writer import tensor_archive, tensor_archive_length, value_archive
from bridge.core.formats.reading import source_files
from bridge.core.formats.reading.source_files import FileView, SourceFiles
from bridge.core.formats.tensors.arrays import raw_bytes
from bridge.core.formats.tensors.base import DTYPES, CheckpointError
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.dcp_files import array_of, find_tensor, numbered, stock_archive, tensor_of
from tests.support.bridge.file_views import elements, viewed


def read(file: FileView, offset: int, length: int) -> np.ndarray:
    stored, files, name = find_tensor(file, offset, length, "w"), file._files, file._name
    verify_record(files, name, stored.record, "w")
    return elements(file, stored)


def write_tensor(file: BinaryIO, array: np.ndarray) -> int:
    data, offset = raw_bytes(array).data, file.tell()
    before, after = tensor_archive(array.dtype, array.shape, offset, zlib.crc32(data))
    length = len(before) + len(data) + len(after)
    assert length == tensor_archive_length(array.dtype, array.shape, offset)
    for part in (before, data, after):
        file.write(part)
    return length


def write_value(file: BinaryIO, value: object, what: str) -> int:
    return file.write(value_archive(value, file.tell(), what))


BASE = numbered((4, 6, 5))
TENSORS = {
    "contiguous": BASE,
    "transposed": numbered((4, 6)).t(),
    "permuted": BASE.permute(2, 0, 1),
    "channels last": numbered((2, 3, 4, 5)).to(memory_format=torch.channels_last),
    "expanded": numbered((3, 1)).expand(3, 4),
    "view with an offset": BASE[1:3, ::2],
    "scalar": torch.tensor(-0.0),
    "empty": torch.empty(0, 3),
    "empty view": BASE[:, 2:2],
    "parameter data": torch.nn.Linear(3, 2).weight.data,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_saved_by_torch_is_read_with_its_strides_and_offset(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    data = stock_archive(tensor)
    file = viewed(tmp_path / "f", b"odd" + data + b"tail")
    assert same_bits(read(file, 3, len(data)), array_of(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_read_from_torch_and_by_torch(tmp_path: Path, dtype: str) -> None:
    array = random_bits((3, 5), DTYPES[dtype], 7)
    tensor = tensor_of(array)
    data = stock_archive(tensor)
    assert same_bits(read(viewed(tmp_path / "f", data), 0, len(data)), array)

    buffer = io.BytesIO()
    length = write_tensor(buffer, array)
    assert length == len(buffer.getvalue())
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape)) == (tensor.dtype, (3, 5))
    assert same_bits(array_of(loaded), array)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 0, 2), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "bool", "complex128"])
def test_an_array_written_here_is_the_same_for_torch(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    array = random_bits(shape, DTYPES[dtype], 3)
    buffer = io.BytesIO()
    write_tensor(buffer, array)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert same_bits(array_of(loaded), array)


def test_an_array_in_any_memory_order_is_written_row_by_row(tmp_path: Path) -> None:
    for array in (np.arange(24.0).reshape(4, 6).T, np.arange(24.0)[::-2], np.asfortranarray(np.eye(3))):
        buffer = io.BytesIO()
        write_tensor(buffer, array)
        loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        assert loaded.numpy().tolist() == array.tolist()


def test_data_is_aligned_in_the_file_and_python_finds_every_record_intact(tmp_path: Path) -> None:
    buffer = io.BytesIO(b"xyz")
    buffer.seek(3)
    spans = []
    for size in (5, 64, 1, 1000):
        start = buffer.tell()
        spans.append((start, write_tensor(buffer, np.arange(size, dtype=np.uint8))))
    data = buffer.getvalue()
    file = viewed(tmp_path / "f", data)
    for start, length in spans:
        assert find_tensor(file, start, length, "w").record.start % 64 == 0
        with zipfile.ZipFile(io.BytesIO(data[start : start + length])) as archive:
            assert archive.testzip() is None
            assert {"archive/data.pkl", "archive/data/0", "archive/version"} <= set(archive.namelist())


def test_records_with_64_bit_sizes_are_read_here_by_torch_and_by_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_archive_writer, "WIDE", 1)
    dcp_archive_writer._template.cache_clear()
    array = np.arange(100, dtype=np.float32)
    buffer = io.BytesIO()
    length = write_tensor(buffer, array)
    assert struct.pack("<L", 0xFFFFFFFF) in buffer.getvalue()
    assert same_bits(read(viewed(tmp_path / "f", buffer.getvalue()), 0, length), array)
    assert torch.load(io.BytesIO(buffer.getvalue()), weights_only=True).numpy().tolist() == array.tolist()
    assert zipfile.ZipFile(io.BytesIO(buffer.getvalue())).testzip() is None


VALUES = [
    1e-3,
    -7,
    2**100,
    -(2**100),
    None,
    True,
    (0.9, 0.999),
    [1, {"a": (None,)}],
    "hé",
    {1: 2},
    [],
    {},
    (),
    "",
    b"",
    {"raw": b"\x00\xff text"},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_the_same_read_from_torch_and_by_torch(tmp_path: Path, value: object) -> None:
    data = stock_archive(value)
    assert repr(read_value(viewed(tmp_path / "f", data), 0, len(data), "v")) == repr(value)
    buffer = io.BytesIO()
    length = write_value(buffer, value, "v")
    assert repr(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)) == repr(value)
    assert repr(read_value(viewed(tmp_path / "g", buffer.getvalue()), 0, length, "v")) == repr(value)


def test_a_conjugated_tensor_is_refused_not_read_unconjugated(tmp_path: Path) -> None:
    data = stock_archive(torch.conj(torch.tensor([1 + 2j])))
    with pytest.raises(CheckpointError, match="conjugated"):
        find_tensor(viewed(tmp_path / "f", data), 0, len(data), "w")


def rewritten(data: bytes, replace: dict[str, bytes]) -> bytes:
    """The archive with other records, checksums made right again."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as record:
                record.write(replace.get(name.partition("/")[2], old.read(name)))
    # Python writes the zip64 end record, which torch always has, only for large archives.
    end = buffer.getvalue()[-22:]
    _, _, _, _, count, size, position, _ = struct.unpack("<4s4H2LH", end)
    body = buffer.getvalue()[:-22]
    wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, position)
    return body + wide + struct.pack("<4sLQL", b"PK\6\7", 0, len(body), 1) + end


def test_big_endian_data_is_refused(tmp_path: Path) -> None:
    data = rewritten(stock_archive(BASE), {})
    assert same_bits(read(viewed(tmp_path / "f", data), 0, len(data)), array_of(BASE))
    data = rewritten(stock_archive(BASE), {"byteorder": b"big"})
    with pytest.raises(CheckpointError, match="expected little-endian data, got byte order b'big'"):
        find_tensor(viewed(tmp_path / "g", data), 0, len(data), "w")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"K\x00K\x04K\x06\x86", b"K\x01K\x04K\x06\x86", "extends beyond"),  # storage offset 1
        (b"K\x06K\x01\x86", b"K\x07K\x01\x86", "extends beyond"),  # row stride 7
        (b"K\x06K\x01\x86", b"K\x06\x85", "extends beyond"),  # one stride for two axes
        (b"K\x06K\x01\x86", b"K\x06K\x01\x85", "got something else"),
        (b"K\x06K\x01\x86", b"J\xff\xff\xff\xffK\x01\x86", "sizes and strides"),
        (b"K\x18t", b"K\x19t", "record of 100 bytes"),  # 25 elements in the storage
        (b"FloatStorage", b"QInt8Storage", "expected a dtype"),
        (b"_rebuild_tensor_v2", b"_rebuild_qtensor", "refused"),
        (b"collections OrderedDict"[:11], b"subprocess!", "refused"),
    ],
)
def test_a_description_that_does_not_fit_its_data_is_refused(
    tmp_path: Path, old: bytes, new: bytes, why: str
) -> None:
    data = stock_archive(numbered((4, 6)))
    pickled = zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")
    assert old in pickled
    data = rewritten(data, {"data.pkl": pickled.replace(old, new)})
    with pytest.raises(CheckpointError, match=why):
        find_tensor(viewed(tmp_path / "f", data), 0, len(data), "w")


def test_a_damaged_description_is_refused_even_where_it_still_makes_sense(tmp_path: Path) -> None:
    data = stock_archive(numbered((4, 6)))
    assert data.count(b"K\x06K\x01\x86") == 1
    data = data.replace(b"K\x06K\x01\x86", b"K\x05K\x01\x86")
    with pytest.raises(CheckpointError, match=r"data\.pkl: the data is damaged"):
        find_tensor(viewed(tmp_path / "f", data), 0, len(data), "w")


def test_data_of_many_blocks_is_verified_to_its_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "SCAN", 64)
    data = stock_archive(BASE)
    start = find_tensor(viewed(tmp_path / "f", data), 0, len(data), "w").record.start
    assert same_bits(read(viewed(tmp_path / "f", data), 0, len(data)), array_of(BASE))
    for position in range(start, start + BASE.nbytes):
        broken = bytearray(data)
        broken[position] ^= 16
        with pytest.raises(CheckpointError, match="the data is damaged"):
            read(viewed(tmp_path / "f", bytes(broken)), 0, len(data))


def test_strides_that_are_never_taken_do_not_matter(tmp_path: Path) -> None:
    data = stock_archive(numbered((1, 6)))
    pickled = zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")
    huge = pickled.replace(b"K\x06K\x01\x86q\x07", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x01\x86q\x07")
    assert huge != pickled
    data = rewritten(data, {"data.pkl": huge})
    assert read(viewed(tmp_path / "f", data), 0, len(data)).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_an_expanded_tensor_too_large_for_an_address_is_refused(tmp_path: Path) -> None:
    data = stock_archive(torch.zeros(1).expand(1 << 30, 1 << 31))
    with pytest.raises(CheckpointError, match="extends beyond"):
        find_tensor(viewed(tmp_path / "f", data), 0, len(data), "w")


def test_a_description_above_4_kib_is_refused(tmp_path: Path) -> None:
    data = rewritten(stock_archive(BASE), {"data.pkl": b"\x80\x02" + b"N" * 4096})
    with pytest.raises(CheckpointError, match=r"'data\.pkl' of at most 4096 bytes, got 4098"):
        find_tensor(viewed(tmp_path / "f", data), 0, len(data), "w")


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    data = bytearray(rewritten(stock_archive(BASE), {}))
    entry = data.index(b"PK\x01\x02")
    data[entry + 10] = 8
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        find_tensor(viewed(tmp_path / "f", bytes(data)), 0, len(data), "w")


def test_an_archive_may_not_reach_outside_its_own_bytes(tmp_path: Path) -> None:
    data = bytearray(stock_archive(BASE))
    entry = data.rindex(b"PK\x01\x02", 0, data.index(b"archive/byteorder", data.index(b"PK\x01\x02")))
    for field, value in ((42, len(data) - 10), (20, len(data)), (42, 0xFFFFFFF0)):
        broken = bytearray(data)
        broken[entry + field : entry + field + 4] = struct.pack("<L", value)
        if field == 20:
            broken[entry + 24 : entry + 28] = struct.pack("<L", value)
        with pytest.raises(CheckpointError, match="is outside the file"):
            find_tensor(viewed(tmp_path / "f", bytes(broken) + b"beyond" * 1000), 0, len(broken), "w")


def test_a_checksum_that_was_never_computed_is_not_a_false_alarm(tmp_path: Path) -> None:
    config = torch.utils.serialization.config.save
    old = config.compute_crc32
    try:
        config.compute_crc32 = False
        data = stock_archive(BASE)
    finally:
        config.compute_crc32 = old
    file = viewed(tmp_path / "f", data)
    assert find_tensor(file, 0, len(data), "w").record.crc is None
    assert same_bits(read(file, 0, len(data)), array_of(BASE))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("writer", ["torch", "twinshard"])
def test_after_any_one_changed_byte_the_tensor_is_refused_or_bit_exact(tmp_path: Path, writer: str) -> None:
    """Every byte of the archive in turn: what checksums do not protect must not change what is read."""
    array = array_of(numbered((3, 4)))
    if writer == "torch":
        data = stock_archive(numbered((3, 4)))
    else:
        buffer = io.BytesIO()
        write_tensor(buffer, array)
        data = buffer.getvalue()
    rng = random.Random(0)
    refused = 0
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= rng.randrange(1, 256)
        try:
            assert same_bits(read(viewed(tmp_path / "f", bytes(broken)), 0, len(data)), array)
        except CheckpointError:
            refused += 1
    assert refused > len(data) // 4


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_5000_mutants_and_every_truncation_raise_nothing_but_checkpoint_errors(tmp_path: Path) -> None:
    data = stock_archive((0.9, [1, "a"])) + stock_archive(numbered((3, 4)))
    first = len(stock_archive((0.9, [1, "a"])))
    rng = random.Random(1)
    cases = [data[:n] for n in range(1, len(data), 3)]
    for _ in range(5000):
        mutant = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            mutant[rng.randrange(len(mutant))] = rng.choice([0, 1, 255, rng.randrange(256)])
        cases.append(bytes(mutant))
    errors = 0
    for case in cases:
        file = viewed(tmp_path / "f", case)
        try:
            read_value(file, 0, first, "v")
            read(file, first, len(data) - first)
        except CheckpointError:
            errors += 1
    assert errors > 1000


@pytest.mark.slow
def test_a_record_above_4_gib_is_read_here_and_by_torch(tmp_path: Path) -> None:
    size = (4 << 30) + 12_345
    array = np.zeros(size, np.uint8)
    array[[0, size // 2, -1]] = 1, 2, 3
    path = tmp_path / "f"
    with open(path, "wb") as file:
        length = write_tensor(file, array)
    files = SourceFiles(tmp_path)
    stored = find_tensor(files.view("f"), 0, length, "w")
    verify_record(files, "f", stored.record, "w")
    assert stored.shape == (size,)
    start = stored.record.start
    assert [files.read("f", at, at + 1)[0] for at in (start, start + size // 2, start + size - 1)] == [
        1,
        2,
        3,
    ]
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded[[0, 1, size // 2, -1]].tolist() == [1, 0, 2, 3]
    path.unlink()  # pytest keeps the directories of three runs
