"""Pipelines of diffusers: folders with a model each, named by model_index.json, read as one tree.

model_index.json                                    "unet": ["diffusers", "UNet2DConditionModel"], ...
unet/config.json, diffusion_pytorch_model.safetensors        unet.conv_in.weight
vae/...                                                      vae.encoder.conv_in.weight
tokenizer/vocab.json, scheduler/scheduler_config.json        no weights: go along as they are
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bridge.core.formats.dcp.metadata import metadata_files
from bridge.core.formats.files.manifest import MANIFEST_FILE
from bridge.core.formats.orbax.item import TREE_FILE
from bridge.core.formats.reading.regular_files import MAX_SMALL_FILE, is_plain_name, regular_file, small_file
from bridge.core.formats.reading.weight_index import INDEX_END
from bridge.core.formats.safetensors.files import holds_safetensors
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.whole.read_only import directory_format

PIPELINE_FILE: Final = "model_index.json"
_BESIDE: Final = (".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken")
_OF_WEIGHTS: Final = (INDEX_END, MANIFEST_FILE, ".manifest.json")


def pipeline_parts(path: Path) -> dict[str, Path]:
    """The folders with weights of the pipeline at `path`, by name, in the order of its index; none if it is none.

    CheckpointError for an index that is malformed, or that names a folder which is not there.
    """
    if not (path / PIPELINE_FILE).is_file():
        return {}
    # A converted pipeline has the index beside its weights.
    if metadata_files(path) or any((path / name).exists() for name in (TREE_FILE, "_CHECKPOINT_METADATA")):
        return {}
    if holds_safetensors(path) or directory_format(path) is not None:
        return {}
    return {name: path / name for name in _folders(path) if _has_weights(path / name)}


def pipeline_companions(path: Path) -> Mapping[str, Path]:
    """The files of the pipeline at `path` that are no weights, by their name below `path`.

    Of a converted pipeline, too, which has no folders but those with such files.
    """
    found = {PIPELINE_FILE: regular_file(path, PIPELINE_FILE, "the index")[0]}
    for folder in filter(lambda name: (path / name).is_dir(), _named(path)):
        for file in sorted((path / folder).iterdir()):
            if file.name.endswith(_BESIDE) and not file.name.endswith(_OF_WEIGHTS) and file.is_file():
                place, size = regular_file(file.parent, file.name, f"{folder}/{file.name}")
                if size > MAX_SMALL_FILE:
                    raise CheckpointError(f"{place}: expected at most {MAX_SMALL_FILE} bytes, got {size}")
                found[f"{folder}/{file.name}"] = place
    return found


def _folders(path: Path) -> list[str]:
    """The folders that the index names. CheckpointError where one is not there."""
    named = _named(path)
    for name in named:
        if not (path / name).is_dir():
            raise CheckpointError(
                f"{path / PIPELINE_FILE}: expected a folder {name!r:.200} beside it, found none: fetch all of it"
            )
    return named


def _named(path: Path) -> list[str]:
    data = small_file(path, PIPELINE_FILE, "the index", most=1 << 20)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path / PIPELINE_FILE}: malformed or truncated JSON: {error!s:.200}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path / PIPELINE_FILE}: expected names of folders, found another document")
    # Parts that a pipeline goes without are [null, null]; other entries are settings.
    named = [
        name
        for name, value in content.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    ]
    for name in named:
        if not is_plain_name(name):
            raise CheckpointError(
                f"{path / PIPELINE_FILE}: expected names of folders beside it, found {name!r:.200}"
            )
    return named


def _has_weights(folder: Path) -> bool:
    return holds_safetensors(folder) or directory_format(folder) is not None
