"""Writes the pickles of a DCP checkpoint from inert descriptions: PyTorch's classes are named, not imported."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bridge.core.formats.dcp.pickle_records import Call, Instance, Name, Persistent

_INDEX: Final = struct.Struct("<I").pack
_INT: Final = struct.Struct("<i").pack


@dataclass(eq=False, slots=True)
class Repeated:
    """A description that occurs in many places, such as a shape that thousands of tensors have; it must not change."""

    value: object
    times: int = 0
    written: bytes = b""


class Hole:
    """The place of a value in a `Pattern`."""


HOLE: Final = Hole()


@dataclass(eq=False, slots=True)
class Pattern:
    """A description with a `HOLE` wherever its many instances differ; it must not change."""

    value: object
    times: int = 0
    written: tuple[bytes, ...] = ()


@dataclass(eq=False, slots=True)
class Filled:
    """A pattern with these values in its holes, in the order in which they are written."""

    pattern: Pattern
    values: tuple[object, ...]


def write_pickle(value: object, protocol: int) -> bytes:
    """The inverse of `read_pickle`: a pickle (protocol 2 or 4) that Python's unpickler turns into the real objects.

    Takes what `read_pickle` returns, without cycles, and `Repeated` and `Filled` parts of it, in one pickle only.
    """
    emitter = _Emitter(protocol)
    emitter.emit(value)
    return bytes([0x80, protocol]) + b"".join(emitter.parts) + b"."


class _Emitter:
    def __init__(self, protocol: int) -> None:
        self.protocol = protocol
        self.parts: list[bytes] = []
        self.memo: dict[str | Name, int] = {}
        self.fillers: Iterator[object] = iter(())
        self.filled: list[tuple[int, int]] = []
        # Most of a checkpoint's metadata consists of these: `emit` would test for many other types first.
        self.usual: dict[type, Callable[[Any], None]] = {
            str: self.emit_shared,
            tuple: self.emit_tuple,
            Repeated: self.emit_repeated,
            Filled: self.emit_filled,
        }

    def emit(self, value: object) -> None:
        put = self.parts.append
        if (emit_usual := self.usual.get(type(value))) is not None:
            emit_usual(value)
        elif isinstance(value, str | Name):
            self.emit_shared(value)
        elif value is None:
            put(b"N")
        elif isinstance(value, bool):
            put(b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            put(_integer(value))
        elif isinstance(value, float):
            put(b"G" + struct.pack(">d", value))
        elif isinstance(value, bytes):
            # As in protocol 2, which lacks bytes; torch.load(weights_only=True) knows this form.
            self.emit(Call("_codecs.encode", (value.decode("latin1"), "latin1")))
        elif isinstance(value, tuple):
            self.emit_tuple(value)
        elif isinstance(value, list):
            put(b"](")
            self.emit_all(value)
            put(b"e")
        elif isinstance(value, dict):
            put(b"}(")
            usual, emit = self.usual.get, self.emit
            for key, item in value.items():
                usual(type(key), emit)(key)
                usual(type(item), emit)(item)
            put(b"u")
        elif isinstance(value, Call):
            self.emit(Name(value.name))
            self.emit(value.args)
            put(b"R")
        elif isinstance(value, Instance):
            self.emit(Name(value.name))
            put(b")\x81")
            self.emit(value.state)
            put(b"b")
        elif isinstance(value, Persistent):
            self.emit(value.id)
            put(b"Q")
        elif isinstance(value, Hole):
            start = len(self.parts)
            self.emit(next(self.fillers))
            self.filled.append((start, len(self.parts)))
        else:
            raise TypeError(f"expected a plain value or a description, got {type(value).__name__}")

    def emit_repeated(self, value: Repeated) -> None:
        """Write its names the first time; from the second time on, write the same bytes."""
        if value.written:
            self.parts.append(value.written)
            return
        start = len(self.parts)
        self.emit(value.value)
        value.times += 1
        if value.times > 1:
            value.written = b"".join(self.parts[start:])

    def emit_filled(self, value: Filled) -> None:
        """Like `emit_repeated`, with values between bytes that are the same from the second time on.

        This takes a third of the time that writing the description of a chunk's entry takes.
        """
        pattern, values = value.pattern, value.values
        if not pattern.written:
            start, self.fillers, self.filled = len(self.parts), iter(values), []
            self.emit(pattern.value)
            pattern.times += 1
            if pattern.times > 1:
                bounds = zip(
                    (start, *(stop for _, stop in self.filled)),
                    (*(at for at, _ in self.filled), None),
                    strict=True,
                )
                pattern.written = tuple([b"".join(self.parts[stop:at]) for stop, at in bounds])
            return
        put, memo = self.parts.append, self.memo
        for before, filler in zip(pattern.written, values, strict=False):
            put(before)
            if isinstance(filler, str) and (index := memo.get(filler)) is not None:
                put(_reference(index))
            elif type(filler) is int:
                put(_integer(filler))
            elif isinstance(filler, Repeated) and filler.written:
                put(filler.written)
            else:
                self.emit(filler)
        put(pattern.written[-1])

    def emit_tuple(self, value: tuple[object, ...]) -> None:
        self.parts.append(b"(")
        self.emit_all(value)
        self.parts.append(b"t")

    def emit_all(self, values: Sequence[object]) -> None:
        usual, emit = self.usual.get, self.emit
        for value in values:
            usual(type(value), emit)(value)

    def emit_shared(self, value: str | Name) -> None:
        """Text and names repeat for every chunk: they are written once, then referenced."""
        index = self.memo.get(value)
        if index is not None:
            self.parts.append(_reference(index))
            return
        if isinstance(value, str):
            text = value.encode()
            short = self.protocol >= 4 and len(text) < 256
            self.parts.append((b"\x8c%c" % len(text) if short else b"X" + _INDEX(len(text))) + text)
        elif self.protocol >= 4:
            self.emit_all(value.dotted.rsplit(".", 1))
            self.parts.append(b"\x93")
        else:
            self.parts.append("c{}\n{}\n".format(*value.dotted.rsplit(".", 1)).encode())
        index = self.memo[value] = len(self.memo)
        if self.protocol >= 4:
            self.parts.append(b"\x94")
        else:
            self.parts.append(b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index))


def _reference(index: int) -> bytes:
    return b"h" + bytes((index,)) if index < 256 else b"j" + _INDEX(index)


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _INT(value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
