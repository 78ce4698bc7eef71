"""Layers that two sides number differently: torch's `nn.Sequential` counts activations, linen the modules of a class.

    net.0.weight [8, 4]     net.2.weight [8, 8]     net.4.weight [3, 8]
    Dense_0/kernel [4, 8]   Dense_1/kernel [8, 8]   Dense_2/kernel [8, 3]

Two series of layers match if neither has another twin: as many layers, and layer by layer tensors of equal sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bridge.core.formats.tensors.base import TensorInfo
from bridge.propose.names import Family, filled, leaf_word, pattern_of

BY_ORDER, BY_SIZES = "layer ", "only layer "
"""Prefixes of the word for a layer's number: other layers of the series have its sizes, or none has."""

_Sizes = tuple[tuple[str, tuple[int, ...]], ...]
"""For a layer: the word of each tensor, and its sizes in any order."""


@dataclass(frozen=True)
class _Series:
    """Layers of one kind under one name. ``numbers``: of the layers; ``sizes`` and names of tensors: per layer."""

    numbers: tuple[int, ...]
    sizes: tuple[_Sizes, ...]
    names: tuple[tuple[str, ...], ...]


def numbered_alike(grouped: Sequence[Family], others: Sequence[Family]) -> bool:
    """Whether the other side has layers with a family's numbers."""
    known = {numbers for family in others for numbers in family.numbers if len(numbers) > 1}
    return any(numbers in known for family in grouped for numbers in family.numbers)


def by_order(a: Sequence[Family], b: Sequence[Family]) -> tuple[list[Family], list[Family]]:
    """Both sides, with each tensor of twin series as a family that has the layer's rank among its words."""
    sides = list(_series(a)), list(_series(b))
    ranks: tuple[dict[str, str], dict[str, str]] = {}, {}
    for number, series in enumerate(sides[0]):
        ours, theirs = ([member for member in side if member.sizes == series.sizes] for side in sides)
        if len(ours) != 1 or len(theirs) != 1 or theirs[0].numbers == series.numbers:
            continue
        counts = Counter(series.sizes)
        for twin, known in zip((series, theirs[0]), ranks, strict=True):
            for rank, names in enumerate(twin.names):
                start = BY_SIZES if counts[twin.sizes[rank]] == 1 else BY_ORDER
                known.update(dict.fromkeys(names, f"{start}{rank} of series {number}"))
    return _ranked(a, ranks[0]), _ranked(b, ranks[1])


def _tensors(family: Family) -> Iterator[tuple[str, TensorInfo]]:
    for numbers, info in family.members.items():
        yield "".join(filled(re.split(r"([./])", family.path), numbers)), info


def _series(families: Sequence[Family]) -> Iterator[_Series]:
    layers: dict[tuple[tuple[str, ...], bool], dict[int, dict[str, tuple[str, tuple[int, ...]]]]] = {}
    for name, info in (pair for family in families for pair in _tensors(family)):
        (*stem, leaf), numbers = pattern_of(re.split(r"[./]", name), True)
        if len(numbers) == 1:
            word = leaf_word(leaf)
            # flax stores statistics separately from weights.
            layer = layers.setdefault((tuple(stem), word in ("mean", "var")), {}).setdefault(numbers[0], {})
            layer[word] = name, tuple(sorted(info.shape))
    for by_number in layers.values():
        kinds: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for number, layer in sorted(by_number.items()):
            kind = tuple(sorted((word, len(sizes)) for word, (_, sizes) in layer.items()))
            kinds.setdefault(kind, []).append(number)
        for alike in kinds.values():
            chosen = [by_number[number] for number in alike]
            if len(chosen) > 1:
                tensors = (((word, sizes) for word, (_, sizes) in layer.items()) for layer in chosen)
                names = tuple(tuple(name for name, _ in layer.values()) for layer in chosen)
                yield _Series(tuple(alike), tuple(tuple(sorted(layer)) for layer in tensors), names)


def _ranked(families: Sequence[Family], ranks: Mapping[str, str]) -> list[Family]:
    ranked: list[Family] = []
    for family in families:
        tensors = dict(_tensors(family))
        if not tensors.keys() & ranks.keys():
            ranked.append(family)
            continue
        words = frozenset(word for word in family.words if not word.isdecimal())
        for name, info in tensors.items():
            own = words | {ranks[name]} if name in ranks else words
            ranked.append(replace(family, path=name, members={(): info}, words=own))
    return ranked
