"""Checkpoints whose files are links into a store of contents, as DVC, git-annex and the Hub's cache make them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint


def checkpoint(path: Path, format: str) -> None:
    with create_checkpoint(path, format) as writer:
        names = [writer.add_tensor((f"w{k}",), (7, 5), np.dtype(np.float32)).name for k in range(3)]
        for number, name in enumerate(names):
            for box in writer.chunks(name):
                writer.write(name, box, np.full(box.sizes, number, np.float32))


def dvc(root: Path, data: bytes) -> Path:
    digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return root / ".dvc" / "cache" / "files" / "md5" / digest[:2] / digest[2:]


def old_dvc(root: Path, data: bytes) -> Path:
    digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return root / ".dvc" / "cache" / digest[:2] / digest[2:]


def annex(root: Path, data: bytes) -> Path:
    key = f"SHA256E-s{len(data)}--{hashlib.sha256(data).hexdigest()}.distcp"
    return root / ".git" / "annex" / "objects" / "3F" / "x1" / key / key


def linked(path: Path, store_path: Callable[[Path, bytes], Path]) -> None:
    """Move all files of a checkpoint into a store, and leave links."""
    for file in [p for p in path.rglob("*") if p.is_file()]:
        data = file.read_bytes()
        target = store_path(path.parent, data)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        file.unlink()
        file.symlink_to(os.path.relpath(target, file.parent) if len(data) % 2 else target)


@pytest.mark.parametrize("store_path", [dvc, old_dvc, annex])
@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_links_into_a_store_of_contents_are_read(
    tmp_path: Path, format: str, store_path: Callable[[Path, bytes], Path]
) -> None:
    checkpoint(tmp_path / "plain", format)
    checkpoint(tmp_path / "linked", format)
    linked(tmp_path / "linked", store_path)
    assert diff(tmp_path / "plain", tmp_path / "linked").within
    assert verify(tmp_path / "linked").good
    convert(tmp_path / "linked", tmp_path / "copy", to="dcp")
    assert diff(tmp_path / "plain", tmp_path / "copy").within


def test_content_that_was_not_fetched_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path / "linked", "dcp")
    linked(tmp_path / "linked", annex)
    data = next((tmp_path / "linked").glob("*.distcp"))
    data.resolve().unlink()
    with pytest.raises(CheckpointError, match="a link to a file that is missing: fetch it"):
        open_checkpoint(tmp_path / "linked")


@pytest.mark.parametrize(
    "target",
    [
        "secret",
        "files/md5/ab/secret",
        "annex/objects/3F/x1/a/b",
        ".dvc/cache/0/1",
        "annex/objects/3F/x1/K-s1--a/K-s1--b",
    ],
)
def test_other_links_out_of_a_checkpoint_are_refused(tmp_path: Path, target: str) -> None:
    checkpoint(tmp_path / "linked", "dcp")
    data = next((tmp_path / "linked").glob("*.distcp"))
    outside = tmp_path / target
    outside.parent.mkdir(parents=True, exist_ok=True)
    data.rename(outside)
    data.symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"a link to .*: expected a file in the checkpoint's directory"):
        open_checkpoint(tmp_path / "linked")
