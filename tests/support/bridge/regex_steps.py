"""Count the steps of a backtracking regex search, and make the inputs on which ambiguous patterns are slow.

Python's own matcher walks the same tree in the same order, with shortcuts: a quadratic search here may be quadratic
there.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

Node = tuple[Any, Any]
_MOST_STEPS = 40_000


class TooManySteps(Exception):
    """More steps than any linear pattern takes on texts of this size."""


_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)
_UNBOUNDED = 50  # as much as makes a bounded repetition worth an attack
_CLASSES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
_SAMPLE = " ,0_aAx1L'\"\\\n[](){}=:.-#%\x00\x94h*<" + "".join(map(chr, range(33, 127)))


def tree(pattern: re.Pattern[Any]) -> list[Node]:
    """A compiled pattern as nodes. A bytes pattern counts as text with the same numbers."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    return list(
        _parser.parse(
            text, pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags
        )
    )


class Counted:
    """Matches of nodes at a place, and the steps that all of them took."""

    def __init__(self, text: str) -> None:
        self.text, self.steps = text, 0

    def ends(self, nodes: Sequence[Node], at: int) -> Iterator[int]:
        """Every place where the nodes may end, in the order of a backtracking matcher."""
        if not nodes:
            yield at
            return
        for end in self._node(*nodes[0], at):
            yield from self.ends(nodes[1:], end)

    def match(self, nodes: Sequence[Node], *, search: bool, full: bool) -> None:
        """Every attempt until the pattern matches or fails."""
        for start in range(len(self.text) + 1 if search else 1):
            if any(not full or end == len(self.text) for end in self.ends(nodes, start)):
                return

    def _node(self, name: Any, value: Any, at: int) -> Iterator[int]:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise TooManySteps
        if name in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            if at < len(self.text) and _fits(name, value, self.text[at]):
                yield at + 1
        elif name in _REPEATS:
            low, high, body = value
            repeated = self._repeat(list(body), low, high, at, lazy=name is op.MIN_REPEAT)
            yield from itertools.islice(repeated, 1) if name is op.POSSESSIVE_REPEAT else repeated
        elif name is op.BRANCH:
            for branch in value[1]:
                yield from self.ends(list(branch), at)
        elif name is op.SUBPATTERN:
            yield from self.ends(list(value[3]), at)
        elif name is op.ATOMIC_GROUP:
            yield from list(self.ends(list(value), at))[:1]
        elif name in (op.ASSERT, op.ASSERT_NOT):
            # A look behind is of a fixed width here, and takes a step.
            ahead = value[0] < 0 or any(True for _ in self.ends(list(value[1]), at))
            if value[0] < 0 or ahead == (name is op.ASSERT):
                yield at
        elif name is op.AT:
            ends = value in (op.AT_END, op.AT_END_STRING)
            if (
                at == len(self.text)
                if ends
                else at == 0 or value not in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
            ):
                yield at
        else:
            raise NotImplementedError(name)

    def _repeat(self, body: list[Node], low: int, high: int, at: int, *, lazy: bool) -> Iterator[int]:
        if lazy and low <= 0:
            yield at
        if high > 0:
            for end in self.ends(body, at):
                if end > at:
                    yield from self._repeat(body, low - 1, high - 1, end, lazy=lazy)
        if not lazy and low <= 0:
            yield at


def _fits(name: Any, value: Any, character: str) -> bool:
    if name is op.ANY:
        return True
    if name is op.LITERAL:
        return character == chr(value)
    if name is op.NOT_LITERAL:
        return character != chr(value)
    negated = bool(value) and value[0][0] is op.NEGATE
    inside = any(
        (code is op.LITERAL and character == chr(item))
        or (code is op.RANGE and item[0] <= ord(character) <= item[1])
        or (code is op.CATEGORY and re.match(_CLASSES[item], character) is not None)
        for code, item in value
    )
    return inside != negated


def witness(nodes: Sequence[Node], *, least: int = 0) -> str:
    """A short text that the nodes match. least: repetitions of each that may be left out."""
    parts = []
    for name, value in nodes:
        if name in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            parts.append(
                chr(value) if name is op.LITERAL else next(c for c in _SAMPLE if _fits(name, value, c))
            )
        elif name in _REPEATS:
            parts.append(witness(list(value[2]), least=least) * max(value[0], min(least, value[1])))
        elif name is op.BRANCH:
            parts.append(witness(list(value[1][0]), least=least))
        elif name is op.SUBPATTERN:
            parts.append(witness(list(value[3]), least=least))
        elif name is op.ATOMIC_GROUP:
            parts.append(witness(list(value), least=least))
    return "".join(parts)


def attacks(nodes: Sequence[Node], before: str = "") -> Iterator[tuple[str, str]]:
    """For each repetition without a bound: a text up to there, and what it repeats."""
    for index, (name, value) in enumerate(nodes):
        here = before + witness(nodes[:index], least=0)
        if name in _REPEATS:
            body = list(value[2])
            if value[1] > _UNBOUNDED:
                for least in (0, 1):
                    if again := witness(body, least=least):
                        yield here, again
            yield from attacks(body, here)
        elif name is op.BRANCH:
            for branch in value[1]:
                yield from attacks(list(branch), here)
        elif name is op.SUBPATTERN:
            yield from attacks(list(value[3]), here)
        elif name is op.ATOMIC_GROUP:
            yield from attacks(list(value), here)


def growth(pattern: re.Pattern[Any], *, search: bool = False, full: bool = True, size: int = 40) -> float:
    """The largest ratio of steps on a text of twice the size to those on the text: 2 where a pattern is linear."""
    nodes, limit = tree(pattern), sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))
    try:
        return _growth(nodes, search=search, full=full, size=size)
    finally:
        # Later tests of the process need Python's default limit.
        sys.setrecursionlimit(limit)


def _growth(nodes: list[Any], *, search: bool, full: bool, size: int) -> float:
    worst = 0.0
    for before, again in dict.fromkeys(attacks(nodes)):
        for end in ("", "\x7f"):
            steps = []
            for count in (size, 2 * size):
                counted = Counted(before + again * count + end)
                try:
                    counted.match(nodes, search=search, full=full)
                except TooManySteps:
                    return float("inf")
                steps.append(counted.steps)
            worst = max(worst, steps[1] / steps[0])
    return worst
