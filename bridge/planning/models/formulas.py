"""Bytes of a segment by formula, for B sequences of T tokens and c bytes per element of the compute dtype.

``FormulaSegment`` and ``LossSegment`` count what PyTorch keeps, ``ResidualSegment`` what JAX keeps. There are two kinds
of attention::

    fused   one kernel, which keeps the queries, keys, values and outputs, and one float32 number per row and head
    plain   scores = q k^T, their softmax in float32, and the softmax rounded to the compute dtype: [heads, T, T] each
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bridge.core.dtype_names import BYTES
from bridge.planning.models.activations import SegmentBytes

_WIDE = 4
"""Bytes of an element of float32."""


class Attention(StrEnum):
    """See above."""

    plain = "plain"
    fused = "fused"


@dataclass(frozen=True)
class FormulaSegment:
    """In PyTorch, with S = B heads T^2 scores of plain attention::

        saved     B T (saved c + saved_bytes) + S (4 + c), or S 4 where c = 4: the softmax is not rounded
        input     B T input c
        forward   input + saved + B T (working c + working_bytes), or input + saved - B T after c + S 4
        backward  saved + B T (working c + working_bytes), or saved - B T after c + S (4 + c)
        again     input + the larger of forward and backward

    ``working``: cotangents, and intermediates that are not kept. ``after``: elements that the code after attention
    saves. While attention runs they do not exist yet, or no longer. ``heads``: 0 for fused attention.
    """

    path: str
    input: float = 0.0
    saved: float = 0.0
    saved_bytes: float = 0.0
    working: float = 0.0
    working_bytes: float = 0.0
    heads: int = 0
    after: float = 0.0
    parts = ()

    def bytes_for(self, batch: int, length: int, compute: str) -> SegmentBytes:
        """See ``Segment``."""
        tokens, size = batch * length, BYTES[compute]
        scores = tokens * length * self.heads
        kept = scores * (_WIDE + (size if size != _WIDE else 0))
        saved = round(tokens * (self.saved * size + self.saved_bytes)) + kept
        working = round(tokens * (self.working * size + self.working_bytes))
        input_bytes = round(tokens * self.input * size)
        attending = saved - round(tokens * self.after * size)
        forward = input_bytes + max(saved + working, attending + scores * _WIDE)
        backward = max(saved + working, attending + scores * (_WIDE + size))
        again = input_bytes + max(forward, backward)
        return SegmentBytes(saved, input_bytes, forward, backward, again, forward)


@dataclass(frozen=True)
class LossSegment:
    """The last norm, output projection and loss in PyTorch, for a vocabulary of V::

    saved     B T (2 hidden c + 4 hidden + 4 + 4 V)      the last: log-probabilities in float32
    forward   input + saved + B T (V c + 4 V)            logits, and in float32: one array where c = 4
    early     saved + 8 B T V                            cotangents of the log-probabilities and the logits
    backward  saved - 4 B T V + B T (hidden + V) c       the cotangent of the logits, as the products read it
    """

    path: str
    hidden: int
    vocabulary: int
    parts = ()

    def bytes_for(self, batch: int, length: int, compute: str) -> SegmentBytes:
        """See ``Segment``."""
        tokens, size = batch * length, BYTES[compute]
        input_bytes = tokens * self.hidden * size
        wide = tokens * self.vocabulary * _WIDE
        saved = 2 * input_bytes + tokens * (self.hidden + 1) * _WIDE + wide
        rounded = 0 if size == _WIDE else tokens * self.vocabulary * size
        forward = input_bytes + saved + rounded + wide
        backward = saved + input_bytes + tokens * self.vocabulary * size - wide
        early = saved + 2 * wide
        again = input_bytes + max(forward, early)
        return SegmentBytes(saved, input_bytes, forward, backward, again, forward, early=early)


@dataclass(frozen=True)
class ResidualSegment:
    """In JAX, where a segment saves the residuals of its vjp: see ``trace_in_jax``, with which a test compares it.

    Per token: ``saved`` elements in the compute dtype, ``wide`` elements in float32, and ``saved_bytes``. ``arrays``:
    the widths of arrays that may be the largest, in the compute dtype and in float32. ``heads``: 0 for fused attention;
    plain attention saves exponentials in float32 and their quotients in the compute dtype, and reads a mask and the
    number that replaces masked scores.
    """

    path: str
    input: float = 0.0
    saved: float = 0.0
    wide: float = 0.0
    saved_bytes: float = 0.0
    arrays: tuple[float, float] = (0.0, 0.0)
    heads: int = 0
    parts = ()

    def bytes_for(self, batch: int, length: int, compute: str) -> SegmentBytes:
        """See ``Segment``."""
        tokens, size = batch * length, BYTES[compute]
        scores = tokens * length * self.heads
        wide = max(size, _WIDE)
        saved = round(tokens * (self.saved * size + self.wide * wide + self.saved_bytes))
        saved += scores * (wide + size)
        masks = scores * (wide + 1)
        narrow, broad = self.arrays
        largest = max(round(tokens * max(narrow * size, broad * wide)), scores * wide)
        input_bytes = round(tokens * self.input * size)
        return SegmentBytes.of_residuals(saved, input_bytes, largest, fixed=masks, fixed_saved=masks)
