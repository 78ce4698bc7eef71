"""Conversions from files of torch.save, NumPy and flax: killed, of damaged files, and in little memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import flax.serialization
import numpy as np
import pytest
import torch

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.formats.tensors.base import unreadable
from tests.support.bridge.bits import random_bits, same_bits

ROOT = Path(__file__).parents[2]
ENDS = ("pt", "npz", "deflated.npz", "msgpack")
Arrays = dict[str, np.ndarray]


def save(path: Path, arrays: Arrays) -> Path:
    if path.name.endswith(".pt"):
        torch.save({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, path)
    elif path.name.endswith(".deflated.npz"):
        np.savez_compressed(path, **arrays)
    elif path.name.endswith(".npz"):
        np.savez(path, **arrays)
    else:
        path.write_bytes(flax.serialization.msgpack_serialize(dict(arrays)))
    return path


def arrays() -> Arrays:
    """Many small ones, and one that is written past the system's cache."""
    small = {f"w{k}": random_bits((40 + k, 7), np.dtype(np.float32), k) for k in range(8)}
    return {**small, "large": random_bits((3000, 7), np.dtype(np.float32), 9)}


@pytest.fixture(scope="module", params=ENDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("source") / f"a.{request.param}", arrays())


def assert_holds(path: Path) -> None:
    expected = arrays()
    with open_checkpoint(path) as reader:
        assert set(reader.tensors) == set(expected)
        for name, array in expected.items():
            assert same_bits(reader.read(name), array)


def killed(source: Path, destination: Path, to: str, last: int) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "tests.support.bridge.killed", source, destination, to, last, "--resume"]
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def check(source: Path, folder: Path, to: str, last: int) -> None:
    destination = folder / ("c.safetensors" if to == "safetensors" else "c")
    done = killed(source, destination, to, last)
    assert done.returncode in (-9, 0), done.stderr
    if not destination.exists():
        convert(source, destination, to=to, resume=True)
    assert_holds(destination)
    assert verify(destination).good


@pytest.mark.slow  # 16 processes
def test_a_killed_conversion_is_resumed(source: Path, tmp_path: Path) -> None:
    operations = int(killed(source, tmp_path / "whole", "dcp", 0).stdout)
    for number, part in enumerate((5, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(source, folder, "dcp", max(1, operations // part))


@pytest.mark.slow  # 200 processes
@pytest.mark.timeout(3600)
def test_200_killed_conversions_are_resumed(tmp_path: Path) -> None:
    rng = random.Random(0)
    sources = [save(tmp_path / f"a.{end}", arrays()) for end in ENDS]
    most: dict[tuple[Path, str], int] = {}
    for number in range(200):
        pair = rng.choice(sources), rng.choice(("dcp", "orbax", "safetensors"))
        folder = tmp_path / str(number)
        folder.mkdir()
        if pair not in most:
            target = folder / ("whole.safetensors" if pair[1] == "safetensors" else "whole")
            most[pair] = int(killed(pair[0], target, pair[1], 0).stdout)
        check(pair[0], folder, pair[1], rng.randint(1, most[pair]))


@pytest.mark.parametrize("flips", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_flip_changes_a_value_where_the_format_has_checksums(
    source: Path, tmp_path: Path, flips: int
) -> None:
    if source.name.endswith(".msgpack"):
        pytest.skip("msgpack has no checksums")
    data, rng, detected = source.read_bytes(), random.Random(0), 0
    copy = tmp_path / source.name
    for _ in range(flips):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        copy.write_bytes(flipped)
        try:
            convert(copy, tmp_path / "c", to="dcp", replace=True, workers=1)
        except CheckpointError:
            detected += 1
        else:
            assert_holds(tmp_path / "c")
    assert detected > flips // 2


@pytest.mark.slow
def test_flips_in_msgpack_are_refused_or_change_one_value(tmp_path: Path) -> None:
    source = save(tmp_path / "a.msgpack", arrays())
    data, rng, read = source.read_bytes(), random.Random(0), 0
    for _ in range(300):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        source.write_bytes(flipped)
        try:
            with open_checkpoint(source) as reader:
                values = {
                    name: reader.read(name) for name in reader.tensors if name not in unreadable(reader)
                }
        except CheckpointError:
            continue
        read += 1
        same = [name for name, array in arrays().items() if name in values and same_bits(values[name], array)]
        assert len(same) >= len(arrays()) - 1
    assert read > 100, read


PROGRAM = """
import json, sys
import bridge.checkpoints.convert.conversion, bridge.core.formats.orbax.writer, bridge.core.formats.torch_save.reader
import bridge.core.formats.npz.reader, bridge.core.formats.flax_msgpack.reader
from tests.support.process_memory import status_bytes
before = status_bytes("VmHWM")
report = bridge.checkpoints.convert.conversion.convert(sys.argv[1], sys.argv[2], workers=1)
print(json.dumps([(status_bytes("VmHWM") - before) / 1e6, report.bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, end: str) -> None:
    rng = np.random.default_rng(0)
    large = {f"w{k}": rng.integers(0, 1000, (16384, 4096), dtype=np.int32) for k in range(2)}
    source = save(tmp_path / f"a.{end}", large)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source), str(tmp_path / "b")],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    above, nbytes = json.loads(done.stdout)
    print(f"{end}: {above:.0f} MB above the imports for {nbytes / 1e6:.0f} MB")
    assert nbytes == 2 * 16384 * 4096 * 4
    assert above < 200
