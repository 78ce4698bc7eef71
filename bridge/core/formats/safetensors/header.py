"""The header of a safetensors file: writing it, and reading it with a parser that accepts nothing else.

    | N: u64 | header: N bytes of JSON |  a  | b |   c   |  data, row-major, little-endian, no gaps
    0        8                         8+N

    {"__metadata__": {"format": "pt"},
     "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}       offsets count from 8+N

A general JSON parser would first turn a hostile file into objects of a hundred times its size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Never

import ml_dtypes
import numpy as np

from bridge.core.formats.reading.source_files import FileView
from bridge.core.formats.tensors.base import DTYPES, CheckpointError
from bridge.core.formats.tensors.leaves import MAX_NAME
from bridge.core.formats.tensors.wrapping import one_part

MAX_HEADER: Final = 100_000_000
"""The most bytes of a header that every reader of the format accepts."""

SHARDING_KEY: Final = "DCP_SHARDING_INFO"
METADATA_KEY: Final = "__metadata__"
LENGTH_BYTES: Final = 8
_ZIP: Final = b"PK\3\4"
_MAX_RANK: Final = 64  # NumPy's
_SPACE: Final = r"[ \t\n\r]*+"
_STRING: Final = r'"((?:[^"\\\x00-\x1f]|\\.)*+)"'
_KEY: Final = re.compile(f"{_STRING}{_SPACE}:{_SPACE}")
_TEXT: Final = re.compile(_STRING)
_NULL: Final = re.compile("null")
_NUMBER: Final = "(?:0|[1-9][0-9]{0,17}+)"
_SIZES: Final = rf"\[{_SPACE}(?:{_NUMBER}{_SPACE}(?:,{_SPACE}{_NUMBER}{_SPACE})*+)?+\]"
_FIELDS: Final = 3
_FIELD: Final = re.compile(
    rf'"dtype"{_SPACE}:{_SPACE}"(?P<dtype>[A-Z0-9_]{{1,16}})"'
    rf'|"shape"{_SPACE}:{_SPACE}(?P<shape>{_SIZES})'
    rf'|"data_offsets"{_SPACE}:{_SPACE}\[{_SPACE}(?P<begin>{_NUMBER}){_SPACE},{_SPACE}(?P<end>{_NUMBER}){_SPACE}\]'
)
_USUAL: Final = re.compile(
    rf'{_STRING}{_SPACE}:{_SPACE}\{{{_SPACE}"dtype"{_SPACE}:{_SPACE}"([A-Z0-9_]{{1,16}})"{_SPACE},{_SPACE}'
    rf'"shape"{_SPACE}:{_SPACE}({_SIZES}){_SPACE},{_SPACE}'
    rf'"data_offsets"{_SPACE}:{_SPACE}\[{_SPACE}({_NUMBER}){_SPACE},{_SPACE}({_NUMBER}){_SPACE}\]{_SPACE}\}}{_SPACE}'
    rf"([,}}]){_SPACE}"
)
"""A name and an array, with fields in the order that all writers use, up to the next name."""
_OPEN: Final = re.compile(rf"\{{{_SPACE}(\}}?)")
_NEXT: Final = re.compile(f"{_SPACE}([,}}]){_SPACE}")

DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
        "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    }
)  # fmt: skip
"""The format's names of dtypes. It also has F4 and F6, below; it lacks complex128."""

PACKED: Final[Mapping[str, tuple[np.dtype, int]]] = MappingProxyType(
    {
        "F4": (np.dtype(ml_dtypes.float4_e2m1fn), 4),
        "F6_E2M3": (np.dtype(ml_dtypes.float6_e2m3fn), 6),
        "F6_E3M2": (np.dtype(ml_dtypes.float6_e3m2fn), 6),
    }
)
"""Dtypes whose elements share bytes, with the bits per element. How elements share bytes is not specified."""

_CODES: Final = {DTYPES[name]: code for code, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file, in row-major order from byte `start` on. bits: per element, for a dtype in PACKED."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    bits: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in the file."""
        count = math.prod(self.shape)
        return count * self.dtype.itemsize if self.bits is None else -(-count * self.bits // 8)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, per axis."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


@dataclass(frozen=True)
class Header:
    """Arrays by name in the order of the header, and the header's free text."""

    arrays: Mapping[str, StoredArray]
    metadata: Mapping[str, str]


def dtype_code(dtype: np.dtype) -> str:
    """The format's name of a dtype. CheckpointError if it has none."""
    code = _CODES.get(dtype)
    if code is None:
        raise CheckpointError(
            f"expected a dtype that safetensors has ({', '.join(DTYPE_NAMES.values())}), got {dtype.name}"
        )
    return code


def header_length(file: FileView | bytes, start: int = 0) -> int:
    """Bytes of a safetensors file's header, from the file's first bytes, and at most MAX_HEADER."""
    return min(MAX_HEADER, int.from_bytes(file[start : start + LENGTH_BYTES], "little"))


def read_header(file: FileView | bytes, what: str, start: int = 0) -> Header:
    """The header of the safetensors file in bytes [start, end of file).

    CheckpointError, beginning with `what`, unless the arrays fill the file after the header without overlaps and gaps.
    """
    size = len(file)
    if size - start < LENGTH_BYTES:
        _refuse(what, f"the file has {size - start} bytes")
    length = int.from_bytes(file[start : start + LENGTH_BYTES], "little")
    if file[start : start + len(_ZIP)] == _ZIP:
        _refuse(
            what,
            "it begins with a pickle: PyTorch's HuggingFaceStorageWriter was given values that are not tensors, and "
            "writes such values as a file that nothing can read; save only the tensors",
        )
    base = start + LENGTH_BYTES + length
    if length > MAX_HEADER or base > size:
        _refuse(what, f"its header of {length} bytes is longer than the file of {size} or {MAX_HEADER} bytes")
    try:
        text = file[start + LENGTH_BYTES : base].decode()
    except UnicodeDecodeError:
        _refuse(what, "its header is not UTF-8 text")
    arrays, metadata = _Parser(text, what, base).run()
    end = base
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if array.start != end:
            fault = "overlaps the one before" if array.start < end else "leaves a gap before it"
            _refuse(what, f"tensor {name!r} {fault}: it begins at {array.start - base}, not {end - base}")
        end += array.nbytes
    fault = f"its tensors have {end - base} bytes, {size - base} follow the header (truncated or damaged)"
    if end < size:
        _refuse(what, fault)
    # The tensors before the end of a truncated file are whole.
    for name in (name for name, array in arrays.items() if array.start + array.nbytes > size):
        with one_part(name):
            _refuse(what, fault)
    return Header(arrays, metadata)


def format_header(
    arrays: Iterable[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The first bytes of a file with arrays (name, dtype, shape) in this order; their data follows immediately.

    CheckpointError for a dtype the format lacks, or when this is more than readers accept.
    """
    entries: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in arrays:
        end = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": dtype_code(dtype), "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # Data should start at a multiple of the largest itemsize.
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"expected at most {MAX_HEADER} bytes of names, shapes, and values other than tensors in one safetensors "
            f"file, got {len(text)}"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _refuse(what: str, why: str) -> Never:
    raise CheckpointError(f"{what}: expected a safetensors file, but {why}")


class _Parser:
    """One pass over the text; every value is checked before the next one is read."""

    def __init__(self, text: str, what: str, base: int) -> None:
        self.text = text
        self.what = what
        self.base = base
        self.position = 0

    def run(self) -> tuple[dict[str, StoredArray], dict[str, str]]:
        arrays: dict[str, StoredArray] = {}
        metadata: dict[str, str] | None = None
        if not self.text.startswith("{"):
            self.refuse("its header does not begin with '{'")
        more = self.opened()
        alike: dict[tuple[str, str], StoredArray] = {}
        while more:
            if (count := self.usual(arrays, alike)) is not None:
                more = count
                continue
            name = self.key()
            if name == METADATA_KEY:
                if metadata is not None:
                    self.refuse(f"{METADATA_KEY} is given twice")
                metadata = self.texts()
            elif name in arrays:
                self.refuse(f"tensor {name!r} is given twice")
            else:
                arrays[name] = self.array(name)
            more = self.another()
        if self.text[self.position :].strip(" \t\n\r"):
            self.refuse("something follows its header's last '}'")
        return arrays, metadata or {}

    def usual(self, arrays: dict[str, StoredArray], alike: dict[tuple[str, str], StoredArray]) -> bool | None:
        """Parse an array with the text and shape of an earlier one in a third of the time; whether more follows.

        None for any other array, and if anything is wrong: then nothing is consumed.
        """
        match = _USUAL.match(self.text, self.position)
        if match is None:
            return None
        name, code, sizes, begin, end, last = match.groups()
        if "\\" in name or len(name) > MAX_NAME or name == METADATA_KEY or name in arrays:
            return None
        like = alike.get((code, sizes))
        if like is None:
            # The first of its kind, parsed in full.
            name = self.key()
            alike[code, sizes] = arrays[name] = self.array(name)
            return self.another()
        start = int(begin)
        if int(end) - start != like.nbytes:
            return None
        arrays[name] = StoredArray(like.dtype, like.shape, self.base + start, like.bits)
        self.position = match.end()
        return last == ","

    def refuse(self, why: str) -> Never:
        _refuse(self.what, why)

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        matched = pattern.match(self.text, self.position)
        if matched is None:
            self.refuse(f"its header is malformed: expected {expected} at character {self.position}")
        self.position = matched.end()
        return matched[matched.lastindex or 0]

    def opened(self) -> bool:
        return not self.match(_OPEN, "'{'")

    def another(self) -> bool:
        return self.match(_NEXT, "',' or '}'") == ","

    def key(self) -> str:
        return self.unquoted(self.match(_KEY, "a name"), MAX_NAME)

    def unquoted(self, raw: str, longest: int) -> str:
        if "\\" in raw:
            try:
                raw = json.loads(f'"{raw}"')
                raw.encode()
            except ValueError:  # also for half of a surrogate pair
                self.refuse(f"its header has text before character {self.position} that is not Unicode")
        if len(raw) > longest:
            self.refuse(f"its header has a name of {len(raw)} characters, more than {longest}")
        return raw

    def texts(self) -> dict[str, str]:
        content: dict[str, str] = {}
        if (nothing := _NULL.match(self.text, self.position)) is not None:
            self.position = nothing.end()
            return content
        more = self.opened()
        while more:
            key = self.key()
            if key in content:
                self.refuse(f"{METADATA_KEY} has {key!r} twice")
            content[key] = self.unquoted(self.match(_TEXT, "text"), MAX_HEADER)
            more = self.another()
        return content

    def array(self, name: str) -> StoredArray:
        fields: dict[str | None, re.Match[str]] = {}
        more = self.opened()
        while more:
            field = _FIELD.match(self.text, self.position)
            if field is None or field.lastgroup in fields:
                got = self.text[self.position : self.position + 80]
                self.refuse(
                    f"the description of tensor {name!r} is malformed: expected dtype, shape and data_offsets, "
                    f"each once, got {got!r}"
                )
            fields[field.lastgroup] = field
            self.position = field.end()
            more = self.another()
        if len(fields) != _FIELDS:
            self.refuse(f"tensor {name!r} lacks one of dtype, shape and data_offsets")
        code, sizes = fields["dtype"]["dtype"], fields["shape"]["shape"][1:-1].strip(" \t\n\r")
        begin, end = int(fields["end"]["begin"]), int(fields["end"]["end"])
        shape = tuple(map(int, sizes.split(","))) if sizes else ()
        if len(shape) > _MAX_RANK:
            self.refuse(f"tensor {name!r} has {len(shape)} axes, more than {_MAX_RANK}")
        if code not in DTYPE_NAMES and code not in PACKED:
            self.refuse(f"tensor {name!r} has dtype {code}, not one of {', '.join((*DTYPE_NAMES, *PACKED))}")
        dtype, bits = PACKED[code] if code in PACKED else (DTYPES[DTYPE_NAMES[code]], None)
        array = StoredArray(dtype, shape, self.base + begin, bits)
        if end - begin != array.nbytes:
            self.refuse(
                f"tensor {name!r}, {code} of shape {shape}, has {end - begin} bytes, not {array.nbytes}"
            )
        return array


def saved_offsets(header: Header, what: str) -> Mapping[str, tuple[int, ...]]:
    """Where the arrays of a file belong in the global tensors, from PyTorch's notes; empty without notes.

    CheckpointError, beginning with `what`, when it is malformed or lacks one of the arrays.
    """
    text = header.metadata.get(SHARDING_KEY)
    if text is None:
        return {}
    try:
        content: Any = json.loads(text)
        offsets = {name: tuple(content[name]["saved_offsets"]) for name in header.arrays}
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{what}: malformed {SHARDING_KEY}: {error!r:.200}") from error
    for name, offset in offsets.items():
        rank = len(header.arrays[name].shape)
        if len(offset) != rank or not all(type(n) is int and 0 <= n < 1 << 62 for n in offset):
            raise CheckpointError(
                f"{what}: tensor {name!r}: expected {rank} offsets of at least 0 in {SHARDING_KEY}, got {offset!r:.80}"
            )
    return offsets
