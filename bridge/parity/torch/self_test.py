"""What this batch and these weights could not have shown.

A comparison that finds nothing is worth as much as what it would have found. So typical faults are planted in copies of
the torch model, one at a time, and the module's output in float64 is held against that of the right model, over the
same floor as everywhere. The JAX model takes no part: where the two are the same, a fault of the one is a fault of the
other.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

from bridge.parity.partners.rows import ratio_of
from bridge.parity.recorded.distance import FACTOR, distance, noise
from bridge.parity.recorded.recording import Call, Recording, Side
from bridge.parity.report_page.report import Revealed

MOST_FAULTS = 60


def planted(side: Side, batch: Any, dtype: str = "float32", most: int = MOST_FAULTS) -> Iterator[Revealed]:
    """Plant each typical fault in a copy of a torch model, and say whether ``batch`` shows it.

    ``most``: of all faults, so many are tried, spread evenly over the model. ``ValueError`` for a side that is no torch
    model, such as a trace.
    """
    from bridge.parity.torch.side import TorchSide

    if not isinstance(side, TorchSide):
        raise ValueError(
            f"self_test: expected a torch model, in which faults can be planted, got {type(side).__name__}"
        )
    right = side.record(batch, "float64", backward=False)
    low = side.record(batch, dtype, backward=False)
    faults, owners = side.faults(), _owners(side)
    for fault in faults if len(faults) <= most else _spread(faults, most):
        found = side.with_fault(fault).record(batch, "float64", backward=False)
        ratio = max(
            (_ratio(call, right, low, found, dtype) for call in _around(fault.module, right, owners)),
            default=0.0,
        )
        yield Revealed(fault.name, fault.module, ratio > FACTOR, ratio)


def _owners(side: Side) -> set[str]:
    """Paths of the modules that have parameters, of their own or inside."""
    found = {""}
    for name in side.weights():
        parts = name.split(".")[:-1]
        found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return found


def _around(path: str, recording: Recording, owners: Container[str]) -> Sequence[Call]:
    """The calls of the module; of the nearest module around it that was called, where it was not (a table of its).

    A module without parameters has no partner in a comparison: its fault shows in all modules that have some, or not.
    """
    if path not in owners:
        return [call for call in recording.calls if call.path in owners]
    while True:
        calls = [call for call in recording.calls if call.path == path]
        if calls or not path:
            return calls
        path = path.rpartition(".")[0]


def _ratio(call: Call, right: Recording, low: Recording, found: Recording, dtype: str) -> float:
    other, coarse = found.find(call.path, call.number), low.find(call.path, call.number)
    worst = 0.0
    for name, leaf in call.outputs.items():
        twin = None if other is None else other.outputs.get(name)
        if twin is None or twin.shape != leaf.shape:
            continue
        floor = noise(None if coarse is None else coarse.outputs.get(name), leaf, dtype)
        worst = max(worst, ratio_of(distance(leaf, twin, dtype), floor))
    return worst


def _spread(faults: Sequence[Any], most: int) -> list[Any]:
    return [faults[number * len(faults) // most] for number in range(most)]
