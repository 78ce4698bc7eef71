"""msgpack as flax writes it: a tree of maps. Arrays stay in the file, and are found by reading only lengths.

map  { "params": map { "kernel": ext 1 [ [3, 4], "float32", bin 48 bytes ] }, "step": 7 }
ext 1, 3    an array, a scalar of NumPy: msgpack of (shape, dtype, bytes in row-major order)
ext 2       a complex number: msgpack of (real, imaginary)
{"__msgpack_chunked_array__": true, "shape": {"0": n, ...}, "chunks": {"0": array, ...}}    above 1 GiB, in parts

EasyLM streams a tree, a pair for each leaf: its keys, and bytes with msgpack as above:

[["params", "kernel"], bin: ext 1 [...]] [["step"], bin: 7] ...
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Never

from bridge.core.formats.reading.model_files import FileKind
from bridge.core.formats.tensors.base import COPY_AGAIN, CheckpointError
from bridge.core.formats.tensors.plain import MAX_NODES

MSGPACK_FILES: Final = FileKind(
    (".msgpack",), ("flax_model.msgpack", "flax_model.msgpack.index.json", "diffusion_flax_model.msgpack")
)
_MAX_DEPTH: Final = 64
_MAX_TEXT: Final = 1 << 24
CHUNKED: Final = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
PAIR: Final = b"\x92"
"""The first byte of a stream."""

Read = Callable[[int, int], bytes]
"""Reads bytes [start, stop) of the file; fewer at its end."""


@dataclass(frozen=True)
class StoredArray:
    """An array in the file: dtype as flax names it, and where its bytes are."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int


def parse(read: Read, size: int, what: str) -> object:
    """The tree in a file of `size` bytes: dict with text as keys, list, StoredArray, complex, and plain values.

    CheckpointError, beginning with `what`, for a truncated or malformed file.
    """
    parser = _Parser(read, size, what)
    tree = parser.stream() if read(0, 1) == PAIR else parser.value(0)
    if parser.at != size:
        parser.refuse(f"its content ends at byte {parser.at} of {size}")
    return tree


class _Parser:
    def __init__(self, read: Read, size: int, what: str) -> None:
        self._read, self._stop, self._what = read, size, what
        self.at = 0
        self._left = MAX_NODES
        self._inside = False

    def refuse(self, why: str) -> Never:
        raise CheckpointError(f"{self._what}: expected msgpack as flax.serialization writes it, but {why}")

    def missing(self, count: int, what: str) -> Never:
        self.refuse(f"it is truncated or damaged: {count} {what} are missing at byte {self.at}; {COPY_AGAIN}")

    def take(self, count: int) -> bytes:
        if count > self._stop - self.at:
            self.missing(count, "bytes")
        data = self._read(self.at, self.at + count)
        if len(data) != count:
            self.refuse("the file was changed while it was read")
        self.at += count
        return data

    def number(self, layout: str) -> int:
        return int(struct.unpack(f">{layout}", self.take(struct.calcsize(layout)))[0])

    def stream(self) -> dict[str, object]:
        tree: dict[str, object] = {}
        while self.at < self._stop:
            keys = self.value(_MAX_DEPTH - 1) if self.take(1) == PAIR else None
            if not (isinstance(keys, list) and 0 < len(keys) <= _MAX_DEPTH):
                self.refuse(f"the keys of a leaf in a stream are missing before byte {self.at}")
            type_name, layout = _SIZED.get(self.take(1)[0], ("", "B"))
            count = self.number(layout) if type_name == "bytes" else 0
            if not 0 < count <= self._stop - self.at:
                self.missing(count or 1, "bytes of a leaf")
            outer, self._stop = self._stop, self.at + count
            leaf = self.value(1)
            if self.at != self._stop:
                self.refuse(f"a leaf ends at byte {self.at} of {self._stop}")
            self._stop = outer
            *above, last = map(str, keys)
            node: object = tree
            for key in above:
                node = node.setdefault(key, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict) or last in node:
                self.refuse(f"the leaf {'/'.join(map(str, keys))!r:.200} occurs twice, or in another leaf")
            node[last] = leaf
        return tree

    def value(self, depth: int) -> object:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            self.refuse(f"it has more than {MAX_NODES} values, or values nested more than {_MAX_DEPTH} deep")
        code = self.take(1)[0]
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code <= 0x8F:
            return self.map(code & 15, depth)
        if code <= 0x9F:
            return self.array(code & 15, depth)
        if code <= 0xBF:
            return self.text(code & 31)
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return struct.unpack(f">{_NUMBERS[code]}", self.take(struct.calcsize(_NUMBERS[code])))[0]
        if code in _EXTENSIONS:
            return self.extension(_EXTENSIONS[code])
        type_name, layout = _SIZED.get(code, ("", "B"))
        count = self.number(layout) if type_name else 0
        match type_name:
            case "map":
                return self.map(count, depth)
            case "array":
                return self.array(count, depth)
            case "text":
                return self.text(count)
            case "bytes":
                return self.blob(count)
            case "extension":
                return self.extension(count)
        self.refuse(f"byte {code:#04x} at {self.at - 1} does not begin a value")

    def text(self, count: int) -> str:
        try:
            return self.blob(count).decode()
        except UnicodeDecodeError:
            self.refuse(f"the text at byte {self.at - count} is not UTF-8")

    def blob(self, count: int) -> bytes:
        if count > _MAX_TEXT:
            self.refuse(f"text or bytes of length {count} are not in an array, at byte {self.at}")
        return self.take(count)

    def array(self, count: int, depth: int) -> list[object]:
        return [self.value(depth + 1) for _ in range(self._counted(count))]

    def map(self, count: int, depth: int) -> dict[str, object]:
        content: dict[str, object] = {}
        for _ in range(self._counted(count)):
            # No map as a key: keys could contain maps with such keys again, to any depth.
            key = self.value(max(depth + 1, _MAX_DEPTH))
            if not isinstance(key, str | int) or isinstance(key, bool):
                self.refuse(f"a key before byte {self.at} is neither text nor a number")
            if str(key) in content:
                self.refuse(f"the key {str(key)!r:.200} occurs twice in one map")
            content[str(key)] = self.value(depth + 1)
        return content

    def _counted(self, count: int) -> int:
        # Each value takes at least one byte: a list that cannot fit in the file is refused at once.
        if count > self._stop - self.at:
            self.missing(count, "values")
        return count

    def extension(self, count: int) -> object:
        code = self.number("b")
        if self._inside:
            self.refuse(f"an array or number has another one inside, before byte {self.at}")
        self._inside = True
        outer, self._stop = self._stop, self.at + count
        if self._stop > outer:
            self._stop = outer
            self.missing(count, "bytes")
        if code in (_ARRAY, _SCALAR):
            content: object = self.stored_array()
        elif code == _COMPLEX:
            parts = self.value(_MAX_DEPTH - 1)
            if not (
                isinstance(parts, list) and len(parts) == 2 and all(type(p) in (int, float) for p in parts)
            ):
                self.refuse("a complex number is not a pair of numbers")
            content = complex(*map(float, parts))
        else:
            self.refuse(f"extension type {code} is not one of flax's types, before byte {self.at}")
        if self.at != self._stop:
            self.refuse(f"an array or number ends at byte {self.at} of {self._stop}")
        self._stop, self._inside = outer, False
        return content

    def stored_array(self) -> StoredArray:
        if self.take(1) != b"\x93":
            self.refuse(f"the array at byte {self.at} is not one of shape, dtype and bytes")
        shape, dtype = self.value(_MAX_DEPTH - 1), self.value(_MAX_DEPTH)
        if (
            not isinstance(shape, list)
            or len(shape) > _MAX_DEPTH
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            self.refuse(f"the shape before byte {self.at} is not a list of at most {_MAX_DEPTH} numbers")
        # Early versions of flax, and msgpack without use_bin_type, write bytes for text.
        name = dtype.decode("ascii", "replace") if isinstance(dtype, bytes) else dtype
        if not isinstance(name, str):
            self.refuse(f"the dtype before byte {self.at} is not text")
        type_name, layout = _SIZED.get(self.take(1)[0], ("", "B"))
        if type_name != "bytes":
            self.refuse(f"the elements of an array are missing at byte {self.at}")
        nbytes = self.number(layout)
        if nbytes > self._stop - self.at:
            self.missing(nbytes, "bytes")
        array = StoredArray(tuple(shape), name, self.at, nbytes)
        self.at += nbytes
        return array


_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS: Final = dict(enumerate("fdBHIQbhiq", 0xCA))
_EXTENSIONS: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_SIZED: Final = {
    **{0xC4: ("bytes", "B"), 0xC5: ("bytes", "H"), 0xC6: ("bytes", "I")},
    **{0xC7: ("extension", "B"), 0xC8: ("extension", "H"), 0xC9: ("extension", "I")},
    **{0xD9: ("text", "B"), 0xDA: ("text", "H"), 0xDB: ("text", "I")},
    **{0xDC: ("array", "H"), 0xDD: ("array", "I"), 0xDE: ("map", "H"), 0xDF: ("map", "I")},
}
