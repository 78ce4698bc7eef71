"""Companions: small files beside weights without which programs cannot use them, such as config.json and a tokenizer.

    hf_folder/config.json, tokenizer.json, model.safetensors   ->   flax/config.json, tokenizer.json, _METADATA, d/ ...

They travel byte for byte, whatever the conversion does to names, layouts and dtypes: a later conversion reads sizes of
axes from the same `config.json`. Only its `quantization_config` stays behind where weights were dequantized. Code
(*.py), notes and licences are no companions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bridge.core.formats.orbax.item import STEP_FILE, TREE_FILE
from bridge.core.formats.reading.companion_names import CONFIG_FILE, is_companion
from bridge.core.formats.reading.regular_files import MAX_SMALL_FILE, regular_file, small_file
from bridge.core.formats.stores.reader import home_of
from bridge.core.formats.stores.upload_path import UploadPath
from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader
from bridge.core.formats.whole.pipeline import PIPELINE_FILE, pipeline_companions

_MAX_CONFIG: Final = 1 << 20
ADAPTER: Final = "adapter_"
ADAPTER_CONFIG: Final = "adapter_config.json"
"""Where it is, `from_pretrained` looks for the adapter's weights."""
QUANTIZATION: Final = "quantization_config"


def companions_home(place: Path) -> Path:
    """Where the companions of the checkpoint at ``place`` are: of an item of an Orbax step, beside the items."""
    if not (place / TREE_FILE).is_file() or any(is_companion(child.name) for child in place.iterdir()):
        return place
    return place.parent if (place.parent / STEP_FILE).is_file() else place


def config_beside(reader: CheckpointReader) -> tuple[Mapping[str, object], Path] | None:
    """The fields of a checkpoint's `config.json`, and the path of that file; None where the folder has no such file.

    CheckpointError when the file cannot be read.
    """
    home = companions_home(home_of(reader))
    directory = home if home.is_dir() else home.parent
    file = directory / CONFIG_FILE
    if not file.exists():
        return None
    data = small_file(directory, CONFIG_FILE, "the configuration of the model", most=_MAX_CONFIG)
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected JSON: {error!s:.200}") from error
    return fields if isinstance(fields, dict) else {}, file


@dataclass(frozen=True)
class Companions:
    """The companions of a source, which go along to its copy.

    files: by name. refused: why others of these names do not go along. kept: names of those of a replaced checkpoint
    that stay, since the source has none of their name; filled by `place`. dequantized: whether the copy's weights are
    not quantized as `config.json` says of the source's.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    dequantized: bool = False

    @staticmethod
    def beside(path: Path) -> Companions:
        """Those of the checkpoint at ``path``, a directory or one file.

        Files beside one file are a model's only where a `config.json` is among them: the directory may be anybody's.
        """
        directory = path if path.is_dir() else path.parent
        if directory != path and not (directory / CONFIG_FILE).is_file():
            return Companions()
        files: dict[str, Path] = {}
        if (directory / PIPELINE_FILE).is_file():
            # Of a converted pipeline, too, whose folders hold nothing else.
            with suppress(CheckpointError):
                files.update(pipeline_companions(directory))
        refused: dict[str, str] = {}
        for name in sorted(child.name for child in directory.iterdir() if is_companion(child.name)):
            try:
                file, size = regular_file(directory, name, name)
                if size > MAX_SMALL_FILE:
                    raise CheckpointError(f"{file}: expected at most {MAX_SMALL_FILE} bytes, got {size}")
                files[name] = file
            except CheckpointError as error:
                refused[name] = str(error)
        return Companions(files, refused)

    def without(self, reasons: Mapping[str, str]) -> Companions:
        """Those that go along but for these names, each with the reason."""
        here = {name: why for name, why in reasons.items() if name in self.files}
        files = {name: file for name, file in self.files.items() if name not in here}
        return replace(self, files=files, refused={**self.refused, **here})

    def place(self, working: Path, target: Path) -> None:
        """Write them into the directory in which the checkpoint that is to be at ``target`` is complete.

        Those of a checkpoint that is there now, and is replaced, are written as well, unless the source has them.
        """
        if isinstance(working, UploadPath):
            # A checkpoint in a store replaces nothing.
            for name, file in self.files.items():
                (working / name).write_bytes(self._content(name, file))
            return
        old = Companions.beside(target).files if target.is_dir() else {}
        for name, file in {**old, **self.files}.items():
            data = self._content(name, file)
            (working / name).parent.mkdir(exist_ok=True)
            # A link of this name, from an attempt that was killed, would lead elsewhere.
            (working / name).unlink(missing_ok=True)
            with open(working / name, "xb") as copy:
                copy.write(data)
                copy.flush()
                os.fsync(copy.fileno())
        self.kept[:] = [name for name in old if name not in self.files]

    def _content(self, name: str, file: Path) -> bytes:
        data = small_file(file.parent, file.name, name)
        if not self.dequantized or file.name != CONFIG_FILE:
            return data
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            return data
        if not isinstance(fields, dict) or QUANTIZATION not in fields:
            return data
        return (json.dumps({k: v for k, v in fields.items() if k != QUANTIZATION}, indent=2) + "\n").encode()
