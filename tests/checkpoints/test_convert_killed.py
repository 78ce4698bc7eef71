"""Conversions killed at any instant: the destination is absent or complete, and resuming finishes identically."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.files.atomic import AtomicDirectory, temporaries_of
from bridge.core.formats.files.journal import JOURNAL_FILE
from bridge.core.formats.files.manifest import manifest_path
from bridge.core.formats.tensors.base import CheckpointError
from tests.support.bridge.bits import random_bits, same_bits

ROOT = Path(__file__).parents[2]
FORMATS = ("dcp", "orbax", "safetensors")


def make(path: Path, seed: int) -> dict[str, np.ndarray]:
    """A small checkpoint of many chunks."""
    arrays = {f"w{k}": random_bits((40 + k, 7), np.dtype(np.float32), 100 * seed + k) for k in range(8)}
    # Written past the system's cache, which small ones are not.
    arrays["large"] = random_bits((3000, 7), np.dtype(np.float32), seed)
    with create_checkpoint(path, "dcp") as writer:
        for name, array in arrays.items():
            writer.add_tensor((name,), array.shape, array.dtype, (max(16, len(array) // 2), 7))
            for box in writer.chunks(name):
                writer.write(name, box, array[box.slices()])
        writer.add_object(("note",), f"seed {seed}")
    return arrays


def assert_holds(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with open_checkpoint(path) as reader:
        assert set(reader.tensors) == set(arrays)
        for name, array in arrays.items():
            assert same_bits(reader.read(name), array)


def killed(
    source: Path, destination: Path, format: str, last: int, *flags: str
) -> subprocess.CompletedProcess[str]:
    arguments = [
        sys.executable,
        "-m",
        "tests.support.bridge.killed",
        source,
        destination,
        format,
        str(last),
        *flags,
    ]
    return subprocess.run(list(map(str, arguments)), cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("source") / "c"
    return path, make(path, 1)


def check(source: Path, arrays: dict[str, np.ndarray], folder: Path, format: str, last: int) -> int:
    """Kill one conversion; the bytes that resuming it did not have to write again."""
    destination = folder / ("c.safetensors" if format == "safetensors" else "c")
    done = killed(source, destination, format, last, "--resume")
    # 0: it needed fewer operations than the counted run.
    assert done.returncode in (-9, 0), done.stderr
    if done.returncode == 0 or destination.exists():
        assert_holds(destination, arrays)
        return 0
    report = convert(source, destination, to=format, resume=True)
    assert_holds(destination, arrays)
    assert report.tensors == len(arrays)
    expected = {destination.name}
    if format == "safetensors":
        expected.add("c.safetensors.manifest.json")
    # One killed before its journal was there cannot be told from one that another process makes this moment.
    begun = {path.name for path in temporaries_of(destination) if not any(path.iterdir())}
    assert {path.name for path in folder.iterdir()} - begun == expected
    return report.resumed_bytes


@pytest.mark.fast_cases("dcp")
@pytest.mark.parametrize("format", FORMATS)
def test_a_conversion_killed_at_some_instants_is_resumed(
    tmp_path: Path, source: tuple[Path, dict[str, np.ndarray]], format: str
) -> None:
    operations = int(killed(source[0], tmp_path / "whole.safetensors", format, 0, "--resume").stdout)
    assert operations > 20
    resumed = []
    for k in range(5):
        folder = tmp_path / str(k)
        folder.mkdir()
        resumed.append(check(*source, folder, format, 1 + operations * (2 * k + 1) // 10))
    # Half-way through most is there, and nothing of what was written is trusted that was not noted.
    assert max(resumed) > 2000


@pytest.mark.slow  # 200 processes
def test_a_conversion_killed_at_200_instants_is_resumed(
    tmp_path: Path, source: tuple[Path, dict[str, np.ndarray]]
) -> None:
    rng = random.Random(0)
    operations = {
        format: int(killed(source[0], tmp_path / f"{format}.safetensors", format, 0, "--resume").stdout)
        for format in FORMATS
    }
    for k in range(200):
        format = rng.choice(FORMATS)
        folder = tmp_path / str(k)
        folder.mkdir()
        check(*source, folder, format, rng.randint(1, operations[format]))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["dcp", pytest.param("orbax", marks=pytest.mark.slow)])
def test_a_replaced_checkpoint_is_intact_until_the_new_one_is_complete(
    tmp_path: Path, source: tuple[Path, dict[str, np.ndarray]], format: str
) -> None:
    old = make(tmp_path / "whole", 2)
    operations = int(killed(source[0], tmp_path / "whole", format, 0, "--replace", "--one").stdout)
    assert_holds(tmp_path / "whole", source[1])
    for k in range(8):
        folder = tmp_path / str(k)
        folder.mkdir()
        old = make(folder / "c", 2)
        last = operations - k if k < 5 else operations * (k - 4) // 4
        assert killed(source[0], folder / "c", format, last, "--replace", "--one").returncode == -9
        with open_checkpoint(folder / "c") as reader:
            new = same_bits(reader.read("w0"), source[1]["w0"])
        assert_holds(folder / "c", source[1] if new else old)
        convert(source[0], folder / "c", to=format, replace=True)
        assert_holds(folder / "c", source[1])
        assert [path.name for path in folder.iterdir() if path.name != "c" and journaled(path)] == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", [pytest.param(("--one",), marks=pytest.mark.slow), ("--one", "--resume")])
def test_a_replaced_file_and_its_manifest_always_belong_together(
    tmp_path: Path, source: tuple[Path, dict[str, np.ndarray]], flags: tuple[str, ...]
) -> None:
    old = make(tmp_path / "old", 2)
    destination = tmp_path / "c.safetensors"
    convert(tmp_path / "old", destination, to="safetensors")
    operations = int(killed(source[0], destination, "safetensors", 0, "--replace", *flags).stdout)
    for last in range(operations - 7, operations + 1):
        convert(tmp_path / "old", destination, to="safetensors", replace=True)
        assert killed(source[0], destination, "safetensors", last, "--replace", *flags).returncode == -9
        with open_checkpoint(destination) as reader:
            new = same_bits(reader.read("w0"), source[1]["w0"])
        assert_holds(destination, source[1] if new else old)
        assert verify(destination).problems == ()
        convert(source[0], destination, to="safetensors", replace=True, resume="--resume" in flags)
        assert_holds(destination, source[1])
        assert verify(destination).manifest
        assert verify(destination).good


def journaled(path: Path) -> bool:
    return (path / JOURNAL_FILE).exists()


def test_resuming_another_conversion_says_what_differs(
    tmp_path: Path, source: tuple[Path, dict[str, np.ndarray]]
) -> None:
    assert killed(source[0], tmp_path / "c", "dcp", 30, "--resume").returncode == -9
    with pytest.raises(
        CheckpointError,
        match=r"is unfinished, but belongs to another conversion .*format: expected orbax, found dcp",
    ):
        convert(source[0], tmp_path / "c", to="orbax", resume=True)
    make(tmp_path / "other", 3)
    with pytest.raises(CheckpointError, match=r"source: expected .*other, found .*; files: expected"):
        convert(tmp_path / "other", tmp_path / "c", to="dcp", resume=True)
    # Anew it goes, and what was left is removed.
    convert(source[0], tmp_path / "c", to="orbax")
    assert temporaries_of(tmp_path / "c") == []
    assert_holds(tmp_path / "c", source[1])


def test_a_changed_source_is_not_mixed_with_its_past(tmp_path: Path) -> None:
    make(tmp_path / "a", 4)
    assert killed(tmp_path / "a", tmp_path / "c", "dcp", 30, "--resume").returncode == -9
    for path in sorted((tmp_path / "a").iterdir()):
        path.unlink()
    (tmp_path / "a").rmdir()
    arrays = make(tmp_path / "a", 5)
    with pytest.raises(CheckpointError, match="files: expected"):
        convert(tmp_path / "a", tmp_path / "c", to="dcp", resume=True)
    convert(tmp_path / "a", tmp_path / "c", to="dcp")
    assert_holds(tmp_path / "c", arrays)


def interrupted(source: Path, destination: Path, to: str, after: int) -> None:
    """A conversion that is stopped after so many regions, and keeps what it has, to be resumed."""
    count = itertools.count(1)

    def stop(*_: object) -> None:
        if next(count) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, destination, to=to, resume=True, workers=1, progress=stop)


def test_shards_given_by_their_index_are_not_mixed_with_their_past(tmp_path: Path) -> None:
    names = {f"w{k}": f"model-{k + 1:05}-of-00003.safetensors" for k in range(3)}

    def shards(seed: int) -> dict[str, np.ndarray]:
        arrays = {name: random_bits((40, 7), np.dtype(np.float32), seed + k) for k, name in enumerate(names)}
        for name, file in names.items():
            save_file({name: arrays[name]}, tmp_path / "l" / file)
        return arrays

    (tmp_path / "l").mkdir()
    index = tmp_path / "l" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    shards(1)
    interrupted(index, tmp_path / "c", "dcp", 2)
    arrays = shards(11)
    with pytest.raises(CheckpointError, match="files: expected"):
        convert(index, tmp_path / "c", to="dcp", resume=True)
    convert(index, tmp_path / "c", to="dcp")
    assert_holds(tmp_path / "c", arrays)


def test_an_item_that_is_a_link_is_not_mixed_with_its_past(tmp_path: Path) -> None:
    def item(seed: int) -> dict[str, np.ndarray]:
        arrays = make(tmp_path / f"dcp{seed}", seed)
        convert(tmp_path / f"dcp{seed}", tmp_path / "real", to="orbax", replace=seed > 6)
        return arrays

    item(6)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "default").symlink_to(tmp_path / "real")
    interrupted(tmp_path / "root", tmp_path / "c", "dcp", 4)
    arrays = item(7)
    with pytest.raises(CheckpointError, match="files: expected"):
        convert(tmp_path / "root", tmp_path / "c", to="dcp", resume=True)
    convert(tmp_path / "root", tmp_path / "c", to="dcp")
    assert_holds(tmp_path / "c", arrays)


@pytest.mark.parametrize("damage", ["removed", "cut", "zeros", "changed"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_the_disk_lost_of_an_attempt_is_written_again(
    tmp_path: Path, source: tuple[Path, dict[str, np.ndarray]], format: str, damage: str
) -> None:
    destination = tmp_path / ("c.safetensors" if format == "safetensors" else "c")
    interrupted(source[0], destination, format, 6)
    (left,) = temporaries_of(destination)
    (data,) = (p for p in left.rglob("*") if p.is_file() and p.stat().st_size > 4000)
    if damage == "removed":
        data.unlink()
    elif damage == "cut":
        os.truncate(data, 2000)
    elif damage == "zeros":
        size = data.stat().st_size
        data.write_bytes(bytes(size))
    else:
        content = bytearray(data.read_bytes())
        content[len(content) // 4] ^= 1
        data.write_bytes(content)
    report = convert(source[0], destination, to=format, resume=True)
    assert report.resumed_bytes < sum(array.nbytes for array in source[1].values())
    assert_holds(destination, source[1])
    assert verify(destination).good


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_that_the_disk_lost_are_not_taken_for_zeros_that_were_written(
    tmp_path: Path, format: str
) -> None:
    arrays = {f"w{k}": np.zeros((40, 7), np.float32) for k in range(8)}
    save_file(arrays, tmp_path / "a.safetensors")
    destination = tmp_path / ("c.safetensors" if format == "safetensors" else "c")
    interrupted(tmp_path / "a.safetensors", destination, format, 6)
    (left,) = temporaries_of(destination)
    (data,) = (p for p in left.rglob("*") if p.is_file() and p.stat().st_size > 4000)
    data.write_bytes(bytes(data.stat().st_size))
    convert(tmp_path / "a.safetensors", destination, to=format, resume=True)
    assert_holds(destination, arrays)
    assert verify(destination).good


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("resume", [False, True])
def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path, workers: int, resume: bool) -> None:
    arrays = make(tmp_path / "a", 8)
    convert(tmp_path / "a", tmp_path / "a.safetensors", to="safetensors")
    # With its manifest, a chunk that is read after the change is refused as damaged.
    manifest_path(tmp_path / "a.safetensors").unlink()
    count = itertools.count()

    def write(*_: object) -> None:
        if next(count) == 1:
            with open(tmp_path / "a.safetensors", "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"x")

    with pytest.raises(CheckpointError, match=r"a\.safetensors was changed while it was being converted"):
        convert(
            tmp_path / "a.safetensors",
            tmp_path / "c",
            to="dcp",
            progress=write,
            workers=workers,
            resume=resume,
        )
    assert not (tmp_path / "c").exists()
    convert(tmp_path / "a", tmp_path / "c", to="dcp")
    assert_holds(tmp_path / "c", arrays)


def test_a_damaged_journal_is_not_resumed_from(
    tmp_path: Path, source: tuple[Path, dict[str, np.ndarray]]
) -> None:
    assert killed(source[0], tmp_path / "c", "orbax", 30, "--resume", "--one").returncode == -9
    (left,) = temporaries_of(tmp_path / "c")
    journal = left / JOURNAL_FILE
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 3
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:5])
    report = convert(source[0], tmp_path / "c", to="orbax", resume=True)
    assert 0 < report.resumed_bytes < 1500
    assert_holds(tmp_path / "c", source[1])


def test_two_at_once_do_not_share_a_working_directory(
    tmp_path: Path, source: tuple[Path, dict[str, np.ndarray]]
) -> None:
    program = (
        "import sys, time\n"
        "from bridge.checkpoints.convert.conversion import convert\n"
        "from bridge.core.formats.dcp.writer import DcpWriter\n"
        "def write(*_, **__):\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "DcpWriter.write = write\n"
        "convert(*sys.argv[1:], to='dcp', resume=True, workers=1)\n"
    )
    arguments = [sys.executable, "-c", program, str(source[0]), str(tmp_path / "c")]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CheckpointError, match="is being written by another process"):
            convert(source[0], tmp_path / "c", to="dcp", resume=True)
        other.kill()
    convert(source[0], tmp_path / "c", to="dcp", resume=True)
    assert_holds(tmp_path / "c", source[1])


@pytest.mark.parametrize("items", [(), ("a", "b")])
def test_a_conversion_killed_at_its_commit_is_resumed_and_lists_its_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: tuple[str, ...]
) -> None:
    source = tmp_path / "source"
    with create_checkpoint(source, "dcp") as writer:
        for name in ("a", "b"):
            info = writer.add_tensor((name, "w"), (2, 3), np.dtype(np.float32))
            writer.write(info.name, info.chunks[0], np.ones((2, 3), np.float32))
    (source / "config.json").write_text("{}")

    def killed(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(AtomicDirectory, "commit", killed)
        with pytest.raises(OSError, match="killed"):
            convert(source, tmp_path / "c", to="orbax", resume=True, write_items=items)
    convert(source, tmp_path / "c", to="orbax", resume=True, write_items=items)
    assert verify(tmp_path / "c", items=items).problems == ()
    (tmp_path / "c/config.json").write_text('{"changed": true}')
    assert verify(tmp_path / "c", items=items).problems == ()
