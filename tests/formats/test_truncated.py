"""A file that was cut off somewhere, as by a download that ended early, is refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import flax.serialization
import numpy as np
import pytest
import torch

from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import COPY_AGAIN, CheckpointError

TREE = {"w": np.arange(300, dtype=np.float32), "layers": {"b": np.ones((3, 4), np.int16)}, "note": "x" * 300}
ARRAYS = {"w": TREE["w"], "b": np.ones((3, 4), np.int16)}
WRITERS: dict[str, Callable[[Path], object]] = {
    "a.pt": lambda path: torch.save({"w": torch.arange(300.0), "b": torch.ones(3, 4)}, path),
    "a.npz": lambda path: np.savez(path, **ARRAYS),
    "deflated.npz": lambda path: np.savez_compressed(path, **ARRAYS),
    "a.msgpack": lambda path: path.write_bytes(flax.serialization.to_bytes(TREE)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_error_says_to_copy_it_again(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    open_checkpoint(tmp_path / name).close()
    # Fewer than 4 bytes of a zip file are any file.
    for cut in (0, *range(4, len(whole), 1 + len(whole) // 40), len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:cut])
        with pytest.raises(CheckpointError) as refused:
            open_checkpoint(tmp_path / name)
        assert str(refused.value).startswith(str(tmp_path / name))
        assert str(refused.value).endswith(COPY_AGAIN), (cut, str(refused.value))


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "a.npz",
        "flax_model.msgpack",
        "model.safetensors.index.json",
        ".metadata",
        "_METADATA",
    ],
)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n")
    with pytest.raises(CheckpointError, match=r"a pointer of Git LFS .*git lfs pull"):
        open_checkpoint(tmp_path)


def test_a_module_that_was_saved_whole_is_refused_with_what_to_save(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"Linear: for a module save its state_dict\(\)"):
        open_checkpoint(tmp_path / "a.pt")
