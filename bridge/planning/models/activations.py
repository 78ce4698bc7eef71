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


@dataclass(frozen=True)
class SegmentBytes:
    """Bytes of one segment, for one microbatch.

    saved: bytes that forward leaves for backward, with the segment's input if it is kept.
    input: the segment's input, which is all that stays when the segment is recomputed.
    forward, backward: the maximum while the segment runs, including its input and what it saves.
    again, once: the maximum while a recomputed segment runs backward, and forward.
    fixed: constants that forward reads, such as masks: a loop holds them, other programs make them at their use.
    fixed_saved: the constants among what forward leaves for backward; ``saved`` does not count them.
    largest: the largest array.
    early: the maximum in backward before any gradient of a parameter exists, if this is larger.

    Parameters and their gradients are not counted.
    """

    saved: int = 0
    input: int = 0
    forward: int = 0
    backward: int = 0
    again: int = 0
    once: int = 0
    fixed: int = 0
    fixed_saved: int = 0
    largest: int = 0
    early: int = 0

    @staticmethod
    def of_residuals(
        saved: int, input_bytes: int, largest: int, fixed: int, fixed_saved: int
    ) -> SegmentBytes:
        """A segment in JAX that saves ``saved`` bytes of residuals, and whose input has ``input_bytes`` bytes.

        Backward adds the cotangents of output and input, and the cotangent of the largest intermediate.
        """
        return SegmentBytes(
            saved,
            input_bytes,
            forward=saved + input_bytes,
            backward=saved + 2 * input_bytes + largest,
            # For a chain such as scores, exponentials, quotients, each made from the one before, XLA holds three.
            once=2 * input_bytes + 3 * largest,
            again=saved + largest,
            fixed=fixed,
            fixed_saved=fixed_saved,
            largest=largest,
        )


class Segment(Protocol):
    """One segment: the path of its module, and its bytes for ``batch`` sequences of ``length`` tokens."""

    @property
    def path(self) -> str: ...

    @property
    def parts(self) -> Sequence[Segment]:
        """Modules inside that a policy may make units of, in the order of forward."""

    def bytes_for(self, batch: int, length: int, compute: str) -> SegmentBytes:
        """``compute``: name of the dtype of forward and backward."""
