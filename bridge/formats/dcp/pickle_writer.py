"""Writes the pickles of a DCP checkpoint from inert descriptions: PyTorch's classes are named, not imported."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.formats.dcp.pickle_records import Call, Instance, Name, Persistent


@dataclass(eq=False, slots=True)
class Repeated:
    """A description that occurs in many places, such as the shape of thousands of tensors; it is not changed."""

    value: object
    times: int = 0
    written: bytes = b""


def write_pickle(value: object, protocol: int) -> bytes:
    """The inverse of `read_pickle`: a pickle (protocol 2 or 4) that Python's unpickler turns into the real objects.

    Takes what `read_pickle` returns, without cycles, and `Repeated` parts of it, in one pickle only.
    """
    emitter = _Emitter(protocol)
    emitter.emit(value)
    return bytes([0x80, protocol]) + b"".join(emitter.parts) + b"."


class _Emitter:
    def __init__(self, protocol: int) -> None:
        self.protocol = protocol
        self.parts: list[bytes] = []
        self.memo: dict[str | Name, int] = {}

    def emit(self, value: object) -> None:
        put = self.parts.append
        # First what most of a checkpoint's metadata is made of.
        if isinstance(value, str | Name):
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
            # As protocol 2 has it, which lacks bytes; torch.load(weights_only=True) knows it.
            self.emit(Call("_codecs.encode", (value.decode("latin1"), "latin1")))
        elif isinstance(value, tuple):
            put(b"(")
            self.emit_all(value)
            put(b"t")
        elif isinstance(value, list):
            put(b"](")
            self.emit_all(value)
            put(b"e")
        elif isinstance(value, dict):
            put(b"}(")
            for key, item in value.items():
                self.emit(key)
                self.emit(item)
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
        elif isinstance(value, Repeated):
            self.emit_repeated(value)
        else:
            raise TypeError(f"expected a plain value or a description, got {type(value).__name__}")

    def emit_repeated(self, value: Repeated) -> None:
        """The first time its names are written, from the second time on all is the same bytes."""
        if value.written:
            self.parts.append(value.written)
            return
        start = len(self.parts)
        self.emit(value.value)
        value.times += 1
        if value.times > 1:
            value.written = b"".join(self.parts[start:])

    def emit_all(self, values: Sequence[object]) -> None:
        for value in values:
            self.emit(value)

    def emit_shared(self, value: str | Name) -> None:
        """Text and names repeat for every chunk: written once, then referred to."""
        index = self.memo.get(value)
        if index is not None:
            self.parts.append(b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index))
            return
        if isinstance(value, str):
            text = value.encode()
            short = self.protocol >= 4 and len(text) < 256
            self.parts.append(
                (b"\x8c" + bytes([len(text)]) if short else b"X" + struct.pack("<I", len(text))) + text
            )
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


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
