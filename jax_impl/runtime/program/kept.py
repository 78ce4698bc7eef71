"""Whole weights that stay from a unit's second forward to its backward, inside of a unit that recomputes.

The last units of a recomputation are the first ones of the backward that follows. Of A, B and C inside of R, which
recomputes, with ``prefetch = 0``, and with ``prefetch = 1``, where two units' whole weights may exist at once::

    recompute R    gather A, apply A, drop A | gather B, apply B, drop B | gather C, apply C
    backward R     backward C, drop C | gather B, backward B, drop B | gather A, backward A, drop A

    recompute R    gather A, apply A, drop A | gather B, apply B | gather C, apply C
    backward R     backward C, drop C | backward B, drop B | gather A, backward A, drop A

So what stays is what ``order.py`` allows at once, and no more. A unit whose forward and backward are traced apart, as
in a loop or inside of a unit that does not recompute, is gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

Held = Sequence[Sequence[jax.Array]]


@jax.tree_util.register_static
class Use:
    """One forward of a unit, equal to itself alone. What the unit saves for backward has it."""


@dataclass
class Kept:
    """Of one trace of a model. ``limit``: of how many units there may be whole weights at once."""

    limit: int
    _recomputed: Any = None
    _held: list[tuple[Use, Any, Held]] = field(default_factory=list)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, units that are traced in the present trace run again, and their backward follows in it."""
        before, self._recomputed = self._recomputed, get_opaque_trace_state()
        try:
            yield
        finally:
            self._recomputed = before

    def make_room(self, *, again: bool) -> None:
        """For one more unit's weights. ``again``: in backward, where those of the unit before are there as well."""
        room = 0 if again else self.limit - 1
        del self._held[: max(0, len(self._held) - room)]

    def keep(self, held: Held) -> Use | None:
        """After a unit's forward: its use, by which backward asks for its weights; None where backward gathers them."""
        trace = get_opaque_trace_state()
        if self._recomputed != trace:
            return None
        use = Use()
        self._held.append((use, trace, held))
        return use

    def take(self, use: Use | None) -> Held | None:
        """In backward, of the unit whose forward was the last; None where its weights did not stay."""
        if self._held and self._held[-1][0] is use and self._held[-1][1] == get_opaque_trace_state():
            return self._held.pop()[2]
        return None
