"""Files next to a checkpoint: companions, which are copied, and weights that are not read.

    hf_folder/config.json, tokenizer.json, model.safetensors   ->   flax/config.json, tokenizer.json, _METADATA, d/ ...

Companions are copied byte for byte, whatever the conversion does to names, layouts and dtypes: a later conversion reads
sizes of axes from the same `config.json`. Only its `quantization_config` is dropped if weights were dequantized. Code
(*.py), notes and licences are not companions. Files that look like weights but are not read are reported:

hf_folder/model.safetensors              read
         /model-mtp-of-00003.safetensors, optimizer.pt, adapter_model.safetensors, 2_Dense/model.safetensors    named
         /config.json, tokenizer.json, training_args.bin, README.md         not reported: nobody would miss them
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bridge.core.formats.dcp.metadata import METADATA_FILE
from bridge.core.formats.files.atomic import is_temporary
from bridge.core.formats.orbax.item import STEP_FILE, TREE_FILE
from bridge.core.formats.reading.model_files import CONFIG_FILE, is_companion, is_numbered, numbered_sets
from bridge.core.formats.reading.regular_files import MAX_SMALL_FILE, regular_file, small_file
from bridge.core.formats.reading.weight_index import INDEX_END
from bridge.core.formats.stores.listing import StoredReader
from bridge.core.formats.stores.upload import UploadPath
from bridge.core.formats.tensors.base import CheckpointError, CheckpointReader
from bridge.core.formats.tensors.wrapping import home_of
from bridge.core.formats.torch_save.deepspeed import shards_beside
from bridge.core.formats.torch_save.files import TRAINING_STATE
from bridge.core.formats.whole.composite import PIPELINE_FILE, JoinedReader, pipeline_companions
from bridge.core.text_files import parse_json

_MAX_CONFIG: Final = 1 << 20
ADAPTER: Final = "adapter_"
ADAPTER_CONFIG: Final = "adapter_config.json"
"""If it exists, `from_pretrained` looks for the adapter's weights."""
QUANTIZATION: Final = "quantization_config"


def companions_home(where: Path) -> Path:
    """The folder with the companions of the checkpoint at ``where``: for an item of an Orbax step, the step."""
    if not (where / TREE_FILE).is_file() or any(is_companion(child.name) for child in where.iterdir()):
        return where
    return where.parent if (where.parent / STEP_FILE).is_file() else where


def config_beside(reader: CheckpointReader) -> tuple[Mapping[str, object], Path] | None:
    """The fields of a checkpoint's `config.json`, and the path of that file; None if the folder has no such file.

    CheckpointError if the file cannot be read.
    """
    home = companions_home(home_of(reader))
    directory = home if home.is_dir() else home.parent
    file = directory / CONFIG_FILE
    if not file.exists():
        return None
    data = small_file(directory, CONFIG_FILE, "the configuration of the model", most=_MAX_CONFIG)
    fields = parse_json(data, str(file), CheckpointError, "JSON")
    return fields if isinstance(fields, dict) else {}, file


@dataclass(frozen=True)
class Companions:
    """The companions of a source, which are copied with it.

    files: by name. refused: why other files with such names are not copied. kept: names of a replaced checkpoint's
    companions that stay, since the source has none with their name; filled by `place`. dequantized: whether the copy's
    weights, unlike the source's, are no longer quantized as `config.json` says.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    dequantized: bool = False

    @staticmethod
    def beside(path: Path) -> Companions:
        """The companions of the checkpoint at ``path``, a directory or one file.

        Files next to a single file belong to a model only if one is a `config.json`: anything may lie there.
        """
        directory = path if path.is_dir() else path.parent
        if directory != path and not (directory / CONFIG_FILE).is_file():
            return Companions()
        files: dict[str, Path] = {}
        if (directory / PIPELINE_FILE).is_file():
            # Also for a converted pipeline, whose folders contain nothing else.
            with suppress(CheckpointError):
                files.update(pipeline_companions(directory))
        refused: dict[str, str] = {}
        for name in sorted(child.name for child in directory.iterdir() if is_companion(child.name)):
            try:
                files[name], _ = regular_file(directory, name, name, most=MAX_SMALL_FILE)
            except CheckpointError as error:
                refused[name] = str(error)
        return Companions(files, refused)

    def without(self, reasons: Mapping[str, str]) -> Companions:
        """The companions without these names, each given with the reason."""
        here = {name: why for name, why in reasons.items() if name in self.files}
        files = {name: file for name, file in self.files.items() if name not in here}
        return replace(self, files=files, refused={**self.refused, **here})

    def place(self, working: Path, target: Path) -> None:
        """Write them into the directory with the complete checkpoint that will move to ``target``.

        Companions of a checkpoint that is being replaced there are written as well, unless the source has them.
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
            # A link of this name, left by a killed attempt, would lead elsewhere.
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


_ENDS: Final = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".msgpack", ".distcp", INDEX_END),
    *(".gguf", ".ggml", ".h5", ".keras", ".onnx", ".ot", ".pdparams", ".tflite", ".nemo"),
)
_RANK_FILE: Final = re.compile(r"shard-(\d{1,6})-model-")
_SHOWN: Final = 8
_NO_WEIGHTS: Final = frozenset({"training_args.bin"})


def left_alone(reader: CheckpointReader) -> Mapping[str, str]:
    """Files and folders next to an open checkpoint's files that are not read, by name, with the reason.

    For a checkpoint in one file, only files that its name implies, as a part or rank of several, are reported.
    """
    whole = reader.opened if isinstance(reader, StoredReader) else reader
    if isinstance(whole, JoinedReader):
        of_each = {key: left_alone(part) for key, part in whole.parts.items()}
        return left_alone_by_parts([home_of(part) for part in whole.parts.values()], whole.format, of_each)
    home, files = home_of(whole), whole.files()
    if home.name.endswith(INDEX_END):
        home = home.parent
    if not home.is_dir():
        above = home.parent
        ranks = _counted(above.parent, [above.name], of_ranks=True)
        return {**_counted(above, [file.name for file in files]), **ranks, **shards_beside(home)}
    start = len(str(home)) + 1
    read = {str(file)[start:].partition("/")[0] for file in files}
    index = next((name for name in read if name.endswith(INDEX_END)), "")
    own: Mapping[str, str] = getattr(whole, "left_alone", {})
    counted = {
        **_counted(home, read),
        **_counted(home.parent, [home.name], of_ranks=True),
        **_ranks_without_files(read),
    }
    return {**_beside(home, read, index), **counted, **own}


def left_alone_by_parts(
    homes: Sequence[Path], format: str, of_each: Mapping[str, Mapping[str, str]]
) -> Mapping[str, str]:
    """The same for the parts at ``homes``, which form one tree, from the files left alone next to each, by its name."""
    reasons = _beside(homes[0].parent, {home.name for home in homes}, "", items=format == "orbax")
    for key, names in of_each.items():
        reasons |= {f"{key}/{name}": why for name, why in names.items()}
    return reasons


def _beside(home: Path, read: Collection[str], index: str, *, items: bool = False) -> dict[str, str]:
    """For the directory `home`, where the names `read` are read. items: whether it is an Orbax step with items."""
    reasons: dict[str, str] = {}
    for child in sorted(home.iterdir()):
        if child.name in read or child.name.startswith(".") or is_temporary(child):
            continue
        if child.is_dir():
            with suppress(OSError):
                inside = [below.name for below in child.iterdir()]
                if any(map(_is_weights, inside)) or (items and inside):
                    reasons[f"{child.name}/"] = (
                        "an item that is not read" if items else "a folder of weights below"
                    )
        elif _is_weights(child.name):
            reasons[child.name] = _reason(child.name, index)
    return reasons


def _is_weights(name: str) -> bool:
    named = name.endswith(_ENDS) or name in (TREE_FILE, METADATA_FILE)
    return named and name not in _NO_WEIGHTS and not is_companion(name)


def _reason(name: str, index: str) -> str:
    if TRAINING_STATE.match(name):
        way = 'torch.save({"model": model.state_dict(), "optimizer": torch.load(this file)}, FILE)'
        both = f"; {way} is a checkpoint with both" if name.startswith("optimizer") else ""
        return f"training state, which no file of weights contains{both}"
    if name.startswith(ADAPTER):
        return "an adapter (merge it: --merge-adapter)"
    if name.endswith(".distcp"):
        return "the metadata names nothing in this file"
    if index and name.endswith(f".{index.removesuffix(INDEX_END).rpartition('.')[2]}"):
        return f"{index} does not name it"
    return "not one of the files that are read"


def _counted(home: Path, read: Collection[str], *, of_ranks: bool = False) -> dict[str, str]:
    """Files that the numbers in the names of read files imply, and that were not read.

    of_ranks: only numbers of ranks.
    """
    if not any(map(is_numbered, read)):
        return {}
    beside: list[str] = []
    with suppress(OSError):
        beside = [child.name for child in home.iterdir()]
    reasons = {}
    for numbered in numbered_sets(dict.fromkeys((*read, *beside))):
        taken = [name for name in numbered.names if name in read]
        for name in (*numbered.names, *numbered.missing) if taken and numbered.of_ranks >= of_ranks else ():
            if name not in read:
                count = len(numbered.names) + numbered.num_missing
                reasons[name] = f"{taken[0]}, which is read, is one of {count} files by its name"
    return reasons


def _ranks_without_files(read: Collection[str]) -> dict[str, str]:
    """Ranks of PyTorch's HuggingFaceStorageWriter without a file, and the one after the last, which no file names."""
    ranks = {int(match[1]) for name in read if (match := _RANK_FILE.match(name))}
    if not ranks:
        return {}
    lacking = [rank for rank in range(1, max(ranks)) if rank not in ranks][:_SHOWN]
    why = "absent: this rank had nothing to write, or its file is missing"
    last = "absent: no file says how many ranks there were, and without the last rank's file tensors look shorter"
    return {**{f"shard-{rank:05}-*": why for rank in lacking}, f"shard-{max(ranks) + 1:05}-*": last}
