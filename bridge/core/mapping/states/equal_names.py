"""A mapping between two checkpoints whose weights have equal names, up to separators and a common beginning.

    model.layers.0.attn.weight            params/layers/0/attn/weight
    optimizer.state.layers.0...exp_avg    opt_state/0/mu/layers/0/attn/weight

The weights need no translation. The mapping tells which moments belong to which weight.
"""

from __future__ import annotations

from collections.abc import Mapping
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

_ROOTS = frozenset({"model", "params", "module", "state_dict", "weights"})
"""Keys above all weights that optimizer states may lack."""


def table_of_equal_names(source: CheckpointReader, target: CheckpointReader) -> MappingTable:
    """The mapping from convention `SOURCE` to `TARGET`. MappingError if most names differ."""
    separators = {
        name: "/" if reader.format in TREE_FORMATS else "."
        for name, reader in ((SOURCE, source), (TARGET, target))
    }
    ours, theirs = (
        _weights(reader, separators[name]) for name, reader in ((SOURCE, source), (TARGET, target))
    )
    every, shared = {**ours, **theirs}, ours.keys() & theirs.keys()
    if 2 * len(shared) <= len(every):
        examples = [
            first_of(sorted(".".join(keys) for keys in names.keys() - shared), 2) or "no other"
            for names in (ours, theirs)
        ]
        raise MappingError(
            f"{source.path} and {target.path} have weights with other names: "
            f"{len(shared)} of {len(ours)} names are equal, but not {examples[0]}, and there {examples[1]}"
        )
    rules = tuple(
        Rule(
            {
                side: (Entry.parse(names.get(keys, separators[side].join(keys))),)
                for side, names in ((SOURCE, ours), (TARGET, theirs))
            },
            optional=True,
        )
        for keys in sorted(every)
    )
    conventions = {side: Convention(side, mark, "") for side, mark in separators.items()}
    return MappingTable("of equal names", rules, conventions=conventions)


_Keys = tuple[str, ...]


def _weights(reader: CheckpointReader, separator: str) -> Mapping[_Keys, str]:
    """The keys and the name of each tensor that may be a weight, without a root above all that optimizer states lack.

    Without the key that only holds nnx's value, too. A name in a tree may have dots: keys of a state dict.
    """
    names, of_states = {}, set()
    for info in reader.tensors.values():
        keys = tuple(part for key in info.path for part in str(key).split("."))
        if "state" in keys:
            of_states.add(keys[keys.index("state") + 1 : -1])
        elif keys[0] not in OPTIMIZER_KEYS and not is_carried(info, between_trees=False):
            is_value = keys[-1] == "value" and len(keys) > 1
            name = separator.join(map(str, info.path))
            names[keys[:-1] if is_value else keys] = name[: -len("/value")] if is_value else name
    if any(keys[0] in _ROOTS and len(keys) > 1 for keys in names):
        # Next to the root of the weights is the program's own state, such as an epoch.
        names = {keys: name for keys, name in names.items() if len(keys) > 1}
    choices = [names]
    while (roots := {keys[0] if len(keys) > 1 else "" for keys in names}) <= _ROOTS and len(roots) == 1:
        names = {keys[1:]: name[len(keys[0]) + 1 :] for keys, name in names.items()}
        choices.append(names)
    # Trees of states may have the root or not. State dicts of optimizers name weights in one way.
    return max(reversed(choices), key=lambda choice: len(choice.keys() & of_states))
