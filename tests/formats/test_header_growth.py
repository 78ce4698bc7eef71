"""Patterns that look at files of others match a text in one way: worst inputs are counted in characters, not seconds.

A pattern is run on inputs of n and 8 n characters, with a signal that ends a run which takes too long for any linear
one: a megabyte in ten seconds of this process's own time, some 500 times what it needs.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bridge.commands import grouping
from bridge.core.formats.dcp.metadata import _RANK_FILE
from bridge.core.formats.files import manifest
from bridge.core.formats.npz.reader import _DESCR, _ORDER, _SHAPE, read_npy_header
from bridge.core.formats.safetensors import header as safetensors
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.mapping.language import arithmetic, entries, expression, numbers, operations
from bridge.core.mapping.language.errors import MappingError
from tests.support.bridge.regex_steps import growth

_SIZE = 1 << 20
_SPENT = 10.0


@contextmanager
def bounded() -> Iterator[None]:
    """Fail where the block takes more of this process's time than anything linear could."""

    def stop(*_: object) -> None:
        raise AssertionError("more than linear time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SPENT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# As each is used: searched for, or expected at a place.
PATTERNS: dict[str, Callable[[str], re.Match[str] | None]] = {
    "npz shape": _SHAPE.search,
    "npz order": _ORDER.search,
    "npz descr": _DESCR.search,
    "safetensors key": safetensors._KEY.match,
    "safetensors field": safetensors._FIELD.match,
    "safetensors entry": safetensors._USUAL.match,
    "rank file": _RANK_FILE.fullmatch,
}
SEEDS = (
    *("'shape': (", "'shape':", "'shape': (1,", "'shape': ( ", " ", "1,", "1 ,", "1L,", "'fortran_order':"),
    *(
        "'descr': '<f",
        '"shape":[',
        '"shape":[1,',
        '"a":{"dtype":"F32","shape":[1,',
        '"',
        "\\",
        '"\\',
        "__1",
        "\n",
    ),
)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_take_linear_time_on_their_worst_inputs(name: str) -> None:
    match = PATTERNS[name]
    with bounded():
        for seed in SEEDS:
            for end in ("", "x", ")", "]"):
                text = seed * (_SIZE // 16 // len(seed)) + end
                match(text)
                match(SEEDS[0] + text)


@pytest.mark.parametrize("blanks", [_SIZE // 2, _SIZE - 200])
@pytest.mark.parametrize("character", [" ", "1", ",", "\t", "(", "L", "1,", ", "])
def test_a_header_of_a_megabyte_is_refused_at_once(blanks: int, character: str) -> None:
    shape = character * (blanks // len(character))
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}x), }}".encode()
    data = b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text
    with (
        bounded(),
        pytest.raises(CheckpointError, match=r"in its header|of at most|a comma after each|sizes"),
    ):
        read_npy_header(lambda start, stop: data[start:stop], "a.npy")


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("()", ()),
        ("(3,)", (3,)),
        ("(3)", (3,)),
        ("( 3 , 4 )", (3, 4)),
        ("(3L, 4L)", (3, 4)),
        ("(2,3,)", (2, 3)),
    ],
)
def test_shapes_as_every_numpy_writes_them_are_read(shape: str, sizes: tuple[int, ...]) -> None:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    assert read_npy_header(lambda start, stop: data[start:stop], "a.npy").shape == sizes


@pytest.mark.parametrize(
    "shape", ["(,)", "(3,,4)", "(3 4)", "(L)", "(3LL)", "(33333333333333333333)", "(3, )x"]
)
def test_other_shapes_are_refused(shape: str) -> None:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    if shape == "(3, )x":
        assert read_npy_header(lambda start, stop: data[start:stop], "a.npy").shape == (3,)
        return
    with pytest.raises(CheckpointError, match=r"a\.npy: "):
        read_npy_header(lambda start, stop: data[start:stop], "a.npy")


def test_a_manifest_of_quotes_and_brackets_is_refused_at_once() -> None:
    head = b'{"twinshard_manifest": 1, "format": "dcp", "tensors": {'
    for seed in (b'"', b'"a": {"dtype": "float32", "shape": [1, ', b"[", b'"a": ', b"1, "):
        data = head + seed * (_SIZE // len(seed)) + b'}, "objects": {}, "files": {}}'
        with bounded(), pytest.raises(CheckpointError, match="manifest"):
            manifest.parse_manifest(data, "m")


COUNTED = (
    *(_SHAPE, _ORDER, _DESCR, safetensors._KEY, safetensors._FIELD, _RANK_FILE, operations._OPERATION),
    *(arithmetic._ATOM, numbers._EQUATION, numbers._BOUND, entries._INDEX),
    *(entries._CHOICE, entries._PADDING, expression._TOKEN, grouping._NUMBER, grouping._NUMBERS),
)


@pytest.mark.parametrize("pattern", COUNTED, ids=[pattern.pattern[:20] for pattern in COUNTED])
def test_twice_the_text_takes_twice_the_steps(pattern: re.Pattern[str]) -> None:
    assert growth(pattern) < 2.6


@pytest.mark.parametrize("pattern", [r"a\s*b?\s*", r"(a|aa)*", r"(\d+)*x", r"a\w*\d*:"])
def test_patterns_with_two_ways_are_seen_by_their_steps(pattern: str) -> None:
    assert growth(re.compile(pattern)) > 3


@pytest.mark.parametrize("path", ["a.{i}{j}", "a.{i}0{j}.w"])
def test_indices_without_anything_between_them_are_refused(path: str) -> None:
    with pytest.raises(MappingError, match="one number can be split in several ways"):
        entries.PathPattern(path)
