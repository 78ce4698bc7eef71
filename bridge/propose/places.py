"""Where the checkpoints of a proposed mapping keep its weights and what an optimizer holds for them.

Rules name weights. A convention's table says where their tensors are, if not in the usual places, so that what is
converted lies where the other checkpoint has it:

    [convention.jax]
    weights = "params/params/{w}"
    exp_avg = "opt_state/0/mu/params/{w}"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bridge.formats.base import CheckpointReader
from bridge.mapping.conventions import SECTIONS
from bridge.mapping.errors import MappingError
from bridge.mapping.found import find
from bridge.mapping.rules import MappingTable


@dataclass(frozen=True)
class Places:
    """What a convention's table says. entries: by key, those that are not the usual ones. doubt: what it cannot say."""

    entries: Mapping[str, str] = field(default_factory=dict)
    doubt: str = ""


def places_in(reader: CheckpointReader, mapping: MappingTable, name: str, weights: str) -> Places:
    """The places of a convention's weights and optimizer states in a checkpoint that has them.

    weights: the place of the weights, which is known to whoever named them.
    """
    usual = mapping.conventions[name]
    entries = {} if weights == usual.places["weights"] else {"weights": weights}
    mapping = replace(mapping, conventions={**mapping.conventions, name: usual.at(weights, ())})
    try:
        found = find(reader.tensors.values(), mapping, name, str(reader.path))
    except MappingError as error:
        return Places(entries, str(error))
    if len(found.states) > 1:
        where = ", ".join(sorted(state.places["step"] for state in found.convention.states))
        return Places(entries, f"several optimizer states, which a table cannot say (counts at {where})")
    # Where no state was found the convention still has its usual one.
    for state, place in zip(found.states, found.convention.states, strict=False):
        held = {*state.sections, *(("step",) if state.count is not None else ())}
        entries |= {s: place.places[s] for s in SECTIONS if s in held and place.places[s] != usual.places[s]}
    return Places(entries)
