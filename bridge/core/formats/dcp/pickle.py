"""A closed pickle interpreter: it yields plain Python values and inert descriptions, and imports and calls nothing.

DCP writes pickles in three places: `.metadata`, the `data.pkl` that describes each stored tensor, and the `data.pkl`
of each value that is not a tensor. Python's own unpickler runs whatever such a file names. This interpreter knows about
40 opcodes; classes and functions become Name, Call, Instance and Persistent records whose names must be on a list.

A small file can describe a large tree by referring to one tuple many times, so that hashing, comparing or printing it
never ends. Therefore only str, small int, bool, None and Instance may be dict keys, error messages print no values, and
`plain_value` counts the copies it makes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import cached_property, partial
from typing import Final, NamedTuple

import numpy as np

from bridge.core.formats.dcp.pickle_machine import (
    DEFAULT_DICT,
    FOREIGN_OPERATIONS,
    MAKING,
    OPERATIONS,
    Machine,
    Refused,
    refuse,
)
from bridge.core.formats.dcp.pickle_records import GETATTR, ORDERED_DICT, Call, Instance, Name, Vocabulary
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.plain import MAX_NODES
from bridge.core.long_calls import collection_paused

_LONGEST: Final = 1024
_MOST_KINDS: Final = 4096
_BLOCK: Final = 64 << 10
_TEXT_OP, _MEMOIZE_OP, _GET_OP, _LONG_GET_OP = b"\x8c", b"\x94", b"h", b"j"
_GETS: Final = _GET_OP + _LONG_GET_OP


def _entry_pattern() -> re.Pattern[bytes]:
    memo = rb"\x94?"
    get = rb"(?:h.|j.{4})"
    new = get + rb"\)\x81" + memo
    scalar = rb"(?:" + get + rb"|K.|M..|J.{4}|[N\x88\x89])"
    plain = (
        rb"(?:\(" + scalar + rb"*t|" + scalar + rb"\x85|" + scalar + rb"{2}\x86|" + scalar + rb"{3}\x87|\))"
    )
    argument = rb"(?:" + plain + memo + rb"|" + scalar + rb")"
    arguments = rb"(?:\(" + argument + rb"*t|" + argument + rb"\x85)" + memo
    call = get + arguments + rb"R" + memo
    value = rb"(?:" + call + rb"|" + scalar + rb")"
    state = rb"\}" + memo + rb"\("
    chunk = new + state + rb"(?:" + get + value + rb")*ub"
    chunks = rb"\]" + memo + rb"(?:\((?:" + chunk + rb")*e|" + chunk + rb"a)?"
    # From torch 2.15 on, the properties include strides: a tuple.
    properties = new + rb"\((?:" + call + rb"|" + argument + rb")*t" + memo + rb"b"
    field = get + rb"(?:" + chunks + rb"|" + properties + rb"|" + value + rb")"
    return re.compile(new + state + rb"(?:" + field + rb")*ub", re.DOTALL)


_ENTRY: Final = _entry_pattern()


class _Entry(NamedTuple):
    """All bytes of an entry, the number of memo entries that they create, and the instance."""

    content: bytes
    remembered: int
    made: Instance


class RepeatedEntries:
    """Entries seen so far in a pickle, by their bytes up to the next text; repeated entries get the first one's value.

    The entries of two tensors with one shape usually differ only in their names, and make up two thirds of the opcodes
    in `.metadata`. The bytes of such an entry mean the same value wherever they occur, because

    - `_ENTRY` matches only code that makes one new instance from constants and earlier memo entries: such code touches
      nothing lower on the stack, names nothing, and changes no earlier value;
    - memo entries stay: from the first PUT on, which could replace an entry, `_run` does not use this class;
    - memo entries that an entry itself creates (PyTorch's pickles memoize everything) are never looked up in the file.
      So nothing can reach the parts of an instance that has its state, and entries may share these parts.

    follow: interprets bytes [start, end) of the pickle, memo entries included, and gives the value.
    """

    def __init__(self, data: bytes, memo: dict[int, object], follow: Callable[[int, int], object]) -> None:
        self._data = data
        self._memo = memo
        self._follow = follow
        self._known: dict[bytes, _Entry] = {}

    def find(self, position: int) -> tuple[object, int] | None:
        """The value of the entry at this position, after its name, and its end; None if it must be interpreted."""
        data = self._data
        if data[position] not in _GETS:
            return None
        stop = data.find(_TEXT_OP, position, position + _LONGEST)
        if stop < 0:
            return None
        entry = self._known.get(data[position:stop])
        if entry is None:
            return self._first(position, stop)
        content, remembered, made = entry
        if not data.startswith(content, position):
            return None
        if remembered:
            memo = self._memo
            first = len(memo)
            if self._looked_up.find(1, first, first + remembered) >= 0:
                return None
            memo.update(dict.fromkeys(range(first, first + remembered)))
        return Instance(made.name, made.state), position + len(content)

    def _first(self, position: int, stop: int) -> tuple[object, int] | None:
        if len(self._known) >= _MOST_KINDS:
            return None
        match = _ENTRY.match(self._data, position, position + _LONGEST)
        if match is None:
            return None
        first = len(self._memo)
        made = self._follow(position, match.end())
        remembered = len(self._memo) - first
        if isinstance(made, Instance) and (
            not remembered or self._looked_up.find(1, first, first + remembered) < 0
        ):
            self._known[self._data[position:stop]] = _Entry(match[0], remembered, made)
        return made, match.end()

    @cached_property
    def _looked_up(self) -> bytes:
        """For each memo entry, 1 if it is looked up somewhere, or if other bytes look like such a look-up."""
        looked_up = np.zeros(self._data.count(_MEMOIZE_OP) + 1, np.bool_)
        data = np.frombuffer(self._data, np.uint8)
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK + 4]
            for get, size in ((_GET_OP, 1), (_LONG_GET_OP, 4)):
                at = np.flatnonzero(block[:_BLOCK] == ord(get))
                at = at[at + size < len(block)]
                numbers = block[at[:, None] + np.arange(1, size + 1)].view(f"<u{size}").ravel()
                looked_up[numbers[numbers < len(looked_up)]] = True
        return looked_up.tobytes()


_STOP: Final = 0x2E
_GET, _LONG_GET, _PUT, _LONG_PUT, _MEMOIZE = 0x68, 0x6A, 0x71, 0x72, 0x94
_INT1, _INT2, _INT4, _SHORT_TEXT = 0x4B, 0x4D, 0x4A, 0x8C
_MARK, _TUPLE, _EMPTY_TUPLE, _TUPLE1, _TUPLE2, _EMPTY_DICT = 0x28, 0x74, 0x29, 0x85, 0x86, 0x7D
_SET_ITEMS, _CALL, _NEW, _BUILD = 0x75, 0x52, 0x81, 0x62
_UNSIGNED2: Final = struct.Struct("<H").unpack_from
_UNSIGNED4: Final = struct.Struct("<I").unpack_from
_SIGNED4: Final = struct.Struct("<i").unpack_from
_MADE_OTHERWISE: Final = {GETATTR, ORDERED_DICT, DEFAULT_DICT}
"""Calls that may become something other than a Call."""


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
            return _value(data, vocabulary)
    except Refused as error:
        raise CheckpointError(f"{what}: refused: {error}") from None
    except (IndexError, KeyError, ValueError, struct.error):
        raise CheckpointError(f"{what}: malformed or truncated pickle of {len(data)} bytes") from None


def _value(data: bytes, vocabulary: Vocabulary) -> object:
    if data[:2] not in (b"\x80\x02", b"\x80\x04", b"\x80\x05"):
        refuse("expected a pickle of protocol 2, 4 or 5")
    machine = Machine(data, vocabulary, {})
    # One byte can create a record of a hundred bytes. In DCP's own pickles at most every fifth byte creates a record.
    budget = MAX_NODES + len(data) // 4
    # Files too small to exceed the budget are not counted.
    if len(data) - len(data.translate(None, bytes(MAKING))) > budget:
        _run_counted(machine, budget)
    else:
        repeated = RepeatedEntries(data, machine.memo, partial(_part, machine))
        machine.position = _run(machine, 2, -1, repeated)
    if machine.position != len(data) - 1 or len(machine.stack) != 1 or machine.marks:
        refuse("expected one value and nothing after it")
    return machine.stack[0]


def _run_counted(machine: Machine, budget: int) -> None:
    """Run to STOP, and create at most `budget` containers, records and memo entries."""
    data = machine.data
    known = FOREIGN_OPERATIONS if machine.vocabulary.foreign else OPERATIONS
    machine.position = 2
    left = budget
    while (code := data[machine.position]) != _STOP:
        machine.position += 1
        operation = known.get(code)
        if operation is None:
            refuse(f"opcode {code:#04x} at byte {machine.position - 1} is not one that a checkpoint has")
        if code in MAKING:
            left -= 1
            if left < 0:
                refuse(f"more than {budget} containers and memo entries in {len(data)} bytes")
        operation(machine)


def _part(machine: Machine, position: int, end: int) -> object:
    part = Machine(machine.data, machine.vocabulary, machine.memo)
    _run(part, position, end, None)
    return part.stack[0]


def _run(machine: Machine, position: int, end: int, repeated: RepeatedEntries | None) -> int:
    """Run from `position` to STOP, or up to `end`; return the final position. Like `_run_counted`, without a budget.

    Nearly all opcodes that DCP writes are handled inline here, the most frequent first: a checkpoint of 20,000 tensors
    has two million opcodes, which take a third of the time.
    """
    data, stack, marks, memo = machine.data, machine.stack, machine.marks, machine.memo
    vocabulary = machine.vocabulary
    known = FOREIGN_OPERATIONS if vocabulary.foreign else OPERATIONS
    instances = vocabulary.instances
    calls = frozenset[str]() if vocabulary.foreign else vocabulary.calls - _MADE_OTHERWISE
    push, size = stack.append, len(data)
    while position != end:
        code = data[position]
        position += 1
        if code == _LONG_GET:
            push(memo[_UNSIGNED4(data, position)[0]])
            position += 4
        elif code == _GET:
            push(memo[data[position]])
            position += 1
        elif code == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == _MARK:
            marks.append(len(stack))
        elif code == _INT1:
            push(data[position])
            position += 1
        elif code == _INT4 and position + 4 <= size:
            push(_SIGNED4(data, position)[0])
            position += 4
        elif code == _EMPTY_TUPLE:
            # Nearly always followed by an opcode that makes an instance with these arguments.
            if (
                data[position] == _NEW
                and stack
                and type(name := stack[-1]) is Name
                and name.dotted in instances
            ):
                stack[-1] = Instance(name.dotted)
                position += 1
            else:
                push(())
        elif code == _EMPTY_DICT:
            push({})
        elif code == _SET_ITEMS:
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            machine.set_items(items)
        elif code == _BUILD and len(stack) > 1 and type(made := stack[-2]) is Instance and made.state is None:
            made.state = stack.pop()
        elif code == _TUPLE:
            start = marks.pop()
            items = stack[start:]
            del stack[start:]
            push(tuple(items))
        elif code == _SHORT_TEXT and position < size and position + data[position] < size:
            start = position + 1
            position = start + data[position]
            text = data[start:position].decode()
            push(text)
            if data[position] == _MEMOIZE:
                memo[len(memo)] = text
                position += 1
            if repeated is not None and (entry := repeated.find(position)) is not None:
                value, position = entry
                push(value)
        elif (
            code == _CALL
            and len(stack) > 1
            and type(name := stack[-2]) is Name
            and name.dotted in calls
            and type(arguments := stack[-1]) is tuple
        ):
            stack.pop()
            stack[-1] = Call(name.dotted, arguments)
        elif code == _TUPLE1 and stack:
            stack[-1] = (stack[-1],)
        elif code == _TUPLE2 and len(stack) > 1:
            last = stack.pop()
            stack[-1] = (stack[-1], last)
        elif code == _INT2 and position + 2 <= size:
            push(_UNSIGNED2(data, position)[0])
            position += 2
        elif code == _PUT:
            memo[data[position]] = stack[-1]
            position += 1
            repeated = None
        elif code == _STOP:
            return position - 1
        else:
            operation = known.get(code)
            if operation is None:
                refuse(f"opcode {code:#04x} at byte {position - 1} is not one that a checkpoint has")
            if code == _LONG_PUT:
                repeated = None
            machine.position = position
            operation(machine)
            position = machine.position
    return position
