"""What a checkpoint holds, from its metadata alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge.formats import open_checkpoint
from bridge.formats.base import CheckpointError, TensorInfo


@dataclass(frozen=True)
class Group:
    """Tensors below one top-level key of the tree; ``bytes`` are those of their elements."""

    name: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """The contents of a checkpoint. ``unreadable`` says why, for objects whose value is not plain data."""

    path: Path
    format: str
    tensors: tuple[TensorInfo, ...]
    groups: tuple[Group, ...]
    objects: Mapping[str, object]
    unreadable: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return sum(tensor.nbytes for tensor in self.tensors)


def inspect(path: str | os.PathLike[str]) -> Summary:
    """Describe the checkpoint directory ``path``, reading no tensor data.

    Raises FileNotFoundError, or CheckpointError when its metadata is damaged.
    """
    with open_checkpoint(path) as reader:
        tensors = tuple(reader.tensors.values())
        members: dict[str, list[TensorInfo]] = {}
        for tensor in tensors:
            members.setdefault(str(tensor.path[0]), []).append(tensor)
        groups = tuple(
            Group(name, len(group), sum(t.numel for t in group), sum(t.nbytes for t in group))
            for name, group in members.items()
        )
        objects: dict[str, object] = {}
        unreadable: dict[str, str] = {}
        for name in reader.objects:
            try:
                objects[name] = reader.objects[name]
            except CheckpointError as error:
                unreadable[name] = str(error)
        return Summary(Path(path), reader.format, tensors, groups, objects, unreadable)
