"""Parts of a safetensors checkpoint made into one: their shards side by side, numbered anew, under one index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bridge.core.formats.files.manifest import ManifestFile, file_entry
from bridge.core.formats.files.parts import move_up, part_manifest, write_joint_manifest
from bridge.core.formats.safetensors.files import INDEX_FILE, SINGLE_FILE, SUFFIX


def join(folder: Path, parts: Sequence[Path], conversion: str) -> None:
    """Make `folder` a checkpoint of these parts, in their order; the same again after a kill at any moment.

    CheckpointError when a file of a part is missing.
    """
    manifests = [part_manifest(part) for part in parts]
    indexes = [json.loads((part / INDEX_FILE).read_text()) for part in parts]
    shards = [
        (number, name)
        for number, index in enumerate(indexes)
        for name in dict.fromkeys(index["weight_map"].values())
    ]
    # Without any tensor, the first part has the objects.
    shards = shards or [(0, SINGLE_FILE)]
    files: dict[str, ManifestFile] = {}
    renamed: dict[tuple[int, str], str] = {}
    for position, (number, name) in enumerate(shards):
        new = f"model-{position + 1:05}-of-{len(shards):05}{SUFFIX}" if len(shards) > 1 else SINGLE_FILE
        renamed[number, name] = new
        files[new] = manifests[number].files[name]
        move_up(parts[number] / name, folder / new, files[new].size)
    if len(shards) > 1:
        weight_map = {
            tensor: renamed[number, name]
            for number, index in enumerate(indexes)
            for tensor, name in index["weight_map"].items()
        }
        total = sum(index["metadata"]["total_size"] for index in indexes)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        files[INDEX_FILE] = file_entry(folder / INDEX_FILE)
    write_joint_manifest(folder, "safetensors", manifests, files, conversion)
