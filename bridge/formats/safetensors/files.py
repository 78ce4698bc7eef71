"""Which files make up a safetensors checkpoint.

weights.safetensors                       one file, whatever its name
dir/model.safetensors                     or the only *.safetensors in the directory
dir/model.safetensors.index.json          Hugging Face shards: the index says which file holds which tensor
   /model-00001-of-00002.safetensors
   /model-00002-of-00002.safetensors
dir/shard-00001-model-00001-of-00001.safetensors    PyTorch's HuggingFaceStorageWriter: each rank's own pieces
   /shard-00002-model-00001-of-00001.safetensors
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from bridge.formats.base import CheckpointError
from bridge.formats.files.model_files import ModelFiles, indexed_files

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_USUAL_FILES: Final = (SINGLE_FILE, f"diffusion_pytorch_{SINGLE_FILE}")
_USUAL_INDEXES: Final = (INDEX_FILE, f"diffusion_pytorch_{INDEX_FILE}")
"""Beside them there may be variants, such as diffusion_pytorch_model.fp16.safetensors."""

_RANK_FILE: Final = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def holds_safetensors(path: Path) -> bool:
    """Whether a file or directory looks like a safetensors checkpoint, by names only."""
    if path.is_dir():
        return any(child.name.endswith((SUFFIX, INDEX_SUFFIX)) for child in path.iterdir())
    return path.name.endswith((SUFFIX, INDEX_SUFFIX))


def find_files(path: Path) -> ModelFiles:
    """The files of the checkpoint at `path`: a file, an index file or a directory.

    CheckpointError when several could be meant, or when the index is malformed or names anything but files beside it.
    """
    if not path.is_dir():
        if path.name.endswith(INDEX_SUFFIX):
            return indexed_files(path)
        return ModelFiles(path.parent, (path.name,))
    names = sorted(child.name for child in path.iterdir())
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    index = next(
        (name for name in _USUAL_INDEXES if name in indexes), indexes[0] if len(indexes) == 1 else None
    )
    if index is not None:
        return indexed_files(path / index)
    single = next((name for name in _USUAL_FILES if name in files), files[0] if len(files) == 1 else None)
    if not indexes and single is not None:
        return ModelFiles(path, (single,))
    if not indexes and files and all(_RANK_FILE.fullmatch(name) for name in files):
        return ModelFiles(path, tuple(files))
    found = indexes or files
    raise CheckpointError(
        f"{path}: expected {INDEX_FILE}, {SINGLE_FILE} or one *{SUFFIX} file, found {', '.join(found[:5]) or 'none'}"
        f"{', ...' if len(found) > 5 else ''}: {'give the path of one of them' if found else 'is this the directory?'}"
    )
