"""Bytes of the activations of a piece of a model, by formula or traced.

A model's forward runs through *segments*, modules one after the other, for example "embed", "layers.0", ..., "" (the
root: the rest, here last norm, output projection and loss). A segment has these bytes::

    forward of segment      1       2       3    loss    3       2       1      backward of segment
    bytes                                        ____
                                           .:'''|    |''':.
                                   .:'''|''     |    |     ''|''':.             forward, backward: most while it runs
                           .:'''|''             |    |             ''|''':.     saved: what it leaves for backward
                          |   saved 1   |saved 2|    |

"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bridge.planning.dtypes import size_of


@dataclass(frozen=True)
class SegmentBytes:
    """Bytes of one segment, for one microbatch.

    saved: bytes that forward leaves for backward, with the segment's input if it is kept.
    input: the segment's input, which alone stays when the segment is recomputed.
    forward, backward: the most while the segment runs, its input and what it saves included.
    once, again: the most while a recomputed segment runs forward and backward.
    fixed: constants that forward reads, such as masks: a loop holds them, other programs make them where they are read.
    fixed_saved: those among what forward leaves for backward, which ``saved`` does not count.
    largest: the largest array.

    Parameters and their gradients are not counted.
    """

    saved: int = 0
    input: int = 0
    forward: int = 0
    backward: int = 0
    once: int = 0
    again: int = 0
    fixed: int = 0
    fixed_saved: int = 0
    largest: int = 0


class Segment(Protocol):
    """One segment: the path of its module, and its bytes for ``batch`` sequences of ``length`` tokens."""

    @property
    def path(self) -> str: ...

    @property
    def parts(self) -> Sequence[Segment]:
        """Modules inside of it, in the order of forward, that a policy may make units of."""
        ...

    def bytes_for(self, batch: int, length: int, compute: str) -> SegmentBytes:
        """``compute``: name of the dtype of forward and backward."""
        ...


@dataclass(frozen=True)
class FormulaSegment:
    """Bytes by formula, for B sequences of T tokens, c bytes an element of the compute dtype::

        saved     B T (saved c + saved_bytes)
        input     B T input c
        forward   input + saved + B T (working c + working_bytes)
        backward  saved + B T (working c + working_bytes)
        again     input + forward

    ``working``: cotangents, and intermediates that are not kept.
    """

    path: str
    input: float = 0.0
    saved: float = 0.0
    saved_bytes: float = 0.0
    working: float = 0.0
    working_bytes: float = 0.0

    @property
    def parts(self) -> tuple[Segment, ...]:
        """None."""
        return ()

    def bytes_for(self, batch: int, length: int, compute: str) -> SegmentBytes:
        """See ``Segment``."""
        tokens, size = batch * length, size_of(compute)
        saved = round(tokens * (self.saved * size + self.saved_bytes))
        working = round(tokens * (self.working * size + self.working_bytes))
        given = round(tokens * self.input * size)
        forward = given + saved + working
        return SegmentBytes(saved, given, forward, saved + working, forward, given + forward)
