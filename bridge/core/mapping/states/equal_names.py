"""A mapping between two checkpoints whose weights have equal names, up to separators and a common beginning.

    model.layers.0.attn.weight            params/layers/0/attn/weight
    optimizer.state.layers.0...exp_avg    opt_state/0/mu/layers/0/attn/weight

The weights need no translation. The mapping tells which moments belong to which weight.
"""

from __future__ import annotations

import itertools
from typing import Final

from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.formats.tensors.leaves import TREE_FORMATS
from bridge.core.mapping.language.conventions import Convention
from bridge.core.mapping.language.entries import Entry, Rule
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.table import MappingTable
from bridge.core.mapping.states.beside_weights import OPTIMIZER_KEYS, is_carried
from bridge.core.text import first_of

SOURCE: Final = "source"
TARGET: Final = "template"

_MOST_KEYS = 3
"""The most keys above the weights: ``params/params/decoder`` of flax and MaxText has two."""


def table_of_equal_names(source: CheckpointReader, target: CheckpointReader) -> MappingTable:
    """The mapping from convention `SOURCE` to `TARGET`. MappingError if the names differ."""
    sides = {SOURCE: source, TARGET: target}
    separators = {name: "/" if reader.format in TREE_FORMATS else "." for name, reader in sides.items()}
    ours, theirs = _names(source), _names(target)
    pairs = itertools.product(_without_beginnings(ours), _without_beginnings(theirs))
    shared, union = max(((a & b, a | b) for a, b in pairs), key=lambda pair: len(pair[0]))
    if not shared:
        raise MappingError(
            f"expected a mapping (--mapping) from {source.path} to {target.path}, whose weights have other names: "
            f"{first_of(list(map('.'.join, ours)), 2)} and {first_of(list(map('.'.join, theirs)), 2)}"
        )
    rules = tuple(
        Rule({side: (Entry.parse(mark.join(keys)),) for side, mark in separators.items()}, optional=True)
        for keys in sorted(union)
    )
    conventions = {
        side: Convention(side, mark, "orbax" if mark == "/" else "dcp") for side, mark in separators.items()
    }
    return MappingTable("of equal names", rules, conventions=conventions)


_Keys = tuple[str, ...]


def _names(reader: CheckpointReader) -> list[_Keys]:
    """The keys of each tensor that may be a weight, without the key that only holds nnx's value."""
    names = []
    for info in reader.tensors.values():
        keys = tuple(part for key in info.path for part in str(key).split("."))
        if keys[0] not in OPTIMIZER_KEYS and not is_carried(info, between_trees=False):
            names.append(keys[:-1] if keys[-1] == "value" and len(keys) > 1 else keys)
    return names


def _without_beginnings(names: list[_Keys]) -> list[frozenset[_Keys]]:
    """The names, and the names without one, two and three first keys, as far as all have these keys."""
    found = [frozenset(names)]
    for count in range(1, _MOST_KEYS + 1):
        if len({keys[:count] for keys in names}) != 1 or min(map(len, names)) <= count:
            break
        found.append(frozenset(keys[count:] for keys in names))
    return found
