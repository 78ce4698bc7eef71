"""What a conversion, and a comparison, make of the kinds of leaves: typed PRNG keys, and the structure of the tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bridge.checkpoints.casts import Output
from bridge.formats.base import CheckpointError, CheckpointReader, TreePath
from bridge.formats.leaf_kinds import implied_kinds, key_implementation, kinds_of
from bridge.mapping.plan import PlannedTensor


def carried_kinds(
    reader: CheckpointReader,
    outputs: Iterable[Output],
    objects: Mapping[str, tuple[TreePath, object]],
    origins: Mapping[str, str],
) -> dict[str, str]:
    """The kinds to be told to a conversion's writer, by name in the destination: all but those that are implied.

    outputs, objects: of the destination. origins: the names in the source of those objects that are there.

    CheckpointError where elements of a typed PRNG key would be rearranged: that would be another key.
    """
    known = kinds_of(reader)
    outputs = tuple(outputs)
    told = {output.name: kind for output in outputs if (kind := _kind(reader, output.planned, known)) is not None}
    values = {path: value for path, value in objects.values()}
    implied = implied_kinds((output.path for output in outputs), values)
    for name, old in origins.items():
        kind, path = known.get(old), objects[name][0]
        if kind is not None and implied.get(path) != kind:
            told[name] = kind
    return told


def _kind(reader: CheckpointReader, tensor: PlannedTensor, known: Mapping[str, str]) -> str | None:
    sources = tensor.sources
    whole = tensor.unchanged and reader.tensors[sources[0]].shape == tensor.shape
    if whole:
        return known.get(sources[0])
    for name in sources:
        if key_implementation(known.get(name)) is not None:
            raise CheckpointError(
                f"{reader.path}: tensor {name!r}: expected a mapping that leaves typed PRNG keys as they are, got one that "
                f"rearranges the data of {known[name]}: change its rule, or leave the tensor out (--drop {name!r}) and "
                "make the keys anew"
            )
    return None
