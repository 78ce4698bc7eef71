"""The places where the checkpoints of a proposed mapping keep weights and optimizer states.

Rules name weights. A convention's table gives the places of their tensors, if these are not the usual ones, so that a
converted checkpoint has the layout of the other one:

    [convention.jax]
    weights = "params/params/{w}"
    exp_avg = "opt_state/0/mu/params/{w}"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.mapping.language.conventions import SECTIONS
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.states.source_tree import find


@dataclass(frozen=True)
class Places:
    """The table of a convention. entries: the unusual places, by key. doubt: what the table cannot express."""

    entries: Mapping[str, str] = field(default_factory=dict)
    doubt: str = ""


def places_in(reader: CheckpointReader, mapping: MappingTable, name: str, weights: str) -> Places:
    """The places of a convention's weights and optimizer states in a checkpoint.

    weights: the place of the weights, which the caller knows from naming them.
    """
    usual = mapping.conventions[name]
    entries = {} if weights == usual.places["weights"] else {"weights": weights}
    mapping = replace(mapping, conventions={**mapping.conventions, name: usual.at(weights, ())})
    try:
        tree = find(reader.tensors.values(), mapping, name, str(reader.path))
    except MappingError as error:
        return Places(entries, str(error))
    if len(tree.states) > 1:
        where = ", ".join(sorted(state.places["step"] for state in tree.convention.states))
        return Places(entries, f"several optimizer states, which a table cannot say (counts at {where})")
    # Where no state was found the convention still has its usual one.
    for state, names in zip(tree.states, tree.convention.states, strict=False):
        held = {*state.sections, *(("step",) if state.count is not None else ())}
        entries |= {s: names.places[s] for s in SECTIONS if s in held and names.places[s] != usual.places[s]}
    return Places(entries)
