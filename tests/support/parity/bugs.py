"""The library of planted bugs: each a fault in one module of one model of a pair, and the right answer."""

from __future__ import annotations

from tests.support.parity.bug_tools import Bug
from tests.support.parity.causal_bugs import CAUSAL_BUGS
from tests.support.parity.fresh_bugs import FRESH_BUGS
from tests.support.parity.further_bugs import FURTHER_BUGS
from tests.support.parity.vision_bugs import VISION_BUGS

__all__ = ["BUGS", "FRESH_BUGS", "Bug"]

BUGS: tuple[Bug, ...] = CAUSAL_BUGS + VISION_BUGS + FURTHER_BUGS
