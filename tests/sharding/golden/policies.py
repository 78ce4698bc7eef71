"""Policy files and what both packages must make of them: ``policies/*.toml``, good and bad, and ``expected.json``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from bridge.core.sharding import DEFAULT_ALIGN

FOLDER = Path(__file__).with_name("policies")


class UnitsCase(NamedTuple):
    """Module paths, and the units with the pattern of each, or parts of the error that the policy raises instead."""

    file: str
    paths: list[str]
    units: list[list[str]]
    error: list[str]

    def __str__(self) -> str:
        return f"{self.file}-{len(self.paths)}-{'bad' if self.error else 'good'}"


_EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
# File -> canonical form.
GOOD: dict[str, Any] = _EXPECTED["good"]
# File -> parts of the message.
BAD: dict[str, list[str]] = _EXPECTED["bad"]
UNITS = [UnitsCase(**{"units": [], "error": []} | case) for case in _EXPECTED["units"]]


def canonical(policy: Any) -> dict[str, Any]:
    """A policy of either package as JSON values, with all defaults filled in but of ``align`` and ``prefetch``."""
    precision = policy.precision
    return {
        "mesh": [list(axis) for axis in policy.axes],
        **({} if policy.align == DEFAULT_ALIGN else {"align": policy.align}),
        **({} if policy.prefetch is None else {"prefetch": policy.prefetch}),
        "precision": [
            precision.main,
            precision.compute_dtype,
            precision.reduce_dtype,
            precision.grad_dtype,
        ],
        "units": [
            {
                "match": unit.match,
                "strategy": unit.strategy,
                "placements": None if unit.placements is None else _words(unit.placements),
                # Over how many axes parameters, gradients and optimizer state are sharded.
                "sharded_axes": list(dataclasses.astuple(unit.chosen)[1:]),
                "granularity": unit.granularity,
                "recompute": unit.recompute,
                **({} if unit.align is None else {"align": unit.align}),
            }
            for unit in policy.units
        ],
        **({"parallel": [_cut(entry) for entry in policy.parallel]} if policy.parallel else {}),
    }


def _cut(entry: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(entry), "match": list(entry.match), "fused": list(entry.fused)}


def _words(placements: Any) -> list[list[str]]:
    return [list(words) for words in dataclasses.astuple(placements)]
