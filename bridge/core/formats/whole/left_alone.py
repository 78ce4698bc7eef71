"""What lies beside the files of a checkpoint, looks like weights or training state, and is not read.

hf_folder/model.safetensors              read
         /model-mtp-of-00003.safetensors, optimizer.pt, adapter_model.safetensors, 2_Dense/model.safetensors    named
         /config.json, tokenizer.json, training_args.bin, README.md         nothing that anyone could miss
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from bridge.core.formats.dcp.metadata import METADATA_FILE
from bridge.core.formats.files.atomic import is_temporary
from bridge.core.formats.orbax.item import TREE_FILE
from bridge.core.formats.reading.companion_names import is_companion
from bridge.core.formats.reading.numbered_files import is_numbered, numbered_sets
from bridge.core.formats.reading.weight_index import INDEX_END
from bridge.core.formats.stores.reader import StoredReader, home_of
from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.formats.torch_save.files import TRAINING_STATE
from bridge.core.formats.whole.joined import JoinedReader

_ENDS: Final = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".msgpack", ".distcp", INDEX_END),
    *(".gguf", ".ggml", ".h5", ".keras", ".onnx", ".ot", ".pdparams", ".tflite", ".nemo"),
)
_RANK_FILE: Final = re.compile(r"shard-(\d{1,6})-model-")
_SHOWN: Final = 8
_NO_WEIGHTS: Final = frozenset({"training_args.bin"})


def left_alone(reader: CheckpointReader) -> Mapping[str, str]:
    """The files and folders beside what an open checkpoint was read from that are not read, by name, with the reason.

    Of a checkpoint that is one file only those are told that its name counts, as a part or rank of several.
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
        return {**_counted(above, [file.name for file in files]), **ranks}
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
    """The same of the parts at ``homes``, which are one tree, from what is left alone beside each by its name."""
    reasons = _beside(homes[0].parent, {home.name for home in homes}, "", items=format == "orbax")
    for key, names in of_each.items():
        reasons |= {f"{key}/{name}": why for name, why in names.items()}
    return reasons


def _beside(home: Path, read: Collection[str], index: str, *, items: bool = False) -> dict[str, str]:
    """Of the directory `home`, of which the names `read` are read. items: it is a step of items of Orbax."""
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
        return "state of a training, which no file of weights holds"
    if name.endswith(".distcp"):
        return "the metadata names nothing in it"
    if index and name.endswith(f".{index.removesuffix(INDEX_END).rpartition('.')[2]}"):
        return f"{index} does not name it"
    return "not a part of the files that are read"


def _counted(home: Path, read: Collection[str], *, of_ranks: bool = False) -> dict[str, str]:
    """Files that the numbers in the names of those that were read count, and that were not read.

    of_ranks: numbers of ranks alone.
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
    """Ranks of PyTorch's HuggingFaceStorageWriter that have no file, and the one after the last, of which none says."""
    ranks = {int(match[1]) for name in read if (match := _RANK_FILE.match(name))}
    if not ranks:
        return {}
    lacking = [rank for rank in range(1, max(ranks)) if rank not in ranks][:_SHOWN]
    why = "not there: this rank had nothing to write, or its file is missing"
    last = "not there: no file says how many ranks there were, and without the last one's file tensors look shorter"
    return {**{f"shard-{rank:05}-*": why for rank in lacking}, f"shard-{max(ranks) + 1:05}-*": last}
