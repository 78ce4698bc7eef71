"""Several writers of one checkpoint, each with its own files: who has which chunks, and how the files are joined.

runs/step_40.tmp-5c0de1f2/              becomes step_40 when all parts are there
  twinshard.journal                     what is converted from what, into how many parts; locked by whoever commits
  twinshard.parts/                      removed once step_40 is there
    plan.json                           all pieces of all parts
    part_1/                             a part that is complete, with its manifest
    part_2.tmp-0b7e99d3/                one that is being written, or whose writer was killed
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.core.formats.files.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestFile,
    ManifestTensor,
    read_manifest,
    render_manifest,
)
from bridge.core.formats.tensors.base import Box, CheckpointError

PARTS_FOLDER = "twinshard.parts"


@dataclass(frozen=True)
class Share:
    """What one of several writers writes.

    number: the writer's number, from 1. chunks: for each tensor with chunks in this share, by the tensor's name in the
    writer, the numbers of the first chunk and the one after the last, in row-major order. Writer 1 writes the objects.
    """

    number: int
    chunks: Mapping[str, tuple[int, int]]

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"expected a writer's number from 1, got {self.number}")

    def own(self, name: str, chunks: tuple[Box, ...]) -> tuple[Box, ...]:
        """The chunks of a tensor that this writer writes. KeyError for a tensor that only other writers write."""
        first, stop = self.chunks[name]
        return chunks[first:stop]


def part_manifest(part: Path) -> Manifest:
    """The manifest of a part. CheckpointError when there is none."""
    manifest = read_manifest(part)
    if manifest is None:
        raise CheckpointError(
            f"{part}: expected the manifest of a part, found none: remove it, and write it again"
        )
    return manifest


def write_joint_manifest(
    folder: Path, format: str, parts: Sequence[Manifest], files: Mapping[str, ManifestFile], conversion: str
) -> None:
    """Write the manifest of the checkpoint in `folder` that joins these parts. CheckpointError when they contradict."""
    objects = {name: crc for part in parts for name, crc in part.objects.items()}
    whole = Manifest(format, _tensors_of(parts), objects, files, conversion)
    (folder / MANIFEST_FILE).write_bytes(render_manifest(whole))


def move_up(source: Path, target: Path, size: int) -> None:
    """Move a part's file to its place in the checkpoint, or leave it there if a killed attempt has already moved it.

    CheckpointError if the file is in neither place, or has a different size in bytes.
    """
    try:
        # A rename within one file system moves no bytes and is atomic: the next attempt continues after a killed one.
        os.rename(source, target)
    except FileNotFoundError:
        if not target.exists():
            raise CheckpointError(
                f"{source}: expected a file of {size} bytes, found none: remove {source.parent}, and write this part "
                "again"
            ) from None
    if target.stat().st_size != size:
        raise CheckpointError(
            f"{target}: expected {size} bytes as in the manifest of its part, found {target.stat().st_size}: remove "
            f"{source.parent}, and write this part again"
        )


def _tensors_of(manifests: Iterable[Manifest]) -> dict[str, ManifestTensor]:
    """The tensors of all parts, each with its chunks from all parts. CheckpointError if parts contradict each other."""
    tensors: dict[str, ManifestTensor] = {}
    chunks: dict[str, dict[Box, int]] = {}
    for manifest in manifests:
        for name, tensor in manifest.tensors.items():
            first = tensors.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"tensor {name!r}: expected {first.dtype} {first.shape} in all parts, got {tensor.dtype} "
                    f"{tensor.shape}"
                )
            chunks.setdefault(name, {}).update(tensor.chunks)
    return {
        name: ManifestTensor(tensor.dtype, tensor.shape, chunks[name]) for name, tensor in tensors.items()
    }
