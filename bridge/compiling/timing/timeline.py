"""The timeline of a compiled step for pictures: what the device does, and what its links carry at the same time.

::

    device   |products|mem|products|waiting|products|...
    links    |all_gather  |     |all_gather|psum    |...

Time in which a device waits is exposed communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DEVICE, LINKS = "device", "links"
DOINGS = ("products", "memory", "waiting")
"""The activities of a device: matrix products, memory traffic, waiting for transfers."""
_TOUCHES = 1e-12
"""Allowed gap in seconds between spans that touch, because of rounding in sums."""


@dataclass(frozen=True)
class Span:
    """``lane``: ``DEVICE`` or ``LINKS``. ``kind``: one of ``DOINGS``, or JAX's name of a collective. In seconds."""

    lane: str
    kind: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Recorder:
    """The spans of a walk, in the order of issue. Neighbours of one kind on one lane become one span."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._last: dict[str, int] = {}

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    def add(self, span: Span) -> None:
        if span.seconds <= 0:
            return
        index = self._last.get(span.lane)
        if index is not None:
            last = self._spans[index]
            if last.kind == span.kind and span.start - last.end < _TOUCHES:
                self._spans[index] = replace(last, seconds=span.end - last.start)
                return
        self._last[span.lane] = len(self._spans)
        self._spans.append(span)

    def begin_turn(self) -> int:
        """The start of a loop iteration's spans: none of them is joined with an earlier span."""
        self._last.clear()
        return len(self._spans)

    def repeat(self, turn: int, times: int, seconds: float) -> None:
        """Repeat the spans since ``turn`` another ``times`` times, each time ``seconds`` later."""
        spans = self._spans[turn:]
        for number in range(1, times + 1):
            for span in spans:
                self.add(replace(span, start=span.start + number * seconds))
