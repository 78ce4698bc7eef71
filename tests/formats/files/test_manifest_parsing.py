"""Manifests of many tensors: entries that are alike are checked once, and read as each of them alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.formats.files import manifest as module
from bridge.core.formats.files.manifest import (
    Manifest,
    ManifestTensor,
    parse_manifest,
    render_manifest,
    rest_checksum,
)
from bridge.core.formats.reading.source_files import SourceFiles
from bridge.core.formats.tensors.base import Box, CheckpointError
from tests.support.examples import examples

GOOD: dict[str, Any] = {
    "dtype": "float32",
    "shape": [4, 3],
    "chunks": [[[0, 0], [2, 3], "9ae0daaf"], [[2, 0], [2, 3], "13a92d01"]],
}


def manifest(tensors: dict[str, Any]) -> bytes:
    return json.dumps(
        {"twinshard_manifest": 1, "format": "dcp", "tensors": tensors, "objects": {}, "files": {}}
    ).encode()


def outcome(tensors: dict[str, Any]) -> object:
    try:
        return parse_manifest(manifest(tensors), "w").tensors
    except CheckpointError as error:
        return str(error)


numbers = st.sampled_from([0, 1, 2, 3, 4, 1 << 62])
odd = st.sampled_from([-1, 1.0, True, "1", None, 1 << 63, [1]])
sizes = st.lists(numbers | odd, max_size=2) | st.sampled_from([[1, 1], [0, 0], [2, 3]])
crcs = st.sampled_from(["9ae0daaf", "00000000", "9AE0DAAF", "9ae0daa", "9ae0daaff", 5, None])
chunks = st.lists(st.tuples(sizes, sizes, crcs).map(list) | st.just([[0, 0], [2, 3]]), max_size=3)
mangled = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["float32", "int8", "x", 1]), "shape": sizes, "chunks": chunks}
)
incomplete = st.sampled_from([{key: GOOD[key] for key in GOOD if key != left_out} for left_out in GOOD])
entries = st.lists(st.just(GOOD) | incomplete | mangled, min_size=1, max_size=2)
alike = entries.flatmap(lambda entries: st.lists(st.sampled_from(entries), max_size=4))


@examples(300)
@given(st.lists(alike, max_size=2))
def test_entries_alike_are_read_or_refused_as_each_alone(groups: list[list[dict[str, Any]]]) -> None:
    tensors = {f"w{k}": entry for k, entry in enumerate(entry for group in groups for entry in group)}
    expected: object = {}
    for name, entry in tensors.items():
        alone = outcome({name: entry})
        if isinstance(alone, str):
            expected = alone
            break
        assert isinstance(alone, dict)
        assert isinstance(expected, dict)
        expected |= alone
    assert outcome(tensors) == expected


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("shape", 0), 4.0, "expected sizes of at least 0"),
        (("shape", 0), True, "expected sizes of at least 0"),
        (("shape", 0), 1 << 63, "expected sizes of at least 0"),
        (("shape", 0), -1, "expected sizes of at least 0"),
        (("chunks", 0, 0, 0), False, "expected sizes of at least 0"),
        (("chunks", 1, 1, 1), 3.0, "expected sizes of at least 0"),
        (("chunks", 1, 2), "13A92D01", "8 hexadecimal digits in lower case"),
        (("chunks", 1, 2), 0x13A92D01, "8 hexadecimal digits in lower case"),
        (("chunks", 1), [[2, 0], [2, 3]], "not enough values to unpack"),
        (("chunks", 1), [[2, 0], [2, 3], "13a92d01", "13a92d01"], "too many values to unpack"),
        (("chunks", 1, 1), [3, 3], "expected chunks inside shape"),
        (("dtype",), "float31", "expected a dtype out of"),
    ],
)
def test_an_entry_that_is_nearly_like_the_one_before_is_refused(
    path: tuple[str | int, ...], value: object, why: str
) -> None:
    bad = json.loads(json.dumps(GOOD))
    node = bad
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(CheckpointError, match=rf"^w: malformed or damaged manifest: .*{why}"):
        parse_manifest(manifest({"a": GOOD, "b": GOOD, "c": bad}), "w")


def test_many_entries_are_what_was_written_and_keep_their_own_checksums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[object] = []
    original = module._tensor

    def counted(entry: object) -> ManifestTensor:
        checked.append(entry)
        return original(entry)

    monkeypatch.setattr(module, "_tensor", counted)
    tensors = {}
    for k in range(200):
        shape = (6, 4) if k % 2 else (5,)
        whole = (Box((0, 0), (3, 4)), Box((3, 0), (3, 4))) if k % 2 else (Box((0,), (5,)),)
        tensors[f"w{k}"] = ManifestTensor("float32", shape, {box: 10 * k + n for n, box in enumerate(whole)})
    written = Manifest("dcp", tensors, {}, {})
    assert parse_manifest(render_manifest(written), "w") == written
    assert len(checked) == 2
    odd = Manifest(
        "dcp", {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 1}, {}, {}
    )
    assert parse_manifest(render_manifest(odd), "w") == odd
    assert len(checked) == 3


ONE = {"dtype": "float32", "shape": [4, 3], "chunks": [[[0, 0], [4, 3], "9ae0daaf"]]}
OTHER = {"dtype": "int8", "shape": [], "chunks": [[[], [], "00000001"]]}
USUAL = manifest({"a.b": ONE, "c": OTHER, "e": {**ONE, "chunks": [[[0, 0], [4, 3], "00000000"]]}, "d": OTHER})


def both_ways(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[object, object]:
    def parsed() -> object:
        try:
            document = parse_manifest(data, "w")
            return list(document.tensors.items()), document
        except CheckpointError as error:
            return str(error)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_usual", lambda data: None)
        general = parsed()
    return parsed(), general


def test_a_manifest_in_the_usual_form_is_read_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    accented = USUAL.replace(b'"e"', '"é"'.encode())
    for data in (USUAL, accented, manifest({"a": ONE} | {f"w{k}": OTHER for k in range(50)}), manifest({})):
        assert module._usual(data) is not None
        quick, general = both_ways(data, monkeypatch)
        assert quick == general
        assert isinstance(quick, tuple)


@pytest.mark.parametrize(
    "change",
    [
        # Each is JSON that means something else than its most obvious reading.
        lambda text: text.replace('"objects": {}', '"objects": {}, "tensors": {}'),
        lambda text: text.replace('"objects": {}', '"objects": {}, "t\\u0065nsors": {}'),
        lambda text: text.replace('"objects": {}', '"objects": {}, "objects": {}'),
        lambda text: text.replace('"objects": {}', '"objects": {"}, \\"objects\\": {": "00000001"}'),
        lambda text: text.replace('"objects": {}', '"objects": {"x": {"a": 1}, "objects": {}}'),
        lambda text: text.replace('"c"', '"a.b"'),
        lambda text: text.replace('"c"', '"c\\u0064"'),
        lambda text: text.replace('"c"', '"c\n"'),
        lambda text: text.replace("[4, 3]", "[04, 3]"),
        lambda text: text.replace("[4, 3]", "[4, 3, ]"),
        lambda text: text.replace("[4, 3]", "[" + "9" * 5000 + ", 3]"),
        lambda text: text.replace("[[0, 0], [4, 3]", "[[1, 0], [4, 3]"),
        lambda text: text.replace('"float32"', '"float31"'),
        lambda text: text.replace("9ae0daaf", "9AE0DAAF"),
        lambda text: text.replace('"9ae0daaf"]]}, ', '"9ae0daaf"]]} , '),
        lambda text: text.replace('"9ae0daaf"]]}, ', '"9ae0daaf"]]}, , '),
        lambda text: text.replace('}, "objects"', ', }, "objects"'),
        lambda text: text.replace('"files": {}', '"files": 5'),
        lambda text: text.replace('"format": "dcp"', '"format": "dcp", "format": "x"'),
        lambda text: text[:-1],
        lambda text: text + " x",
    ],
)
def test_what_is_nearly_in_the_usual_form_is_read_or_refused_as_any(
    change: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = change(USUAL.decode()).encode()
    assert data != USUAL
    quick, general = both_ways(data, monkeypatch)
    assert quick == general


def test_any_byte_of_the_usual_form_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    for position in range(len(USUAL)):
        bad = bytearray(USUAL)
        bad[position] = rng.choice(b'"\\{}[]:, 019afx\n\xff')
        quick, general = both_ways(bytes(bad), monkeypatch)
        assert quick == general, bytes(bad)


def test_a_chunk_listed_twice_has_its_last_checksum_in_every_entry() -> None:
    twice = {"dtype": "int8", "shape": [2], "chunks": [[[0], [2], "00000001"], [[0], [2], "00000002"]]}
    again = {**twice, "chunks": [[[0], [2], "00000003"], [[0], [2], "00000004"]]}
    tensors = parse_manifest(manifest({"a": twice, "b": again}), "w").tensors
    assert tensors["a"].chunks == {Box((0,), (2,)): 2}
    assert tensors["b"].chunks == {Box((0,), (2,)): 4}


def test_bytes_beside_the_data_are_the_same_in_pages_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = bytes(k * 7 % 251 for k in range(3_000_000))
    path.write_bytes(data)
    # Small gaps, more than are taken together, and three above 4 KiB: at the start, amid the others, and at the end.
    ranges = [(10_000 + 90 * k, 10_000 + 90 * k + 60) for k in range(30_000) if not 7000 < k < 7100]
    view = SourceFiles(tmp_path).view("f")
    crc = rest_checksum(path, ranges, view)
    assert crc == rest_checksum(path, ranges)
    to_the_end = [*ranges, (2_710_000, len(data) - 9)]
    assert rest_checksum(path, to_the_end, view) == rest_checksum(path, to_the_end)
    for changed in (0, 9_999, 10_060, 640_075, 2_999_999):
        other = bytearray(data)
        other[changed] ^= 1
        (tmp_path / "g").write_bytes(other)
        other_view = SourceFiles(tmp_path).view("g")
        assert rest_checksum(tmp_path / "g", ranges, other_view) != crc, changed
