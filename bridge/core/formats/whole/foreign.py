"""Files of other programs that are not read: what they are, and what to do with them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

_SAVE: Final = "load it with that program, and save the arrays by numpy.savez"
_EXPORTED: Final = "give the checkpoint that it was made from"
_UNPACK: Final = "unpack it, and give the folder"
_FOREIGN: Final = (
    ("*.gguf", "a model for llama.cpp (GGUF)", _EXPORTED),
    ("*.h5", "a file of Keras (HDF5)", _SAVE),
    ("*.keras", "a file of Keras", _SAVE),
    ("saved_model.pb", "a SavedModel of TensorFlow", _SAVE),
    ("*.data-?????-of-?????", "a checkpoint of TensorFlow", _SAVE),
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


def foreign(names: Iterable[str]) -> str:
    """Which of these names is another program's, and what to do; "" if none is known."""
    known = [*names]
    for pattern, program, way in _FOREIGN:
        for name in known:
            if fnmatchcase(name.lower(), pattern):
                return f"{name} is {program}: {way}"
    return ""
