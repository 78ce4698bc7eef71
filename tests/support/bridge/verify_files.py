"""Checkpoints to damage: their contents, the place of each byte, and a way to change a byte."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verify_report import VerifyReport
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import DTYPES
from tests.support.bridge.bits import random_bits

FORMATS = ("dcp", "orbax", "safetensors")


def arrays() -> dict[str, np.ndarray]:
    """Tensors of several dtypes. One is larger than the values that Orbax keeps inside its index."""
    dtypes = ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn")
    small = {f"w.{name}": random_bits((3, 2), DTYPES[name], seed) for seed, name in enumerate(dtypes)}
    return {**small, "w.large": random_bits((37, 11), np.dtype(np.float32), 9), "w.empty": np.zeros((0, 4))}


def write(
    path: Path, format: str, tensors: dict[str, np.ndarray], chunk: tuple[int, int] | None = None
) -> None:
    with create_checkpoint(path, format) as writer:
        names = {
            name: writer.add_tensor(tuple(name.split(".")), array.shape, array.dtype, chunk).name
            for name, array in tensors.items()
        }
        writer.add_object(("run", "note"), "by hand")
        writer.add_object(("run", "betas"), (0.9, 0.95))
        for name, array in tensors.items():
            for box in writer.chunks(names[name]):
                writer.write(names[name], box, array[box.slices()])


def contents(path: Path) -> dict[str, object]:
    with open_checkpoint(path) as reader:
        described: dict[str, object] = {
            name: (info.dtype, info.shape, info.path, reader.read(name).tobytes())
            for name, info in reader.tensors.items()
        }
        return described | {
            name: (repr(reader.objects[name]), reader.object_paths[name]) for name in reader.objects
        }


def places(path: Path, tensors: dict[str, np.ndarray]) -> Iterator[tuple[Path, int]]:
    """Where every byte of these tensors is stored."""
    files = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    for name, array in tensors.items():
        with open_checkpoint(path) as reader:
            (stored,) = (info for n, info in reader.tensors.items() if n.replace("/", ".") == name)
        for chunk in stored.chunks:
            data = np.ascontiguousarray(array[chunk.slices()]).tobytes()
            hits = [(f, at) for f, content in files.items() if (at := content.find(data)) >= 0]
            assert len(hits) == 1, f"{name}: its bytes are in {len(hits)} places"
            yield from ((hits[0][0], hits[0][1] + k) for k in range(len(data)))


def flipped(file: Path, position: int, rng: random.Random) -> Callable[[], None]:
    """Change a byte. Returns a function that changes it back."""
    original = file.read_bytes()
    changed = bytearray(original)
    changed[position] ^= rng.randrange(1, 256)
    file.write_bytes(changed)
    return lambda: file.write_bytes(original) and None


def where(report: VerifyReport) -> set[str]:
    return {problem.where for problem in report.problems}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a format, written by `convert`. Do not change it."""
    root = tmp_path_factory.mktemp("converted")
    write(root / "source", "orbax", arrays(), (20, 11))
    for format in FORMATS:
        convert(root / "source", root / format, to=format)
    return lambda format: root / format


@pytest.fixture
def copy(tmp_path: Path, converted: Callable[[str], Path]) -> Callable[[str], Path]:
    """A copy that a test may change."""

    def make(format: str) -> Path:
        shutil.copytree(converted(format), tmp_path / format)
        return tmp_path / format

    return make
