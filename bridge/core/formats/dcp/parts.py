"""Parts of a DCP checkpoint made into one: their data files side by side, and `.metadata` of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bridge.core.formats.dcp.metadata import METADATA_FILE, parse_rank_metadata
from bridge.core.formats.dcp.metadata_writer import format_metadata
from bridge.core.formats.dcp.writer import data_file, rank_metadata
from bridge.core.formats.files.manifest import file_entry
from bridge.core.formats.files.parts import move_up, part_manifest, write_joint_manifest


def join(folder: Path, parts: Sequence[Path], conversion: str) -> None:
    """Make `folder` a checkpoint of these parts, in their order; the same again after a kill at any moment.

    CheckpointError when they are not the parts of one checkpoint.
    """
    names = [rank_metadata(rank) for rank in range(len(parts))]
    pieces = {name: (part / name).read_bytes() for name, part in zip(names, parts, strict=True)}
    metadata = parse_rank_metadata(pieces, str(folder))
    manifests = [part_manifest(part) for part in parts]
    files = {}
    for rank, (part, manifest) in enumerate(zip(parts, manifests, strict=True)):
        name = data_file(rank)
        move_up(part / name, folder / name, manifest.files[name].size)
        files[name] = manifest.files[name]
    (folder / METADATA_FILE).write_bytes(format_metadata(metadata))
    files[METADATA_FILE] = file_entry(folder / METADATA_FILE)
    write_joint_manifest(folder, "dcp", manifests, files, conversion)
