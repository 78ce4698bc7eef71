"""The planned content of a checkpoint, where in the source its elements come from, and which families may plan it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TreePath
from bridge.core.formats.tensors.leaves import separator_of
from bridge.core.mapping.language.conventions import Convention
from bridge.core.mapping.language.operations import ChangedView, PaddedView
from bridge.core.mapping.language.relation import TensorView, identity
from bridge.core.mapping.language.rules import family_names, load_mapping
from bridge.core.mapping.one_rule.instance import View
from bridge.core.mapping.one_rule.scales import DecodedView
from bridge.core.mapping.states.source_tree import NameIndex


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the destination: a view of source tensors, or a known 0-d value (the step count)."""

    name: str
    path: TreePath
    content: View | DecodedView | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.content.shape

    @property
    def dtype(self) -> np.dtype:
        return self.content.dtype

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).numel * self.dtype.itemsize

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of its source tensors; none if its value is known."""
        if isinstance(self.content, np.ndarray):
            return ()
        return tuple(dict.fromkeys(block.source for block in self.content.blocks))

    @property
    def unchanged(self) -> bool:
        """Whether its elements are those of one source, at the same indices."""
        if not isinstance(self.content, TensorView) or len(self.content.blocks) != 1:
            return False
        (block,) = self.content.blocks
        return block.source_index == block.target_index

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The elements of ``box``, C-contiguous. Needs memory for the box and for one bounded source region."""
        return self.content if isinstance(self.content, np.ndarray) else self.content.read(reader, box)


@dataclass(frozen=True)
class TranslationPlan:
    """The planned content of a checkpoint.

    objects: (tree path, name in the source) by name in the destination. notes: (path, value) of further objects by
    name. dropped: names in the source that are left out. conventions: of source and target, if a mapping is used.
    remarks: assumptions of the translation, one sentence each.
    """

    tensors: Mapping[str, PlannedTensor]
    objects: Mapping[str, tuple[TreePath, str]]
    dropped: tuple[str, ...] = ()
    notes: Mapping[str, tuple[TreePath, object]] = field(default_factory=dict)
    conventions: tuple[str, str] | None = None
    remarks: tuple[str, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def inexact(self) -> tuple[str, ...]:
        """Names of the tensors that an operation of the mapping rounds."""
        contents = {name: tensor.content for name, tensor in self.tensors.items()}
        return tuple(
            n
            for n, content in contents.items()
            if isinstance(content, ChangedView | PaddedView) and not content.exact
        )


def carried_over(reader: CheckpointReader, to: str) -> TranslationPlan:
    """The plan of a checkpoint that goes to format `to` unchanged: tensors and objects keep their tree paths.

    Errors as in `collect`.
    """
    planned = [
        PlannedTensor(
            name if reader.format == to else joined_name(info.path, to),
            info.path,
            identity(name, info.shape, info.dtype),
        )
        for name, info in reader.tensors.items()
    ]
    return collect(reader, to, planned, reader.object_paths, (), {})


def collect(
    reader: CheckpointReader,
    to: str,
    planned: list[PlannedTensor],
    object_paths: Mapping[str, TreePath],
    dropped: tuple[str, ...],
    notes: Mapping[TreePath, object],
) -> TranslationPlan:
    """The plan of these tensors. CheckpointError if two tensors, or two objects, would get the same name in format
    `to`."""
    tensors: dict[str, PlannedTensor] = {}
    for tensor in planned:
        if tensor.name in tensors:
            raise CheckpointError(f"two tensors of {reader.path} would both be named {tensor.name} in {to}")
        tensors[tensor.name] = tensor
    objects: dict[str, tuple[TreePath, str]] = {}
    for name, path in object_paths.items():
        if (joined := joined_name(path, to)) in objects:
            raise CheckpointError(f"two objects of {reader.path} would both be named {joined} in {to}")
        objects[joined] = (path, name)
    further = {joined_name(path, to): (path, value) for path, value in notes.items()}
    return TranslationPlan(tensors, objects, dropped, further)


def joined_name(path: TreePath, to: str) -> str:
    """The name of the leaf at ``path`` in format `to`."""
    return separator_of(to).join(map(str, path))


_SAMPLE = 60
_MOST = 0.9
"""The least fraction of names that a convention must know; optimizer state is not recognized by name."""


def fitting(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
    """The families that may translate names ``a`` to names ``b``, and the convention of ``b``; from names alone."""
    fitting_names = []
    left, right = _sample(a), _sample(b)
    for name in family_names() if left and right else ():
        table = load_mapping(name)
        known = {c: NameIndex(table.rules, c) for c in table.conventions}
        sides = {c: [_fits(names, known[c], table.conventions[c]) for names in (left, right)] for c in known}
        into = [c for c, (_, of_b) in sides.items() if of_b]
        if into and any(of_a for c, (of_a, _) in sides.items() if c != into[0]):
            fitting_names.append((name, into[0]))
    return fitting_names


def _sample(names: Sequence[str]) -> list[str]:
    weights = [name for name in names if not re.search(r"optim|opt_state|step|count|rng", name)]
    return weights[:: max(1, len(weights) // _SAMPLE)]


def _fits(names: Iterable[str], index: NameIndex, convention: Convention) -> bool:
    separator = convention.separator
    other = "." if separator == "/" else "/"
    answers = [
        any(
            index.knows(name[start:])
            for start in (0, *(m.end() for m in re.finditer(re.escape(separator), name)))
        )
        for name in (
            candidate if separator in candidate else candidate.replace(other, separator)
            for candidate in names
        )
    ]
    return sum(answers) >= _MOST * len(answers)
