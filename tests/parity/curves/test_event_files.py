"""TensorBoard event files, written here by hand from the format's description, bit by bit."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from bridge.parity.curves.metrics_files import read_metrics
from bridge.parity.curves.series import MetricsError


def crc32c(data: bytes) -> int:
    """The CRC of the polynomial 0x1EDC6F41, a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15) + (crc << 17) % 2**32 + 0xA282EAD8) % 2**32)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def varint(value: int) -> bytes:
    value %= 2**64
    out = b""
    while value > 127:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field * 8) + varint(value)


def text(field: int, value: bytes) -> bytes:
    return varint(field * 8 + 2) + varint(len(value)) + value


def float32(field: int, value: float) -> bytes:
    return varint(field * 8 + 5) + struct.pack("<f", value)


def event(step: int, *values: bytes) -> bytes:
    clock = varint(1 * 8 + 1) + struct.pack("<d", 1.7e9)
    steps = number(2, step) if step else b""  # protobuf leaves out zeros
    return record(clock + steps + text(5, b"".join(text(1, value) for value in values)))


def simple(tag: str, value: float) -> bytes:
    return text(1, tag.encode()) + float32(2, value)


def tensor(tag: str, dtype: int, *parts: bytes, shape: bytes = b"") -> bytes:
    metadata = text(9, text(1, text(1, b"scalars")))
    return text(1, tag.encode()) + metadata + text(8, number(1, dtype) + text(2, shape) + b"".join(parts))


VERSION = record(varint(9) + struct.pack("<d", 1.7e9) + text(3, b"brain.Event:2"))
LOSSES = [(step, 5.0 - step / 8) for step in range(6)]


def write(folder: Path, *records: bytes, name: str = "events.out.tfevents.1700000000.host") -> Path:
    path = folder / name
    path.write_bytes(b"".join((VERSION, *records)))
    return path


def points(path: Path, metric: str = "loss") -> list[tuple[int, float]]:
    series = read_metrics(path)[metric]
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_the_writer_of_this_test_knows_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_scalars_are_read_from_a_file_and_from_its_directory(tmp_path: Path) -> None:
    path = write(tmp_path, *(event(step, simple("loss", loss), simple("lr", 0.5)) for step, loss in LOSSES))
    (tmp_path / "notes.txt").write_text("words, and no events at all")
    assert points(path) == points(tmp_path) == LOSSES
    assert points(tmp_path, "lr") == [(step, 0.5) for step, _ in LOSSES]
    assert points(path.rename(tmp_path / "renamed")) == LOSSES


def test_scalars_as_tensors_of_float_and_double(tmp_path: Path) -> None:
    values = {
        "float": tensor("float", 1, float32(5, 0.25)),
        "packed": tensor("packed", 1, text(5, struct.pack("<f", 0.25))),
        "content": tensor("content", 1, text(4, struct.pack("<f", 0.25))),
        "double": tensor("double", 2, text(6, struct.pack("<d", 0.1))),
        "double content": tensor("double content", 2, text(4, struct.pack("<d", 0.1))),
        "zero": tensor("zero", 1),
    }
    path = write(tmp_path, event(-3, *values.values()))
    wanted = {
        "float": 0.25,
        "packed": 0.25,
        "content": 0.25,
        "double": 0.1,
        "double content": 0.1,
        "zero": 0.0,
    }
    assert {name: points(path, name) for name in wanted} == {name: [(-3, v)] for name, v in wanted.items()}


def test_what_is_no_scalar_is_left_out(tmp_path: Path) -> None:
    vector = tensor("vector", 1, text(5, struct.pack("<2f", 1, 2)), shape=text(2, number(1, 2)))
    words = tensor("words", 7, text(8, b"hello"))
    histogram = text(1, b"histogram") + text(5, b"")
    unknown = number(14, 3) + varint(15 * 8 + 1) + bytes(8)
    path = write(tmp_path, event(1, vector, words, histogram, simple("loss", 2.0) + unknown), event(2))
    assert list(read_metrics(path)) == ["loss"]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    path = write(tmp_path, event(1, simple("loss", math.inf)), event(2, simple("loss", math.nan)))
    assert str(points(path)) == "[(1, inf), (2, nan)]"


def test_a_resumed_run_has_two_files_and_the_later_counts(tmp_path: Path) -> None:
    write(
        tmp_path, *(event(step, simple("loss", 9.0)) for step in (4, 5, 6)), name="events.out.tfevents.2.host"
    )
    write(
        tmp_path,
        *(event(step, simple("loss", loss)) for step, loss in LOSSES),
        name="events.out.tfevents.1.host",
    )
    assert points(tmp_path) == [*LOSSES[:4], (4, 9.0), (5, 9.0), (6, 9.0)]


def test_a_record_still_being_written_is_left_out_wherever_it_ends(tmp_path: Path) -> None:
    last = event(9, simple("loss", 1.0))
    for kept in (1, 8, 11, 12, 20, len(last) - 4, len(last) - 1):
        path = write(tmp_path, event(1, simple("loss", 2.0)), last[:kept])
        with pytest.warns(UserWarning, match=r"the last record, at byte \d+, is incomplete"):
            assert points(path) == [(1, 2.0)]


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    whole = write(tmp_path, event(1, simple("loss", 2.0))).read_bytes()
    path = tmp_path / "events.out.tfevents.1700000000.host"
    for at in range(len(VERSION), len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(
            MetricsError, match=rf"record at byte {len(VERSION)}: expected checksum 0x.* found 0x"
        ):
            read_metrics(path)


def test_records_of_something_else_and_directories_without_events_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MetricsError, match=r"expected TensorBoard event files .* in the directory, found none"
    ):
        read_metrics(tmp_path)
    for data in (b"\x2a\xff", b"\x2b", b"\x80" * 11, b"\x09\x00"):
        with pytest.raises(
            MetricsError, match=rf"record at byte {len(VERSION)}: expected a TensorBoard Event"
        ):
            read_metrics(write(tmp_path, record(data)))
