"""Compares a few elements of two checkpoints to check a fit."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from bridge.checkpoints.ground.outputs import common_dtype
from bridge.core.formats.tensors.base import Box, CheckpointReader, unreadable
from bridge.core.mapping.language.expression import Expression
from bridge.core.mapping.language.operations import as_dtype
from bridge.propose.axes import Entry, Fit
from bridge.propose.names import INDEX_NAMES
from bridge.propose.text import Namer, entry_text

_SAMPLES = 24

Verdict = Literal["agree", "differ", "same", "unreadable"]


class Evidence:
    """Compares single elements of two open checkpoints; each element is read once."""

    def __init__(self, a: CheckpointReader, b: CheckpointReader) -> None:
        self._readers = (a, b)
        self._unreadable = (unreadable(a), unreadable(b))
        self._read: dict[tuple[int, str, tuple[int, ...]], np.ndarray] = {}
        self._known: dict[int, tuple[Fit, Verdict]] = {}

    def agrees(self, fit: Fit) -> bool:
        """Whether elements at random places agree. Elements that all have one value prove nothing and do not count."""
        return self.verdict(fit) == "agree"

    def verdict(self, fit: Fit) -> Verdict:
        """The result for elements at random places; "same" if they agree but all have one value."""
        if id(fit) not in self._known:
            self._known[id(fit)] = (fit, self._compare(fit))
        return self._known[id(fit)][1]

    def _compare(self, fit: Fit) -> Verdict:
        if any(
            info.name in closed
            for entries, closed in zip((fit.a, fit.b), self._unreadable, strict=True)
            for entry in entries
            for info in entry.family.members.values()
        ):
            return "unreadable"
        names = Namer(()).names(fit)
        sizes = {names.get(x, x): n for x, n in fit.sizes.items()}
        left, right = (_blocks(entries, names, sizes) for entries in (fit.a, fit.b))
        rng = random.Random(0)
        seen = set()
        for axes in sorted(left, key=sorted):
            for _ in range(_SAMPLES):
                indices = {
                    x: rng.choice((0, sizes[x] - 1)) if x in INDEX_NAMES else rng.randrange(sizes[x])
                    for x in axes
                }
                x, y = self._element(0, *left[axes], indices), self._element(1, *right[axes], indices)
                dtype = common_dtype(x.dtype, y.dtype)
                if dtype is None:
                    return "differ"
                x, y = as_dtype(x, dtype), as_dtype(y, dtype)
                if x.tobytes() != y.tobytes():
                    return "differ"
                seen.add(x.tobytes())
        return "agree" if len(seen) > 1 else "same"

    def _element(
        self,
        side: int,
        entry: Entry,
        block: Sequence[tuple[int, Mapping[str, int]]],
        indices: Mapping[str, int],
    ) -> np.ndarray:
        index = tuple(start + sum(step * indices[x] for x, step in terms.items()) for start, terms in block)
        names = re.findall(r"\{\w\}", entry.path)
        every = zip(names, entry.family.numbers, strict=True)
        numbers = tuple(of_index[indices[name]] for name, of_index in every)
        key = (side, entry.family.members[numbers].name, index)
        if key not in self._read:
            box = Box(index, (1,) * len(index))
            self._read[key] = self._readers[side].read(key[1], box)
        return self._read[key]


def _blocks(
    entries: Sequence[Entry], names: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[frozenset[str], tuple[Entry, list[tuple[int, dict[str, int]]]]]:
    """For each set of elementary axes, the tensor that contains them and their positions on each of its axes."""
    blocks = {}
    for entry in entries:
        expression = Expression.parse(entry_text(entry, names).partition(" : ")[2])
        indices = frozenset(re.findall(r"\{\w\}", entry.path))
        for alternative in expression.alternatives(sizes):
            block = [(affine.offset, dict(affine.terms)) for affine in alternative]
            blocks[indices.union(*(terms for _, terms in block))] = (entry, block)
    return blocks
