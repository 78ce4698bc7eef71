"""Files of other programs that are not read: what they are, and what to do with them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

_WITH_KERAS: Final = "load it with Keras, and save the weights with numpy.savez or safetensors"
_UNPACK: Final = "unpack it, and give the folder"
_FOREIGN: Final = (
    ("*.gguf", "a model for llama.cpp (GGUF)", "give the safetensors files that it was made from"),
    ("*.ggml", "a model for llama.cpp (GGML)", "give the safetensors files that it was made from"),
    ("*.h5", "a file of Keras (HDF5)", _WITH_KERAS),
    ("*.keras", "a file of Keras", _WITH_KERAS),
    (
        "saved_model.pb",
        "a SavedModel of TensorFlow",
        "load it with TensorFlow, and save the variables by numpy.savez",
    ),
    (
        "*.data-?????-of-?????",
        "a checkpoint of TensorFlow",
        "read it with tf.train.load_checkpoint, and save the arrays by numpy.savez",
    ),
    ("*.nemo", "an archive of NeMo (tar)", _UNPACK),
    ("*.onnx", "a program of ONNX", "give the checkpoint that it was exported from"),
    ("*.engine", "an engine of TensorRT", "give the checkpoint that it was built from"),
    ("*.mlmodel", "a program of Core ML", "give the checkpoint that it was exported from"),
    (
        "*.pdparams",
        "a checkpoint of PaddlePaddle",
        "load it with PaddlePaddle, and save the arrays by numpy.savez",
    ),
    ("*.tar", "an archive", _UNPACK),
    ("*.tar.?z", "an archive", _UNPACK),
    ("*.tgz", "an archive", _UNPACK),
    ("*.zip", "an archive", _UNPACK),
    ("zero_to_fp32.py", "of DeepSpeed's folder of steps", "choose a step (--step latest, or --step NUMBER)"),
    ("latest_checkpointed_iteration.txt", "of Megatron's folder of iterations", "choose one (--step latest)"),
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
