"""A closed pickle interpreter: plain Python values and inert descriptions, nothing imported or called.

DCP writes pickles in three places: `.metadata`, the `data.pkl` that describes each stored tensor, and the `data.pkl`
of each value that is not a tensor. Python's own unpickler runs whatever such a file names. This one knows about 40
opcodes; classes and functions become Name, Call, Instance and Persistent records whose names must be on a list.

A small file can describe a large tree by referring to one tuple many times, so that hashing, comparing or printing it
never ends. Hence only str, small int, bool, None and Instance are dict keys, error messages print no values, and
`plain_value` counts what is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Never, TypeGuard

from bridge.formats.base import CheckpointError
from bridge.formats.dcp.pickle_records import (
    GETATTR,
    ORDERED_DICT,
    Call,
    Instance,
    Name,
    Persistent,
    Vocabulary,
)
from bridge.formats.garbage import collection_paused
from bridge.formats.plain import MAX_NODES

_MAX_NAME = 200


class _Bad(Exception):
    """The pickle is refused; the message says why."""


def _refuse(why: str) -> Never:
    raise _Bad(why)


def read_pickle(data: bytes, vocabulary: Vocabulary, what: str) -> object:
    """Interpret one pickle of protocol 2, 4 or 5.

    Returns None, bool, int, float, str, list, tuple, dict, Name, Call, Instance or Persistent, nested (possibly sharing
    or containing itself: copy with `plain_from_pickle`, or look at fields one by one). CheckpointError, beginning with
    `what`, for anything else.
    """
    if len(data) > vocabulary.max_bytes:
        raise CheckpointError(f"{what}: expected at most {vocabulary.max_bytes} bytes, got {len(data)}")
    try:
        with collection_paused():
            return _Interpreter(data, vocabulary).run()
    except _Bad as error:
        raise CheckpointError(f"{what}: refused: {error}") from None
    except (IndexError, KeyError, ValueError, struct.error):
        raise CheckpointError(f"{what}: malformed or truncated pickle of {len(data)} bytes") from None


class _Interpreter:
    __slots__ = ("data", "marks", "memo", "position", "stack", "vocabulary")

    def __init__(self, data: bytes, vocabulary: Vocabulary) -> None:
        self.data = data
        self.vocabulary = vocabulary
        self.position = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        data = self.data
        if data[:2] not in (b"\x80\x02", b"\x80\x04", b"\x80\x05"):
            _refuse("expected a pickle of protocol 2, 4 or 5")
        self.position = 2
        # One byte can make a record of a hundred. Of what DCP writes at most every fifth byte does.
        budget = MAX_NODES + len(data) // 4
        # None of the files that could not hold so many at all is counted, which costs a tenth of the time.
        making = _MAKING if sum(data.count(code) for code in _MAKING) > budget else frozenset()
        known = _OPERATIONS | _BINARY if self.vocabulary.foreign else _OPERATIONS
        stack, memo = self.stack, self.memo
        while (code := data[self.position]) != _STOP:
            self.position += 1
            # Two thirds of what DCP writes are these, which are done here without a call.
            if not making:
                if code == _BINGET:
                    stack.append(memo[data[self.position]])
                    self.position += 1
                    continue
                if code == _LONG_BINGET:
                    stack.append(memo[int.from_bytes(data[self.position : self.position + 4], "little")])
                    self.position += 4
                    continue
                if code == _BININT1:
                    stack.append(data[self.position])
                    self.position += 1
                    continue
                if code == _MEMOIZE:
                    memo[len(memo)] = stack[-1]
                    continue
                if code == _BINPUT:
                    memo[data[self.position]] = stack[-1]
                    self.position += 1
                    continue
                if code == _MARK:
                    self.marks.append(len(stack))
                    continue
                if code == _TUPLE:
                    start = self.marks.pop()
                    items = tuple(stack[start:])
                    del stack[start:]
                    stack.append(items)
                    continue
            operation = known.get(code)
            if operation is None:
                _refuse(f"opcode {code:#04x} at byte {self.position - 1} is not one that a checkpoint has")
            if code in making:
                budget -= 1
                if budget < 0:
                    _refuse(
                        f"more than {MAX_NODES + len(data) // 4} containers and memo entries in {len(data)} bytes"
                    )
            operation(self)
        if self.position != len(data) - 1 or len(self.stack) != 1 or self.marks:
            _refuse("expected one value and nothing after it")
        return self.stack[0]

    def raw(self, size: int) -> bytes:
        start = self.position
        self.position = start + size
        if self.position > len(self.data):
            _refuse("truncated")
        return self.data[start : self.position]

    def unsigned(self, size: int) -> int:
        # As `raw`, without the call: most of a pickle is such numbers.
        start = self.position
        self.position = stop = start + size
        if stop > len(self.data):
            _refuse("truncated")
        return int.from_bytes(self.data[start:stop], "little")

    def cut(self, count: int) -> list[object]:
        if len(self.stack) < count:
            _refuse("an operation on an empty stack")
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
            _refuse("a name that is not text")
        # Lengths first: joining a long text again and again costs quadratic time.
        if len(module) + len(name) > _MAX_NAME:
            _refuse("a name too long to be one")
        dotted = f"{module}.{name}"
        if not self.vocabulary.knows(dotted):
            _refuse(f"it names {dotted!r}, which is not expected here (loading it might have run code)")
        self.stack.append(Name(dotted))

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if self._is_foreign(target):
            return
        if not isinstance(target, list):
            _refuse("items for something that is not a list")
        target.extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if self._is_foreign(target):
            return
        if not isinstance(target, dict):
            _refuse("keys for something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Beyond 60 bits int hashes can be made to collide, and a dict of them takes quadratic time.
            if not (
                key is None
                or isinstance(key, str | Instance)
                or (isinstance(key, int) and abs(key) < 1 << 60)
            ):
                _refuse("a dict key that is not str, int, bool or None")
            if key in target:
                _refuse("a dict key given twice")
            target[key] = value

    def call(self) -> None:
        name, args = self.cut(2)
        if isinstance(name, Name) and name.dotted == GETATTR:
            self.member(args)
            return
        allowed = self.vocabulary.foreign or (isinstance(name, Name) and name.dotted in self.vocabulary.calls)
        if not (isinstance(name, Name) and allowed and isinstance(args, tuple)):
            _refuse("a call of something that is not a known function")
        if name.dotted == _SIZE and len(args) == 1 and isinstance(args[0], tuple) and self.vocabulary.foreign:
            self.stack.append(args[0])
            return
        empty = name.dotted == _DEFAULT_DICT or (name.dotted == ORDERED_DICT and not args)
        self.stack.append({} if empty else Call(name.dotted, args))

    def member(self, args: object) -> None:
        match args:
            case (Name(dotted=dotted), str(member)) if dotted in self.vocabulary.enumerations:
                self.stack.append(Call(dotted, (member,)))
            case _:
                _refuse("getattr of something that is not a member of a known enumeration")

    def new_object(self) -> None:
        name, args = self.cut(2)
        known = self.vocabulary.foreign and isinstance(args, tuple)
        if not (
            isinstance(name, Name) and (known or (name.dotted in self.vocabulary.instances and args == ()))
        ):
            _refuse("an instance of something that is not a known class")
        self.stack.append(Instance(name.dotted))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if self.vocabulary.foreign and isinstance(target, dict):
            return  # attributes of an OrderedDict, such as a state_dict's versions
        if not (isinstance(target, Instance) or self._is_foreign(target)) or target.state is not None:
            _refuse("a state for something that takes none")
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
            _refuse("a name too long to be one")
        self.position += len(lines[0]) + len(lines[1]) + 2
        self.name(lines[0].decode("ascii"), lines[1].decode("ascii"))

    def persistent(self) -> None:
        if not self.vocabulary.persistent:
            _refuse("a reference to a stored tensor where only plain values are expected")
        self.stack.append(Persistent(self.stack.pop()))


_STOP: Final = 0x2E
_BINGET, _LONG_BINGET, _BININT1, _MEMOIZE, _BINPUT = 0x68, 0x6A, 0x4B, 0x94, 0x71
_MARK, _TUPLE = 0x28, 0x74
_SIZE: Final = "torch.Size"
_DEFAULT_DICT: Final = "collections.defaultdict"


def _push(value: object) -> Callable[[_Interpreter], None]:
    return lambda m: m.stack.append(value)


def _unsigned(size: int) -> Callable[[_Interpreter], None]:
    return lambda m: m.stack.append(m.unsigned(size))


def _text(size: int) -> Callable[[_Interpreter], None]:
    return lambda m: m.stack.append(m.raw(m.unsigned(size)).decode())


def _tuple(size: int) -> Callable[[_Interpreter], None]:
    return lambda m: m.stack.append(tuple(m.cut(size)))


def _get(size: int) -> Callable[[_Interpreter], None]:
    return lambda m: m.stack.append(m.memo[m.unsigned(size)])


def _put(size: int) -> Callable[[_Interpreter], None]:
    return lambda m: m.memo.__setitem__(m.unsigned(size), m.stack[-1])


_OPERATIONS: dict[int, Callable[[_Interpreter], object]] = {
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
    0x63: _Interpreter.global_name,  # GLOBAL
    0x93: lambda m: m.name(*m.cut(2)),  # STACK_GLOBAL
    0x52: _Interpreter.call,  # REDUCE
    0x81: _Interpreter.new_object,  # NEWOBJ
    0x62: _Interpreter.build,  # BUILD
    0x51: _Interpreter.persistent,  # BINPERSID
    0x95: lambda m: m.raw(8),  # FRAME: only a hint for buffering
}


def _bytes(size: int) -> Callable[[_Interpreter], None]:
    return lambda m: m.stack.append(m.raw(m.unsigned(size)))


# What protocols 4 and 5 make of bytes and sets, and of long texts.
_BINARY: dict[int, Callable[[_Interpreter], object]] = {
    0x42: _bytes(4),  # BINBYTES
    0x43: _bytes(1),  # SHORT_BINBYTES
    0x8E: _bytes(8),  # BINBYTES8
    0x96: _bytes(8),  # BYTEARRAY8
    0x8D: _text(8),  # BINUNICODE8
    0x8F: lambda m: m.stack.append(Call("builtins.set", ())),  # EMPTY_SET
    0x90: lambda m: m.append(m.cut_to_mark()),  # ADDITEMS
    0x91: _Interpreter.frozen_set,  # FROZENSET
    0x92: _Interpreter.new_object_with_keys,  # NEWOBJ_EX
}

_MAKING: Final = frozenset(
    {0x5D, 0x7D, 0x85, 0x86, 0x87, 0x74, 0x94, 0x71, 0x72, 0x52, 0x81, 0x51, 0x8F, 0x91, 0x92}
)  # containers, records and memo entries
