"""Files of programs whose checkpoints are not read are named, with what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.core.formats import CheckpointError, open_checkpoint

FILES = {
    "model-Q4.gguf": (b"GGUF\x03\0\0\0", "a model for llama.cpp"),
    "weights.h5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "a file of Keras"),
    "Model.KERAS": (b"PK\x05\x06" + bytes(18), "a file of Keras"),
    "saved_model.pb": (b"\x08\x01", "a SavedModel of TensorFlow"),
    "model.ckpt-10.data-00000-of-00001": (bytes(8), "a checkpoint of TensorFlow"),
    "model.ckpt-10.index": (b"\x82\xa210\x01\xa210\x02", "the index of a checkpoint of TensorFlow"),
    "llama.nemo": (bytes(512), "an archive of NeMo"),
    "model.onnx": (b"\x08\x07", "a program of ONNX"),
    "run.tar.gz": (b"\x1f\x8b", "an archive"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_program_is_named(tmp_path: Path, name: str) -> None:
    content, program = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"found .*{name}.*; {name} is {program}.*: \w+"):
        open_checkpoint(tmp_path)
    with pytest.raises(NotADirectoryError, match=rf"of another kind \({name} is {program}"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("file", "folder"),
    [("zero_to_fp32.py", "global_step5"), ("latest_checkpointed_iteration.txt", "iter_0000005")],
)
def test_a_folder_of_steps_asks_for_a_step(tmp_path: Path, file: str, folder: str) -> None:
    (tmp_path / file).write_text("5")
    (tmp_path / folder).mkdir()
    with pytest.raises(CheckpointError, match=rf"{file} is a part of \w+'s folder of .*--step latest"):
        open_checkpoint(tmp_path)


def test_a_checkpoint_among_such_files_is_read(tmp_path: Path) -> None:
    for name, (content, _) in FILES.items():
        (tmp_path / name).write_bytes(content)
    np.savez(tmp_path / "arrays.npz", w=np.ones(2))
    with open_checkpoint(tmp_path) as reader:
        assert [*reader.tensors] == ["w"]
    np.savez(tmp_path / "arrays.npz", w=np.ones(2))
    (tmp_path / "arrays.npz").rename(tmp_path / "own.zip")
    with open_checkpoint(tmp_path / "own.zip") as reader:
        assert [*reader.tensors] == ["w"]
