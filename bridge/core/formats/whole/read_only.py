"""Which read-only format a file or directory has: by its name, else by the first bytes of the file.

torch      .pt .pth .bin .ckpt, or a zip file with data.pkl
npz        .npz, or a zip file with .npy files
msgpack    .msgpack, or a file that begins like a msgpack map, such as flax's `checkpoint_100`, or like EasyLM's stream

Files of other programs are named, with what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from bridge.core.formats.flax_msgpack.parser import MSGPACK_FILES, PAIR
from bridge.core.formats.reading.model_files import FileKind
from bridge.core.formats.reading.source_files import SourceFiles
from bridge.core.formats.reading.zip_directory import ZIP_MAGIC, read_directory
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.torch_save.files import TORCH_FILES

NPZ_FILES: Final = FileKind((".npz",))
TREE_OF_PLACEHOLDERS: Final = "checkpoint"
"""The file of msgpack in a folder of Orbax, flax or T5X before 2024."""
_KINDS: Final = {"torch": TORCH_FILES, "msgpack": MSGPACK_FILES, "npz": NPZ_FILES}
_SAVE: Final = "load it with that program, and save the arrays by numpy.savez"
_EXPORTED: Final = "give the checkpoint that it was made from"
_UNPACK: Final = "unpack it, and give the folder"
_FOREIGN: Final = (
    ("*.gguf", "a model for llama.cpp (GGUF)", _EXPORTED),
    ("*.h5", "a file of Keras (HDF5)", _SAVE),
    ("*.keras", "a file of Keras", _SAVE),
    ("saved_model.pb", "a SavedModel of TensorFlow", _SAVE),
    ("*.data-?????-of-?????", "a checkpoint of TensorFlow", _SAVE),
    ("*.ckpt*.index", "the index of a checkpoint of TensorFlow", _SAVE),
    ("*.nemo", "an archive of NeMo (tar)", _UNPACK),
    ("*.onnx", "a program of ONNX", _EXPORTED),
    ("*.pdparams", "a checkpoint of PaddlePaddle", _SAVE),
    ("*.pth.tar", "a file of torch.save, perhaps", "give the path of the file"),
    ("*.tar", "an archive", _UNPACK),
    ("*.tar.?z", "an archive", _UNPACK),
    ("*.zip", "an archive", _UNPACK),
    ("zero_to_fp32.py", "a part of DeepSpeed's folder of steps", "choose a step (--step latest)"),
    (
        "latest_checkpointed_iteration.txt",
        "a part of Megatron's folder of steps",
        "choose one (--step latest)",
    ),
)
"""A pattern of names, what such a file is, and what to do."""
_MAPS: Final = frozenset((*range(0x81, 0x90), 0xDE, 0xDF))
"""First bytes of a msgpack map with at least one entry; no pickle begins with them."""
_LISTS: Final = frozenset((*range(0x91, 0xA0), 0xDC, 0xDD))
"""First bytes of a msgpack list with at least one entry, such as the keys of a stream's leaf."""


def directory_format(path: Path) -> str | None:
    """The format of a file or of a directory's files, by their names; None if it has none of these."""
    return next((format for format, file_kind in _KINDS.items() if file_kind.is_one(path)), None)


def single_file_format(path: Path) -> str | None:
    """The format of one file; None if it is none of these, or not a regular file."""
    by_name = directory_format(path)
    if by_name is not None or not path.is_file() or not path.stat().st_size:
        return by_name
    files = SourceFiles(path.parent)
    try:
        head = files.view(path.name)[0:4]
        if head == ZIP_MAGIC:
            names = read_directory(files, path.name, "a zip file")
            return "torch" if any(name.endswith("data.pkl") for name in names) else "npz"
    except CheckpointError:
        return None
    finally:
        files.close()
    is_stream = head[:1] == PAIR and len(head) > 1 and head[1] in _LISTS
    return "msgpack" if is_stream or (head[:1] and head[0] in _MAPS) else None


def foreign(names: Iterable[str]) -> str:
    """Which of these names is another program's, and what to do; "" if none is known."""
    known = [*names]
    for pattern, program, way in _FOREIGN:
        for name in known:
            if fnmatchcase(name.lower(), pattern):
                return f"{name} is {program}: {way}"
    return ""
