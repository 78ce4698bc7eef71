"""Entries of a pickled dict that are written with the same bytes: followed once, and made again from the result.

In `.metadata` the entries of two tensors of one shape differ in their names only, as a rule, and are two thirds of what
is to be followed. The bytes of such an entry stand for the same value wherever they occur, because

- `_ENTRY` matches only what makes one new instance from constants and from what was remembered before: nothing lower on
  the stack is touched, nothing is named, and nothing made earlier is changed;
- what was remembered stays: from the first PUT on, which could replace it, `pickle.py` does not ask here;
- what an entry remembers itself (PyTorch's pickles do so with all they make) is not looked up anywhere in the file.
  Hence nobody can reach the parts of an instance that has its state, so that entries may share these.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from bridge.core.formats.dcp.pickle_records import Instance

_LONGEST: Final = 1024
_MOST_KINDS: Final = 4096
_BLOCK: Final = 64 << 10
_TEXT, _MEMOIZE, _GET, _LONG_GET = b"\x8c", b"\x94", b"h", b"j"
_GETS: Final = _GET + _LONG_GET


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
    properties = new + rb"\(" + value + rb"*t" + memo + rb"b"
    field = get + rb"(?:" + chunks + rb"|" + properties + rb"|" + value + rb")"
    return re.compile(new + state + rb"(?:" + field + rb")*ub", re.DOTALL)


_ENTRY: Final = _entry_pattern()


class _Entry(NamedTuple):
    """All bytes of an entry, how many memo entries they make, and the instance."""

    content: bytes
    remembered: int
    made: Instance


class RepeatedEntries:
    """The entries met so far in a pickle, by their bytes up to the next text.

    follow: the value of bytes [start, end) of the pickle, put into the memo with all that they remember.
    """

    def __init__(self, data: bytes, memo: dict[int, object], follow: Callable[[int, int], object]) -> None:
        self._data = data
        self._memo = memo
        self._follow = follow
        self._known: dict[bytes, _Entry] = {}

    def find(self, position: int) -> tuple[object, int] | None:
        """The value of the entry at this position, after its name, and its end; None if it is to be followed."""
        data = self._data
        if data[position] not in _GETS:
            return None
        stop = data.find(_TEXT, position, position + _LONGEST)
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
        """For each memo entry, whether it is 1: looked up somewhere, or bytes of something else look like that."""
        looked_up = np.zeros(self._data.count(_MEMOIZE) + 1, np.bool_)
        data = np.frombuffer(self._data, np.uint8)
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK + 4]
            for get, size in ((_GET, 1), (_LONG_GET, 4)):
                at = np.flatnonzero(block[:_BLOCK] == ord(get))
                at = at[at + size < len(block)]
                numbers = block[at[:, None] + np.arange(1, size + 1)].view(f"<u{size}").ravel()
                looked_up[numbers[numbers < len(looked_up)]] = True
        return looked_up.tobytes()
