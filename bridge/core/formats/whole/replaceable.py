"""Whether a path contains one checkpoint and nothing else. Only then may it be replaced: replacing removes all of it.

runs/step_1/.metadata, __0_0.distcp              may be replaced
runs/step_1/.metadata, __0_0.distcp, config.json may be replaced: config.json stays, or becomes the new one's
runs/step_1/.metadata, __0_0.distcp, notes.txt   not: notes.txt would be lost
runs            (step_1, step_2 and others)      not: they are several checkpoints
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bridge.core.formats.dcp.metadata import metadata_files
from bridge.core.formats.files.journal import JOURNAL_FILE
from bridge.core.formats.files.manifest import MANIFEST_FILE
from bridge.core.formats.files.part_files import PARTS_FOLDER
from bridge.core.formats.orbax.item import COMMIT_FILE, TREE_FILE
from bridge.core.formats.reading.model_files import is_companion
from bridge.core.formats.safetensors.files import INDEX_SUFFIX, SAFETENSORS_FILES, SUFFIX
from bridge.core.formats.saving.steps import METRICS_FILE
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.whole.companions import Companions
from bridge.core.formats.whole.composite import PIPELINE_FILE
from bridge.core.text import first_of

_OURS: Final = (MANIFEST_FILE, JOURNAL_FILE, PARTS_FOLDER, METRICS_FILE)
_DCP: Final = (".metadata", "__*.metadata", "*.distcp")
_ORBAX_ROOTS: Final = (TREE_FILE, "_CHECKPOINT_METADATA", "orbax.checkpoint")
_ORBAX_FILES: Final = (
    *(*_ORBAX_ROOTS, COMMIT_FILE, "manifest.ocdbt", "_sharding", "_strings.json", "checkpoint"),
    *("d", "array_metadatas", "ocdbt.process_*", "descriptor", "metrics"),
)
# Directories of items and arrays may have any name, but contain one of these: trees, zarr 2 and 3, JSON, msgpack.
_ORBAX_MEMBERS: Final = (*_ORBAX_ROOTS, ".zarray", "zarr.json", "metadata", "metrics", "checkpoint")


def require_replaceable(path: Path) -> None:
    """CheckpointError unless the file or directory at `path` is a checkpoint and nothing else.

    Only names of files count: a damaged checkpoint may be replaced, too.
    """
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link: expected the directory or file itself to replace, give "
            f"{os.path.realpath(path)}"
        )
    if not path.is_dir():
        if not path.name.endswith(SUFFIX):
            raise CheckpointError(
                f"{path} is a file that does not end in {SUFFIX}: expected a checkpoint to replace; remove the file "
                "yourself, or choose another name"
            )
        return
    foreign = _foreign(path)
    if foreign:
        raise CheckpointError(
            f"{path} holds more than one checkpoint, and replacing removes all of it: found also "
            f"{first_of(foreign)}; move that elsewhere, or choose another name"
        )


def _foreign(path: Path) -> list[str]:
    """Names in this directory that do not belong to its checkpoint. CheckpointError if it has no checkpoint."""
    if metadata_files(path):
        return _others(path, (*_DCP, *_OURS))
    if any((path / name).exists() for name in _ORBAX_ROOTS):
        return _others_of_orbax(path)
    names = sorted(child.name for child in path.iterdir())
    if any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        files = SAFETENSORS_FILES.find(path)
        ours = {*files.names, files.index, *_OURS}
        return sorted(name for name in names if name not in ours and not _stays(path / name))
    raise CheckpointError(
        f"{path} is not a checkpoint: expected one to replace, with its files directly in the directory, found "
        f"{first_of(names) or 'an empty directory'}; give the path of one checkpoint, or choose another name"
    )


def _others_of_orbax(path: Path) -> list[str]:
    foreign = []
    for name in _others(path, (*_ORBAX_FILES, *_OURS)):
        child = path / name
        if not child.is_dir() or child.is_symlink():
            foreign.append(name)
        elif (child / TREE_FILE).exists():
            foreign += [f"{name}/{other}" for other in _others_of_orbax(child)]
        elif any(child.iterdir()) and not any((child / member).exists() for member in _ORBAX_MEMBERS):
            foreign.append(name)
    return foreign


def _others(path: Path, patterns: Iterable[str]) -> list[str]:
    known = tuple(patterns)
    return sorted(
        child.name
        for child in path.iterdir()
        if not any(fnmatch.fnmatchcase(child.name, pattern) for pattern in known) and not _stays(child)
    )


def _stays(child: Path) -> bool:
    """Whether replacing keeps this file; see `Companions.place`."""
    if child.is_dir() and not child.is_symlink():
        # A folder of a pipeline that contains only configuration files.
        inside = [f"{child.name}/{file.name}" for file in child.iterdir()]
        return bool(inside) and Companions.beside(child.parent).files.keys() >= set(inside)
    named = is_companion(child.name) or child.name == PIPELINE_FILE
    return named and child.name in Companions.beside(child.parent).files
