"""The contents of a checkpoint, from its metadata alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.checkpoints.ground.checked import manifest_home
from bridge.core.formats import open_checkpoint
from bridge.core.formats.files.certificate import Certificate
from bridge.core.formats.files.manifest import manifest_path, without_certificate
from bridge.core.formats.stores.listing import StoredReader
from bridge.core.formats.stores.store import place_of
from bridge.core.formats.tensors.base import CheckpointError, TensorInfo, TreePath, unreadable
from bridge.core.formats.tensors.leaves import LEAVES, key_types
from bridge.core.formats.tensors.wrapping import home_of
from bridge.core.formats.whole.companions import left_alone
from bridge.core.formats.whole.composite import JoinedReader
from bridge.core.formats.whole.step_paths import Step, at_step
from bridge.core.sharding.layout.drawing import MAX_TENSORS, letter, more_tensors, row_bars, slices_text
from bridge.core.text import counted, human_bytes
from bridge.core.views import Viewed

MAX_BARS = 16
_MAX_LISTED_CHUNKS = 16


@dataclass(frozen=True)
class Group:
    """Tensors below one top-level key of the tree; ``bytes``: of their elements."""

    name: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, repr=False)
class Summary(Viewed):
    """The contents of a checkpoint. ``unreadable`` says why, for tensors that can only be listed, and for
    objects whose value is not plain data.

    manifest: whether it has one of ours, with which `verify` can tell that nothing changed. key_types: by name, the
    implementation of tensors that are typed PRNG keys; their dtype is the key data's. left_alone: by name, files next
    to the checkpoint that look like weights, with the reason why each was not read. object_paths: by name. certificate:
    of the conversion that made the checkpoint, if one did.
    """

    path: Path | str
    format: str
    tensors: tuple[TensorInfo, ...]
    groups: tuple[Group, ...]
    objects: Mapping[str, object]
    unreadable: Mapping[str, str]
    manifest: bool
    key_types: Mapping[str, str]
    left_alone: Mapping[str, str]
    object_paths: Mapping[str, TreePath]
    certificate: Certificate | None = None

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.path}: {self.format}, {counted(len(self.tensors), 'tensor')} in {counted(self.chunks, 'chunk')}, "
            f"{human_bytes(self.bytes)}, {'with its' if self.manifest else 'no'} manifest"
        )

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each tensor."""
        rows = [
            (t.name, t.dtype.name, str(list(t.shape)), human_bytes(t.nbytes), str(len(t.chunks)))
            for t in self.tensors
        ]
        return [("tensor", "dtype", "shape", "size", "chunks"), *rows]

    @property
    def chunks(self) -> int:
        """Stored chunks of all tensors."""
        return sum(len(tensor.chunks) for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return sum(tensor.nbytes for tensor in self.tensors)


def inspect(path: str | os.PathLike[str], *, items: Sequence[str] = (), step: Step | None = None) -> Summary:
    """Describe the checkpoint at ``path``, reading no tensor data. items, step: see `open_checkpoint`.

    Raises FileNotFoundError, or CheckpointError if its metadata is damaged.
    """
    path = at_step(path, step)
    with open_checkpoint(path, items=items) as reader:
        tensors = tuple(reader.tensors.values())
        members: dict[str, list[TensorInfo]] = {}
        for tensor in tensors:
            members.setdefault(str(tensor.path[0]), []).append(tensor)
        groups = tuple(
            Group(name, len(group), sum(t.numel for t in group), sum(t.nbytes for t in group))
            for name, group in members.items()
        )
        objects: dict[str, object] = {}
        reasons = dict(unreadable(reader))
        # The leaf note's entries about keys are shown with the keys, other entries with the objects.
        for name in (name for name in reader.objects if reader.object_paths[name] != LEAVES):
            try:
                objects[name] = reader.objects[name]
            except CheckpointError as error:
                reasons[name] = str(error)
        whole = reader.opened if isinstance(reader, StoredReader) else reader
        parts = whole.parts.values() if isinstance(whole, JoinedReader) else (whole,)
        manifests = [manifest_path(manifest_home(home_of(part))) for part in parts]
        manifest = all(path.is_file() for path in manifests)
        content = manifests[0].read_bytes() if manifest else b""
        _, certificate, problem = without_certificate(content)
        if problem:
            reasons[manifests[0].name] = problem
        return Summary(
            place_of(path),
            reader.format,
            tensors,
            groups,
            objects,
            reasons,
            manifest,
            key_types(reader),
            left_alone(reader),
            {name: reader.object_paths[name] for name in objects},
            certificate,
        )


def chunk_lines(tensors: Sequence[TensorInfo], width: int = 64) -> list[str]:
    """For each of the first tensors, a bar of its rows with a letter for the chunk that stores them, and the chunks."""
    lines = []
    for tensor in tensors[:MAX_TENSORS]:
        bars = row_bars(tensor.shape, tensor.chunks, width)
        rows = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.numel
        lines.append(f"{tensor.name} {list(tensor.shape)}: {f'rows 0:{rows}' if bars else 'no elements'}")
        for bar in bars[:MAX_BARS]:
            where = "" if bar.columns is None else " columns {}:{}".format(*bar.columns)
            cells = "".join("." if chunk is None else letter(chunk) for chunk in bar.cells)
            lines.append(f"  |{cells}|{where}")
        if len(bars) > MAX_BARS:
            lines.append(f"  ... and {len(bars) - MAX_BARS} more ranges of columns")
        chunks = [f"{letter(i)}{slices_text(chunk)}" for i, chunk in enumerate(tensor.chunks) if chunk.numel]
        if chunks:
            more = len(chunks) - _MAX_LISTED_CHUNKS
            end = f" and {more} more" if more > 0 else ""
            lines.append(f"  {' '.join(chunks[:_MAX_LISTED_CHUNKS])}{end}")
    return [*lines, *more_tensors(len(tensors))]
