"""Several checkpoints read as one tree: items of an Orbax step, or folders of a pipeline of diffusers.

step_10/params/_METADATA       kernel, bias         params/kernel, params/bias
step_10/opt_state/_METADATA    0/mu/kernel          opt_state/0/mu/kernel

model_index.json                                    "unet": ["diffusers", "UNet2DConditionModel"], ...
unet/config.json, diffusion_pytorch_model.safetensors        unet.conv_in.weight
tokenizer/vocab.json, scheduler/scheduler_config.json        no weights: copied unchanged
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from bridge.core.formats.dcp.metadata import metadata_files
from bridge.core.formats.files.manifest import MANIFEST_FILE
from bridge.core.formats.orbax.item import TREE_FILE, has_items, items_of_one_state, named_items
from bridge.core.formats.reading.regular_files import MAX_SMALL_FILE, is_plain_name, regular_file, small_file
from bridge.core.formats.reading.weight_index import INDEX_END
from bridge.core.formats.safetensors.files import SAFETENSORS_FILES
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    Checksums,
    Loan,
    TensorInfo,
    TreePath,
    Wanted,
    unreadable,
)
from bridge.core.formats.tensors.leaves import kinds_of, separator_of
from bridge.core.formats.tensors.wrapping import ClosedAtEnd, ReadWhenAsked
from bridge.core.formats.whole.read_only import directory_format
from bridge.core.text_files import parse_json


class JoinedReader(ClosedAtEnd):
    """The checkpoints of one directory, each below a key; see `CheckpointReader`. Closing it closes them.

    Names consist of a key and a part's name, joined as in the format.
    """

    def __init__(self, path: Path | str, format: str, parts: Mapping[str, CheckpointReader]) -> None:
        self.path, self.format = path, format
        self.parts = parts
        separator = separator_of(format)
        places: dict[str, tuple[CheckpointReader, str]] = {}
        tensors: dict[str, TensorInfo] = {}
        object_paths: dict[str, TreePath] = {}
        kinds: dict[str, str] = {}
        closed: dict[str, str] = {}
        for key, part in parts.items():
            for name, info in part.tensors.items():
                joined = f"{key}{separator}{name}"
                places[joined] = part, name
                tensors[joined] = TensorInfo(joined, (key, *info.path), info.shape, info.dtype, info.chunks)
            for name, below in part.object_paths.items():
                places[f"{key}{separator}{name}"] = part, name
                object_paths[f"{key}{separator}{name}"] = (key, *below)
            kinds |= {f"{key}{separator}{name}": leaf_kind for name, leaf_kind in kinds_of(part).items()}
            closed |= {f"{key}{separator}{name}": why for name, why in unreadable(part).items()}
        self._places = places
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.object_paths: Mapping[str, TreePath] = MappingProxyType(object_paths)
        self.kinds: Mapping[str, str] = MappingProxyType(kinds)
        self.unreadable: Mapping[str, str] = MappingProxyType(closed)
        self.objects: Mapping[str, object] = ReadWhenAsked(object_paths, self._object)

    def replaced(self, change: Callable[[CheckpointReader], CheckpointReader]) -> JoinedReader:
        """The same tree, made of parts that ``change`` returns for these parts."""
        return JoinedReader(self.path, self.format, {key: change(part) for key, part in self.parts.items()})

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`."""
        part, own = self._places[name]
        return part.read(own, box)

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """One block where it is in the file; see `CheckpointReader.lend`."""
        part, own = self._places[name]
        return part.lend(own, box, offset)

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """All of each of these small tensors into memory; see `CheckpointReader.read_into`."""
        sums: list[Checksums | None] = []
        places = [(*self._places[name], target) for name, target in wanted]
        for part, run in itertools.groupby(places, itemgetter(0)):
            sums += part.read_into([(own, target) for _, own, target in run])
        return sums

    def files(self) -> Sequence[Path]:
        """The files of all parts."""
        return tuple(file for part in self.parts.values() for file in part.files())

    def checksummed(self, name: str) -> bool:
        """Whether every chunk of a tensor has a checksum that reading verifies."""
        part, own = self._places[name]
        says: Callable[[str], bool] | None = getattr(part, "checksummed", None)
        return says is not None and says(own)

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        for part in self.parts.values():
            part.close()

    def _object(self, name: str) -> object:
        part, own = self._places[name]
        return part.objects[own]


PIPELINE_FILE: Final = "model_index.json"
_BESIDE: Final = (".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken")
_OF_WEIGHTS: Final = (INDEX_END, MANIFEST_FILE, ".manifest.json")


def pipeline_parts(path: Path) -> dict[str, Path]:
    """The folders with weights of the pipeline at `path`, by name, in the order of its index; none without a pipeline.

    CheckpointError for an index that is malformed, or that names a missing folder.
    """
    if not (path / PIPELINE_FILE).is_file():
        return {}
    # A converted pipeline has the index next to its weights.
    if metadata_files(path) or any((path / name).exists() for name in (TREE_FILE, "_CHECKPOINT_METADATA")):
        return {}
    if _has_weights(path):
        return {}
    return {name: path / name for name in _folders(path) if _has_weights(path / name)}


def pipeline_companions(path: Path) -> Mapping[str, Path]:
    """The files of the pipeline at `path` that are not weights, by their name below `path`.

    Also for a converted pipeline, which only has folders with such files.
    """
    files = {PIPELINE_FILE: regular_file(path, PIPELINE_FILE, "the index")[0]}
    for folder in filter(lambda name: (path / name).is_dir(), _named(path)):
        for file in sorted((path / folder).iterdir()):
            if file.name.endswith(_BESIDE) and not file.name.endswith(_OF_WEIGHTS) and file.is_file():
                name = f"{folder}/{file.name}"
                files[name], _ = regular_file(file.parent, file.name, name, most=MAX_SMALL_FILE)
    return files


def _folders(path: Path) -> list[str]:
    """The folders that the index names. CheckpointError if one is missing."""
    named = _named(path)
    for name in named:
        if not (path / name).is_dir():
            raise CheckpointError(
                f"{path / PIPELINE_FILE}: expected a folder {name!r:.200} next to this file, found none: fetch the "
                "whole pipeline"
            )
    return named


def _named(path: Path) -> list[str]:
    data = small_file(path, PIPELINE_FILE, "the index", most=1 << 20)
    content = parse_json(data, str(path / PIPELINE_FILE), CheckpointError, "JSON")
    if not isinstance(content, dict):
        raise CheckpointError(f"{path / PIPELINE_FILE}: expected names of folders, found another document")
    # Parts that a pipeline lacks are [null, null]; other entries are settings.
    named = [
        name
        for name, value in content.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    ]
    for name in named:
        if not is_plain_name(name):
            raise CheckpointError(
                f"{path / PIPELINE_FILE}: expected names of folders next to this file, found {name!r:.200}"
            )
    return named


def _has_weights(folder: Path) -> bool:
    return SAFETENSORS_FILES.is_one(folder) or directory_format(folder) is not None


def parts_of(path: Path, items: Sequence[str] = ()) -> dict[str, Path]:
    """The places of the parts of the checkpoint at `path`, by name; none if it has no parts.

    items: the requested parts. CheckpointError if one is missing.
    """
    twice = sorted({name for name in items if items.count(name) > 1})
    if twice:
        raise CheckpointError(f"{path}: expected each item once, got {', '.join(twice)} twice (--item)")
    if not path.is_dir():
        if items:
            raise CheckpointError(f"{path}: expected a checkpoint of several items (--item), found one file")
        return {}
    if metadata_files(path) and not items:
        return {}
    folders = pipeline_parts(path)
    if not folders:
        return named_items(path, items) if items else items_of_one_state(path)
    missing = [name for name in items if name not in folders]
    if missing:
        raise CheckpointError(
            f"{path}: expected {', '.join(missing)} (--item), found folders with weights: {', '.join(folders)}"
        )
    return {name: folders[name] for name in items} if items else folders


def has_parts(path: Path) -> bool:
    """Whether there are parts that can be requested by name."""
    return path.is_dir() and (has_items(path) or bool(pipeline_parts(path)))
