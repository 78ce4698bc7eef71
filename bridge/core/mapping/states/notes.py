"""Notes of the places where a convention's tensors were found, stored as an object for a later conversion back.

    {"jax": {"weights": "params/{w}",
             "states": [{"exp_avg": "opt_state/1/0/mu/{w}", "step": "opt_state/1/0/count", ...}]}}

If there are several states, each has "for": the names of its weights. "format" is the format of the file with the
tensors, and "axes" are the sizes that the caller gave: a conversion back to such a file needs no --into and no --axis.
"added" are the paths of empty parts that a conversion wrote for this convention, and that a conversion back leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader, TreePath
from bridge.core.mapping.language.conventions import SECTIONS, WEIGHT, Convention, Section, State, usual_in

PLACES: TreePath = ("twinshard", "places")
_FOR = "for"


def updated(
    notes: Mapping[str, object],
    source: Convention,
    target: Convention,
    usual: Mapping[str, Convention],
    format: str,
    axes: Mapping[str, int],
    added: Iterable[TreePath],
) -> dict[str, object]:
    """The notes of a conversion from ``source``, whose places were found, to ``target``.

    usual: the mapping's conventions at their usual places. format: of the source. axes: the sizes that the caller gave.
    added: paths of empty parts in the target. A source needs no note if a conversion back can find its convention,
    places and sizes without one.
    """
    result = {name: value for name, value in notes.items() if name not in (source.name, target.name)}
    others = [c for name, c in usual.items() if name != target.name and c.without == target.without]
    back = others if len(usual) == 2 else usual_in(kind_of(format), others)
    places = source.places["weights"], source.states
    weights, states = usual[source.name].places["weights"], usual[source.name].states
    extras: dict[str, object] = {}
    if axes:
        extras["axes"] = dict(axes)
    if paths := ["/".join(map(str, path)) for path in added]:
        extras["added"] = paths
    if extras or places not in ((weights, states), (weights, ())) or [c.name for c in back] != [source.name]:
        result[source.name] = {**_note(source, format), **extras}
    return result


def _note(convention: Convention, format: str) -> dict[str, object]:
    states: list[dict[str, object]] = []
    for state in convention.states:
        members = {} if state.weights is None else {_FOR: sorted(state.weights)}
        states.append({**dict(state.places.items()), **members})
    return {"weights": convention.places["weights"], "states": states, "format": kind_of(format)}


def added_parts(notes: Mapping[str, object], convention: Convention) -> frozenset[str]:
    """The paths, joined by "/", of empty parts that a conversion from this convention added."""
    data = notes.get(convention.name)
    paths = data.get("added") if isinstance(data, dict) and not convention.is_tree else None
    return frozenset(map(str, paths)) if isinstance(paths, list) else frozenset()


def kind_of(format: str) -> str:
    """The format in which a checkpoint of this format is written: torch.save's files have a state dict, like DCP."""
    return {"torch": "dcp", "npz": "orbax", "msgpack": "orbax"}.get(format, format)


def conventions_for(notes: Mapping[str, object], format: str) -> list[str]:
    """The conventions that an earlier conversion found in a file of this format."""
    return [name for name, data in notes.items() if isinstance(data, dict) and data.get("format") == format]


def noted_axes(notes: Mapping[str, object]) -> dict[str, int]:
    """The sizes that callers of earlier conversions gave."""
    tables = [data.get("axes") for data in notes.values() if isinstance(data, dict)]
    pairs = [pair for table in tables if isinstance(table, dict) for pair in table.items()]
    return {str(axis): size for axis, size in pairs if type(size) is int and size >= 0}


def read_notes(reader: CheckpointReader, paths: Mapping[str, TreePath]) -> dict[str, object]:
    """The notes in a checkpoint by convention, unchecked; empty if the checkpoint has no table of notes."""
    name = next((name for name, path in paths.items() if path == PLACES), None)
    note = reader.objects[name] if name is not None else None
    return {str(key): value for key, value in note.items()} if isinstance(note, dict) else {}


def noted(convention: Convention, data: object) -> Convention:
    """The convention at its noted places; the convention itself if the note is malformed."""
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


def root_remark(target: Convention, format: str) -> str:
    """How to load weights with an optimizer's state that are written to DCP without a root; else "".

    torchtitan saves its weights at the root, too, but other programs save {"model": ..., "optimizer": ...}.
    """
    if format != "dcp" or target.format != "safetensors" or target.places["weights"] != WEIGHT:
        return ""
    return (
        "the weights are at the root, without model in front of their names: load them by "
        'dcp.load({**weights, "optimizer": ...}), not by dcp.load({"model": weights, "optimizer": ...})'
    )


def _place(text: object, bare: bool = False) -> str:
    if not isinstance(text, str) or not (bare or WEIGHT in text):
        raise ValueError
    return text
