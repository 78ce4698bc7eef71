"""Archives of NumPy, compared with what np.load makes of them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import Box, CheckpointError, open_checkpoint
from bridge.core.formats.npz import inflate
from bridge.core.formats.npz.reader import NpzReader
from bridge.core.formats.tensors.base import unreadable
from tests.support.bridge.bits import random_bits, same_bits

SAVED: dict[str, Callable[..., None]] = {"stored": np.savez, "deflated": np.savez_compressed}


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "params/dense/kernel": rng.standard_normal((37, 51), dtype=np.float32),
        "fortran": np.asfortranarray(rng.standard_normal((30, 7, 3))),
        "scalar": np.int64(3),
        "empty": np.zeros((0, 3)),
        "big_endian": np.arange(6, dtype=">f4").reshape(2, 3),
        "bfloat16": rng.standard_normal((5, 6)).astype(ml_dtypes.bfloat16),
        "complex": rng.standard_normal(3) + 1j,
        "many": rng.integers(0, 9, (700, 90), dtype=np.int16),
    }


@pytest.fixture(scope="module", params=SAVED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    SAVED[request.param](path, **arrays())
    return path


def native(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return np.array(array, array.dtype.newbyteorder("<"), order="C")


def test_arrays_and_any_box_of_them(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Many copies of the inflater, and fewer than there would be: both are searched.
    monkeypatch.setattr(inflate, "_STEP", 8192)
    monkeypatch.setattr(inflate, "_PIECE", 1000)
    monkeypatch.setattr(inflate, "_MAX_COPIES", 8)
    expected = arrays()
    rng = np.random.default_rng(1)
    with open_checkpoint(saved) as reader:
        assert reader.format == "npz"
        assert list(reader.tensors) == list(expected)
        assert reader.tensors["params/dense/kernel"].path == ("params", "dense", "kernel")
        for name, array in expected.items():
            assert same_bits(reader.read(name), native(array))
            for _ in range(25):
                offsets = tuple(int(rng.integers(0, n + 1)) for n in np.shape(array))
                sizes = (
                    int(rng.integers(0, n - o + 1)) for n, o in zip(np.shape(array), offsets, strict=True)
                )
                box = Box(offsets, tuple(sizes))
                assert same_bits(reader.read(name, box), native(native(array)[box.slices()]))
                loan = reader.lend(name, box)
                if loan is not None:
                    assert same_bits(np.array(loan.array), native(native(array)[box.slices()]))
                    loan.give_back()


@pytest.mark.parametrize("to", ["orbax", pytest.param("dcp", marks=pytest.mark.slow)])
def test_it_is_converted_bit_for_bit(saved: Path, tmp_path: Path, to: str) -> None:
    convert(saved, tmp_path / "b", to=to)
    assert diff(saved, tmp_path / "b").max_ulp == 0
    report = verify(saved)
    assert report.good
    assert report.protected == report.bytes


def test_what_is_no_number_is_named(tmp_path: Path) -> None:
    odd = {
        "objects": (np.array([1, None], dtype=object), "pickled objects, which are never loaded"),
        "text": (np.array("abc"), "text"),
        "bytes": (np.array([b"abc"]), "bytes"),
        "float8": (
            np.zeros(3, ml_dtypes.float8_e4m3fn),
            "one-byte elements whose type NumPy does not record",
        ),
        "record": (np.zeros(2, [("a", "f4"), ("b", "i4")]), "a record of several fields"),
        "dates": (np.zeros(2, "M8[s]"), "dates"),
        "void": (np.zeros(2, "V2"), "of an unknown dtype"),
        "long_double": (np.zeros(2, np.longdouble), "of an unknown dtype"),
    }
    np.savez(
        tmp_path / "a.npz",
        w=np.ones(2),
        e5m2=np.ones(2, ml_dtypes.float8_e5m2),
        **{n: a for n, (a, _) in odd.items()},
    )
    with open_checkpoint(tmp_path / "a.npz") as reader:
        reasons = dict(unreadable(reader))
        assert reader.read("e5m2").dtype == ml_dtypes.float8_e5m2
        for name, (_, why) in odd.items():
            assert reasons[name].startswith(why)
            with pytest.raises(CheckpointError, match="leave it out"):
                reader.read(name)
    assert reasons.keys() == odd.keys()
    with pytest.raises(CheckpointError, match=r"found 'objects' \(pickled objects"):
        convert(tmp_path / "a.npz", tmp_path / "b")
    convert(tmp_path / "a.npz", tmp_path / "b", selection=Selection(drop=tuple(odd)))


def test_each_flip_is_found_or_changes_nothing(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    detected = 0
    for offset in range(5, len(data), max(1, len(data) // 60)):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset % 8
        (tmp_path / "a.npz").write_bytes(flipped)
        try:
            convert(tmp_path / "a.npz", tmp_path / "b", to="dcp", replace=True)
        except CheckpointError:
            detected += 1
            assert not verify(tmp_path / "a.npz").good
        else:
            with open_checkpoint(tmp_path / "b") as reader:
                values = sorted(reader.read(name).tobytes() for name in reader.tensors)
            assert values == sorted(native(array).tobytes() for array in arrays().values())
    assert detected > 40


@pytest.mark.parametrize("name", ["empty", "scalar"])
def test_a_changed_header_is_found_also_of_an_array_without_elements(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "a.npz", **{name: arrays()[name]})
    data = (tmp_path / "a.npz").read_bytes().replace(b"(0, 3)", b"(3, 0)").replace(b"'<i8'", b"'<u8'")
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC-32"):
        convert(tmp_path / "a.npz", tmp_path / "b")


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)


def npy(shape: str, data: bytes = b"", descr: str = "<f4") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy("(2,)", bytes(8)), ""),
        (npy("(3,)", bytes(8)), r"expected 12 bytes for float32 \(3,\), got 8"),
        (npy("(99999999999999999, 99999999999999999)", bytes(8)), "expected 3999"),
        (npy("(9999999999999999999,)", bytes(8)), r"below 2\*\*63"),
        (npy("(-1,)", bytes(8)), "expected descr, fortran_order and shape"),
        (npy("(__import__('os').system('x'),)", bytes(8)), "expected descr, fortran_order and shape"),
        (npy(f"({'1, ' * 65})", bytes(4)), "at most 64 sizes"),
        (npy("(2\x1c 1)", bytes(8)), "expected descr, fortran_order and shape"),
        (npy("(" + "1" * 99 + ";)", bytes(4)), "expected descr, fortran_order and shape"),
        (b"hello", "expected a .npy file"),
        (b"\x93NUMPY\2\0\xff\xff\xff\x7f{}", "header of at most"),
        (b"\x93NUMPY\1\0\xff\x01{}", "truncated in its header"),
        (b"\x93NUMPY\4\0\xff\x01{}abcd", "version 1 to 3"),
    ],
)
def test_a_malformed_array_is_refused(tmp_path: Path, member: bytes, message: str) -> None:
    archive(tmp_path / "a.npz", {"w.npy": member})
    if message:
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / "a.npz")
    else:
        assert open_checkpoint(tmp_path / "a.npz").read("w").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("descr", ["<b4", "<i16", "<c4", "<u5"])
def test_a_type_that_numpy_does_not_know_is_named(tmp_path: Path, descr: str) -> None:
    archive(tmp_path / "a.npz", {"w.npy": npy("(2,)", bytes(8), descr)})
    with open_checkpoint(tmp_path / "a.npz") as reader:
        assert dict(unreadable(reader)) == {"w": f"of an unknown dtype ({descr})"}


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_directory_of_more_or_fewer_members_than_it_says_is_refused(tmp_path: Path, count: int) -> None:
    archive(tmp_path / "a.npz", {f"{n}.npy": npy("(2,)", bytes(8)) for n in "abc"})
    data = (tmp_path / "a.npz").read_bytes()
    end = data.rfind(b"PK\5\6")
    assert data[end + 8 : end + 12] == b"\3\0\3\0"
    (tmp_path / "a.npz").write_bytes(data[: end + 10] + bytes([count, 0]) + data[end + 12 :])
    with pytest.raises(CheckpointError, match=r"a\.npz: expected an archive of NumPy .* directory"):
        open_checkpoint(tmp_path / "a.npz")


def test_a_directory_entry_with_another_signature_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[data.rfind(b"PK\1\2") + 2] ^= 4
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a\.npz: .* its directory is damaged"):
        open_checkpoint(tmp_path / "a.npz")


def test_a_member_that_inflates_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    archive(tmp_path / "a.npz", {"w.npy": npy("(250000,)", bytes(10**6)), "x.npy": npy("(2,)", bytes(8))})
    size = len(npy("(250000,)")) + 10**6
    data = (tmp_path / "a.npz").read_bytes()
    for claimed in (size - 4000, size + 4000):
        header = npy(f"({(claimed - len(npy('(250000,)'))) // 4},)")
        assert len(header) == len(npy("(250000,)"))
        changed = data.replace(size.to_bytes(4, "little"), claimed.to_bytes(4, "little"))
        (tmp_path / "b.npz").write_bytes(changed)
        with pytest.raises(CheckpointError, match="expected 1000000 bytes"):
            open_checkpoint(tmp_path / "b.npz")
    # The same with a header that agrees with the directory.
    archive(tmp_path / "c.npz", {"w.npy": npy("(249000,)", bytes(10**6))})
    claimed = size - 4000
    changed = (
        (tmp_path / "c.npz").read_bytes().replace(size.to_bytes(4, "little"), claimed.to_bytes(4, "little"))
    )
    (tmp_path / "c.npz").write_bytes(changed)
    with (
        open_checkpoint(tmp_path / "c.npz") as reader,
        pytest.raises(CheckpointError, match="after inflating, got"),
    ):
        reader.read("w", Box((0,), (1,)))


def test_other_members_folders_and_a_text_file_are_refused(tmp_path: Path) -> None:
    archive(tmp_path / "a.npz", {"w.txt": b"x"})
    with pytest.raises(CheckpointError, match=r"expected files that end in \.npy"):
        open_checkpoint(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_text("hello" * 30)
    with pytest.raises(CheckpointError, match="it has no directory at its end"):
        open_checkpoint(tmp_path / "b.npz")
    archive(tmp_path / "c.npz", {"../../x.npy": npy("(2,)", bytes(8))})
    convert(tmp_path / "c.npz", tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "b.npz", "c", "c.npz"]


def test_a_folder_with_one_archive_and_one_without_its_usual_name(tmp_path: Path) -> None:
    values = random_bits((5, 3), np.dtype(np.float32), 0)
    (tmp_path / "m").mkdir()
    np.savez(tmp_path / "m" / "a.npz", w=values)
    (tmp_path / "other").write_bytes((tmp_path / "m" / "a.npz").read_bytes())
    for path in (tmp_path / "m", tmp_path / "other"):
        assert inspect(path).format == "npz"
        with open_checkpoint(path) as reader:
            assert same_bits(reader.read("w"), values)


def test_an_index_of_archives_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", **{name: np.ones(2)})
    index = tmp_path / "all.npz.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.npz", "b": "b.npz"}}))
    with pytest.raises(
        CheckpointError, match=r"all.npz.index.json: expected one archive of NumPy .*, found 2"
    ):
        NpzReader(index)
