"""A stack machine that interprets a pickle's opcodes: its stack holds values and inert records, and it calls nothing.

`pickle.py` runs it. An opcode that is not in the tables below is refused.

Python's own unpickler, with ``find_class`` overridden, would call nothing either, but takes any memory: C's unpickler
takes 1,035 MB for a 9-byte memo index, ``80 02 4e 72 00 00 00 04 2e``, which puts None into the memo at index 2**26
(CPython 3.11). That is why this machine is written by hand.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Never, TypeGuard

from bridge.core.formats.dcp.pickle_records import (
    GETATTR,
    ORDERED_DICT,
    Call,
    Instance,
    Name,
    Persistent,
    Vocabulary,
)

_MAX_NAME = 200


class Refused(Exception):
    """The pickle is refused; the message says why."""


def refuse(why: str) -> Never:
    raise Refused(why)


class Machine:
    """The state of an interpretation; each method is an opcode, or a part of one."""

    __slots__ = ("data", "marks", "memo", "position", "stack", "vocabulary")

    def __init__(self, data: bytes, vocabulary: Vocabulary, memo: dict[int, object]) -> None:
        self.data = data
        self.vocabulary = vocabulary
        self.position = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo = memo

    def raw(self, size: int) -> bytes:
        start = self.position
        self.position = start + size
        if self.position > len(self.data):
            refuse("truncated")
        return self.data[start : self.position]

    def unsigned(self, size: int) -> int:
        # Like `raw`, without the call: most of a pickle consists of such numbers.
        start = self.position
        self.position = stop = start + size
        if stop > len(self.data):
            refuse("truncated")
        return int.from_bytes(self.data[start:stop], "little")

    def cut(self, count: int) -> list[object]:
        if len(self.stack) < count:
            refuse("an operation on an empty stack")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def cut_to_mark(self) -> list[object]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def name(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            refuse("a name that is not text")
        # Lengths first: joining a long text again and again costs quadratic time.
        if len(module) + len(name) > _MAX_NAME:
            refuse("a name too long to be one")
        dotted = f"{module}.{name}"
        if not self.vocabulary.knows(dotted):
            refuse(f"it names {dotted!r}, which is not expected here (loading it might have run code)")
        self.stack.append(Name(dotted))

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if self._is_foreign(target):
            _add(target, items)
            return
        if not isinstance(target, list):
            refuse("items for something that is not a list")
        target.extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            if self._is_foreign(target):
                _add(target, items)
                return
            refuse("keys for something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Beyond 60 bits int hashes can be made to collide, and a dict of them takes quadratic time.
            if not (isinstance(key, _KEYS) or key is None or (isinstance(key, int) and abs(key) < 1 << 60)):
                refuse("a dict key that is not str, int, bool or None")
            if key in target:
                refuse("a dict key given twice")
            target[key] = value

    def call(self) -> None:
        name, args = self.cut(2)
        if isinstance(name, Name) and name.dotted == GETATTR:
            self.member(args)
            return
        allowed = self.vocabulary.foreign or (isinstance(name, Name) and name.dotted in self.vocabulary.calls)
        if not (isinstance(name, Name) and allowed and isinstance(args, tuple)):
            refuse("a call of something that is not a known function")
        if name.dotted == _SIZE and len(args) == 1 and isinstance(args[0], tuple) and self.vocabulary.foreign:
            self.stack.append(args[0])
            return
        empty = name.dotted == DEFAULT_DICT or (name.dotted == ORDERED_DICT and not args)
        self.stack.append({} if empty else Call(name.dotted, args))

    def member(self, args: object) -> None:
        match args:
            case (Name(dotted=dotted), str(member)) if dotted in self.vocabulary.enumerations:
                self.stack.append(Call(dotted, (member,)))
            case _:
                refuse("getattr of something that is not a member of a known enumeration")

    def new_object(self) -> None:
        name, args = self.cut(2)
        known = self.vocabulary.foreign and isinstance(args, tuple)
        if not (
            isinstance(name, Name) and (known or (name.dotted in self.vocabulary.instances and args == ()))
        ):
            refuse("an instance of something that is not a known class")
        self.stack.append(Instance(name.dotted))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if self.vocabulary.foreign and isinstance(target, dict):
            return  # attributes of an OrderedDict, such as a state_dict's versions
        if not (isinstance(target, Instance) or self._is_foreign(target)) or target.state is not None:
            refuse("a state for something that takes none")
        object.__setattr__(target, "state", state)

    def _is_foreign(self, target: object) -> TypeGuard[Call | Instance]:
        return self.vocabulary.foreign and isinstance(target, Call | Instance)

    def new_object_with_keys(self) -> None:
        self.cut(1)
        self.new_object()

    def frozen_set(self) -> None:
        self.stack.append(Call("builtins.frozenset", (self.cut_to_mark(),)))

    def global_name(self) -> None:
        lines = self.data[self.position : self.position + 2 * _MAX_NAME].split(b"\n", 2)
        if len(lines) < 3:
            refuse("a name too long to be one")
        self.position += len(lines[0]) + len(lines[1]) + 2
        self.name(lines[0].decode("ascii"), lines[1].decode("ascii"))

    def persistent(self) -> None:
        if not self.vocabulary.persistent:
            refuse("a reference to a stored tensor where only plain values are expected")
        self.stack.append(Persistent(self.stack.pop()))


_KEYS: Final = (str, Instance)
_SIZE: Final = "torch.Size"
DEFAULT_DICT: Final = "collections.defaultdict"


def _push(value: object) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value)


def _unsigned(size: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.unsigned(size))


def _text(size: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.raw(m.unsigned(size)).decode())


def _tuple(size: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(tuple(m.cut(size)))


def _get(size: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.memo[m.unsigned(size)])


def _put(size: int) -> Callable[[Machine], None]:
    return lambda m: m.memo.__setitem__(m.unsigned(size), m.stack[-1])


OPERATIONS: dict[int, Callable[[Machine], object]] = {
    0x4E: _push(None),  # NONE
    0x88: _push(True),  # NEWTRUE
    0x89: _push(False),  # NEWFALSE
    0x29: _push(()),  # EMPTY_TUPLE
    0x5D: lambda m: m.stack.append([]),  # EMPTY_LIST
    0x7D: lambda m: m.stack.append({}),  # EMPTY_DICT
    0x4B: _unsigned(1),  # BININT1
    0x4D: _unsigned(2),  # BININT2
    0x4A: lambda m: m.stack.append(int.from_bytes(m.raw(4), "little", signed=True)),  # BININT
    0x8A: lambda m: m.stack.append(int.from_bytes(m.raw(m.unsigned(1)), "little", signed=True)),  # LONG1
    0x47: lambda m: m.stack.append(struct.unpack(">d", m.raw(8))[0]),  # BINFLOAT
    0x8C: _text(1),  # SHORT_BINUNICODE
    0x58: _text(4),  # BINUNICODE
    0x85: _tuple(1),  # TUPLE1
    0x86: _tuple(2),  # TUPLE2
    0x87: _tuple(3),  # TUPLE3
    0x74: lambda m: m.stack.append(tuple(m.cut_to_mark())),  # TUPLE
    0x28: lambda m: m.marks.append(len(m.stack)),  # MARK
    0x61: lambda m: m.append(m.cut(1)),  # APPEND
    0x65: lambda m: m.append(m.cut_to_mark()),  # APPENDS
    0x73: lambda m: m.set_items(m.cut(2)),  # SETITEM
    0x75: lambda m: m.set_items(m.cut_to_mark()),  # SETITEMS
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),  # MEMOIZE
    0x71: _put(1),  # BINPUT
    0x72: _put(4),  # LONG_BINPUT
    0x68: _get(1),  # BINGET
    0x6A: _get(4),  # LONG_BINGET
    0x63: Machine.global_name,  # GLOBAL
    0x93: lambda m: m.name(*m.cut(2)),  # STACK_GLOBAL
    0x52: Machine.call,  # REDUCE
    0x81: Machine.new_object,  # NEWOBJ
    0x62: Machine.build,  # BUILD
    0x51: Machine.persistent,  # BINPERSID
    0x95: lambda m: m.raw(8),  # FRAME: only a hint for buffering
}


def _bytes(size: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.raw(m.unsigned(size)))


# Also the opcodes that protocols 4 and 5 use for bytes and sets, and for long texts.
FOREIGN_OPERATIONS: dict[int, Callable[[Machine], object]] = {
    **OPERATIONS,
    0x42: _bytes(4),  # BINBYTES
    0x43: _bytes(1),  # SHORT_BINBYTES
    0x8E: _bytes(8),  # BINBYTES8
    0x96: _bytes(8),  # BYTEARRAY8
    0x8D: _text(8),  # BINUNICODE8
    0x8F: lambda m: m.stack.append(Call("builtins.set", ())),  # EMPTY_SET
    0x90: lambda m: m.append(m.cut_to_mark()),  # ADDITEMS
    0x91: Machine.frozen_set,  # FROZENSET
    0x92: Machine.new_object_with_keys,  # NEWOBJ_EX
}

MAKING: Final = frozenset(
    {0x5D, 0x7D, 0x85, 0x86, 0x87, 0x74, 0x94, 0x71, 0x72, 0x52, 0x81, 0x51, 0x8F, 0x91, 0x92}
)  # containers, records and memo entries


def _add(target: Call | Instance, items: list[object]) -> None:
    if target.items is None:
        target.items = []
    target.items += items
