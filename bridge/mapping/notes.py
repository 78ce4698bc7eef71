"""Notes of the places where a convention's tensors were found, stored as an object for a later conversion back.

    {"jax": {"weights": "params/{w}",
             "states": [{"exp_avg": "opt_state/1/0/mu/{w}", "step": "opt_state/1/0/count", ...}]}}

Where there are several states, each has "for": the names of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from bridge.formats.base import CheckpointError, CheckpointReader, TreePath
from bridge.mapping.conventions import SECTIONS, WEIGHT, Convention, Section, State

PLACES: TreePath = ("twinshard", "places")
_FOR = "for"


def note(convention: Convention, usual: Convention) -> dict[str, object] | None:
    """The note of a convention whose places were found; None where the places are the usual ones."""
    here = convention.places["weights"], convention.states
    if here == (usual.places["weights"], usual.states) or here == (usual.places["weights"], ()):
        return None
    states: list[dict[str, object]] = []
    for state in convention.states:
        members = {} if state.weights is None else {_FOR: sorted(state.weights)}
        states.append({**dict(state.places.items()), **members})
    return {"weights": convention.places["weights"], "states": states}


def read_notes(reader: CheckpointReader, paths: Mapping[str, TreePath]) -> dict[str, object]:
    """The notes in a checkpoint by convention, unchecked; empty where the checkpoint has no table of notes."""
    name = next((name for name, path in paths.items() if path == PLACES), None)
    found = reader.objects[name] if name is not None else None
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def noted(convention: Convention, data: object) -> Convention:
    """The convention at its noted places; the convention itself where the note is malformed."""
    if not isinstance(data, dict) or not isinstance(data.get("states"), list):
        return convention
    try:
        states = tuple(_state(convention, state) for state in data["states"])
        return convention.at(_place(data["weights"]), states)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return convention


def _state(convention: Convention, data: object) -> State:
    if not isinstance(data, dict):
        raise ValueError
    sections = cast(tuple[Section, ...], [s for s in SECTIONS if s in data])
    places = {**convention.states[0].places, **{s: _place(data[s], s == "step") for s in sections}}
    members = data.get(_FOR)
    return State(places, None if members is None else frozenset(map(str, members)))


def _place(text: object, bare: bool = False) -> str:
    if not isinstance(text, str) or not (bare or WEIGHT in text):
        raise ValueError
    return text
