"""Norms of a run's weights and Adam moments after each step, and where they depart from a correct run.

A loss is one number, and near the initial weights it hardly depends on many parts of a model. A wrong gradient shows in
the moments of its parameter before it shows in a loss: the first moment is a mean of gradients, the second a mean of
their squares. A norm does not depend on how a parameter is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.core.mapping.language.table import MappingTable

Norms = Mapping[str, Mapping[str, float]]
"""Euclidean norms of whole parameters, or of their moments: by kind (`KINDS`), then by name in torch's convention."""

KINDS = ("weights", "first moments", "second moments")

NORM_CLOSENESS = 10.0
"""How many times farther from the fp32 reference a norm may be than the references' norms of its kind were apart.

Legs without a fault were at most 0.76 times as far (`quick` and `default`).
"""

LEAST = 2.0**-23
"""Distances of norms below one fp32 rounding say nothing."""


@dataclass(frozen=True)
class Far:
    """One norm that is farther from the reference's than allowed; both numbers are relative."""

    kind: str
    name: str
    distance: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.name} {self.distance:.1e} (allowed {self.allowed:.1e})"


@dataclass(frozen=True)
class Departure:
    """The first step at which norms depart from the reference, and all norms that do, the farthest first."""

    step: int
    norms: tuple[Far, ...]


def in_torch_names(norms: Mapping[str, float], mapping: MappingTable) -> dict[str, float]:
    """Norms by a JAX parameter's path, renamed to the torch parameter that it is, or is a part of.

    Raises KeyError for a path that the mapping does not know.
    """
    squares: dict[str, float] = {}
    for path, norm in norms.items():
        name = _torch_name(path, mapping)
        squares[name] = squares.get(name, 0.0) + norm * norm
    return {name: math.sqrt(square) for name, square in squares.items()}


def _torch_name(path: str, mapping: MappingTable) -> str:
    for rule in mapping.rules:
        for entry in rule.entries("jax"):
            indices = entry.path.match(path)
            if indices is not None:
                return rule.entries("torch")[0].path.format(indices)
    raise KeyError(f"{path}: expected a parameter that mapping {mapping.name} knows")


def distances(norms: Norms, reference: Norms) -> dict[str, dict[str, float]]:
    """``|a - b| / b`` of each norm; infinite for NaN, for 0 against another norm and for a name that one side lacks."""
    far: dict[str, dict[str, float]] = {}
    for norm_kind in KINDS:
        own, its = norms.get(norm_kind, {}), reference.get(norm_kind, {})
        far[norm_kind] = {name: _distance(own.get(name), its.get(name)) for name in {**its, **own}}
    return far


def _distance(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return math.inf
    if a == b:
        return 0.0
    distance = abs(a - b) / b if b else math.inf
    return math.inf if math.isnan(distance) else distance


def tolerances(fp32: Sequence[Norms], fp64: Sequence[Norms]) -> list[dict[str, float]]:
    """For each step, by kind, `NORM_CLOSENESS` times the largest distance of two references' norms up to this step."""
    apart = dict.fromkeys(KINDS, LEAST)
    allowed = []
    for a, b in zip(fp32, fp64, strict=True):
        here = distances(a, b)
        apart = {norm_kind: max([apart[norm_kind], *here[norm_kind].values()]) for norm_kind in KINDS}
        allowed.append({norm_kind: NORM_CLOSENESS * distance for norm_kind, distance in apart.items()})
    return allowed


def first_departure(
    run: Sequence[Norms], reference: Sequence[Norms], allowed: Sequence[Mapping[str, float]]
) -> Departure | None:
    """The first step of ``run`` with a norm beyond what is ``allowed`` for its kind in this step."""
    for step, (norms, expected, most) in enumerate(zip(run, reference, allowed, strict=True)):
        beyond = [
            Far(norm_kind, name, distance, most[norm_kind])
            for norm_kind, by_name in distances(norms, expected).items()
            for name, distance in by_name.items()
            if distance > most[norm_kind]
        ]
        if beyond:
            ordered = sorted(beyond, key=lambda far: far.distance / far.allowed, reverse=True)
            return Departure(step, tuple(ordered))
    return None
