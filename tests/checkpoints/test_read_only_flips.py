"""Flips in every byte of small files of torch.save, NumPy and flax: refused by name, or converted without harm."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.serialization
import ml_dtypes
import numpy as np
import pytest
import torch

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.formats.tensors.base import unreadable
from tests.support.bridge.bits import same_bits
from tests.support.bridge.verify_files import contents

pytestmark = pytest.mark.slow  # 6,000 conversions, two minutes


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((3, 2)).astype(np.float32),
        "b": rng.integers(0, 9, (4,)),
        "empty": np.zeros((0, 3)),
    }


def save(path: Path) -> Path:
    if path.name.endswith(".pt"):
        tensors = {name: torch.from_numpy(array) for name, array in arrays().items()}
        torch.save({"a": tensors, "n": 3, "text": "Grüße", "values": [1.5, None, True]}, path)
    elif path.name.endswith(".deflated.npz"):
        np.savez_compressed(path, **arrays(), many=np.arange(300))
    elif path.name.endswith(".npz"):
        np.savez(path, **arrays())
    else:
        others: dict[str, Any] = {"n": 3, "rate": 0.5, "c": 1 + 2j, "none": None, "flag": True, "text": "x"}
        others |= {"values": [1, 2], "s": np.float32(3), "bf": np.ones(3, ml_dtypes.bfloat16)}
        path.write_bytes(flax.serialization.msgpack_serialize({"a": arrays(), **others}))
    return path


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Files with one bit changed, and the number of that bit: one or two of each byte, each of the eight in turn."""
    for bit in range(0, 8 * len(data), 7):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(changed)


def refusal(source: Path, target: Path, to: str) -> str:
    try:
        convert(source, target, to=to, workers=1)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("end", ["pt", "npz", "deflated.npz"])
def test_each_flip_is_refused_or_changes_nothing(tmp_path: Path, end: str) -> None:
    source, copy = save(tmp_path / f"a.{end}"), tmp_path / "b"
    convert(source, copy, to="dcp")
    expected, refused = contents(copy), 0
    data = source.read_bytes()
    for bit, changed in flips(data):
        source.write_bytes(changed)
        shutil.rmtree(copy)
        said = refusal(source, copy, "dcp")
        if said:
            assert str(source) in said, bit
            assert [*tmp_path.iterdir()] == [source], bit
            copy.mkdir()
            refused += 1
        else:
            assert contents(copy) == expected, bit
    assert refused > len(data) / 3


def test_each_flip_of_msgpack_is_refused_or_read_as_flax_reads_it(tmp_path: Path) -> None:
    """msgpack has no checksums, so a flipped value is a value."""
    source, copy, other = save(tmp_path / "a.msgpack"), tmp_path / "b", 0
    data = source.read_bytes()
    for bit, changed in flips(data):
        source.write_bytes(changed)
        said = refusal(source, copy, "orbax")
        if said:
            assert str(source) in said, bit
            assert [*tmp_path.iterdir()] == [source], bit
            continue
        shutil.rmtree(copy)
        values = dict(leaves(flax.serialization.msgpack_restore(changed)))
        with open_checkpoint(source) as reader:
            assert not unreadable(reader)
            restored = {info.path: reader.read(name) for name, info in reader.tensors.items()}
            restored |= {reader.object_paths[name]: value for name, value in reader.objects.items()}
        assert restored.keys() == values.keys(), bit
        for path, value in values.items():
            same = (
                same_bits(restored[path], np.asarray(value))
                if isinstance(restored[path], np.ndarray)
                else repr(restored[path]) == repr(value)
            )
            assert same, (bit, path)
        other += changed != data
    assert other > len(data) / 3


def leaves(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """What a checkpoint has as a tensor or an object; a list of numbers is one object."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree
