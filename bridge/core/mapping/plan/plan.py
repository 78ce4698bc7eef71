"""The planned content of a checkpoint: every tensor, and where in the source its elements come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TreePath
from bridge.core.formats.tensors.leaves import separator_of
from bridge.core.mapping.language.operations import ChangedView, PaddedView
from bridge.core.mapping.language.relation import TensorView, identity
from bridge.core.mapping.one_rule.instance import View
from bridge.core.mapping.one_rule.scales import DecodedView


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
