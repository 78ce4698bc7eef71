"""How modules become units: the ``[[unit]]`` entries of a policy, and their patterns over dotted paths."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection
from dataclasses import dataclass

from bridge.core.sharding.layout.alignment import Align, is_align
from bridge.core.sharding.policy.policy_error import PolicyError, require
from bridge.core.sharding.policy.recompute import RECOMPUTE_WORDS, Recompute, is_recompute
from bridge.core.sharding.policy.strategy import Placements, Strategy, StrategyName, strategy_named

ALIGN_WORDS = 'a number of elements >= 1, or "auto"'
KINDS = ("parameters", "gradients", "optimizer")
"""The kinds of tensors that have placements."""


def is_pattern(pattern: object) -> bool:
    """Whether ``pattern`` is a dotted path without empty segments; "" is not."""
    return isinstance(pattern, str) and bool(pattern) and all(pattern.split(".")) and "/" not in pattern


def matches(pattern: str, path: str) -> bool:
    """Whether every segment of ``path`` matches the segment of ``pattern`` at its place; no wildcard crosses a dot."""
    segments, parts = pattern.split("."), path.split(".")
    return len(segments) == len(parts) and all(map(fnmatch.fnmatchcase, parts, segments))


def near(pattern: str, paths: Collection[str]) -> str:
    """Some of ``paths``, the most similar to ``pattern`` first, for an error."""
    close = difflib.get_close_matches(pattern, paths, n=4, cutoff=0.3) or list(paths)[:4]
    return ", ".join(close) or "no modules"


@dataclass(frozen=True)
class UnitPolicy:
    """How modules with a matching path are sharded, each as a separate unit.

    match: dotted module path, each segment with the wildcards of ``fnmatch``; "" is the root.
    strategy, placements: at most one of the two; neither: "optim_grads_params".
    granularity: "row", "tensor" or "block(n)", of all parameters of the unit.
    recompute: recompute the unit's activations in backward instead of keeping them, all (True) or all except those that
        a name keeps, see ``recompute.py``.
    align: the alignment of the unit's shards, see ``plan_layout``. None: the policy's alignment for all units.

    Raises PolicyError naming the field.
    """

    match: str
    strategy: StrategyName | None = None
    placements: Placements | None = None
    granularity: str = "row"
    recompute: Recompute = False
    align: Align | None = None

    def __post_init__(self) -> None:
        require(
            self.match == "" or is_pattern(self.match),
            "match",
            'a dotted path as in "layers.*", or ""',
            self.match,
        )
        if self.strategy is not None:
            require(isinstance(self.strategy, str), "strategy", "a name", self.strategy)
            if self.placements is not None:
                raise PolicyError(
                    f"expected strategy or placements ({', '.join(KINDS)}), got both, strategy {self.strategy!r}"
                )
        elif self.placements is not None:
            require(
                isinstance(self.placements, Placements),
                "placements",
                "Placements of this package",
                self.placements,
            )
        try:
            _ = self.chosen
        except ValueError as error:
            raise PolicyError(str(error)) from None
        grain = isinstance(self.granularity, str) and re.fullmatch(
            r"row|tensor|block\([1-9][0-9]*\)", self.granularity
        )
        require(grain, "granularity", "row, tensor or block(n) with n >= 1", self.granularity)
        require(is_recompute(self.recompute), "recompute", RECOMPUTE_WORDS, self.recompute)
        require(self.align is None or is_align(self.align), "align", ALIGN_WORDS, self.align)

    @property
    def chosen(self) -> Strategy:
        """The strategy, however it was given."""
        if self.placements is not None:
            return self.placements.strategy
        return strategy_named("optim_grads_params" if self.strategy is None else self.strategy)
