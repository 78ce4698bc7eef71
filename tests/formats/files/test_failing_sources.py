"""Sources that shrink, change, or whose disk fails, at any read, in any format: one sentence, and nothing is left.

Each case counts the reads of a command, then lets the fault happen before each of them in turn.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bridge import convert, diff, open_checkpoint, verify
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint
from bridge.core.formats.reading import source_files
from bridge.core.formats.tensors.base import Box, CheckpointError

FORMATS = ("safetensors", "dcp", "orbax", "npz", "deflated npz", "torch", "msgpack")
LARGE, SMALL = (600, 512), (9, 7)  # above 1 MiB, which is read as it is; and below, which goes the short way


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"a": SMALL, "b": LARGE, "c": SMALL, "d": LARGE, "e": SMALL}
    return {name: rng.random(shape, np.float32) for name, shape in shapes.items()}


def make(folder: Path, format: str) -> tuple[Path, Path]:
    """A checkpoint, and the file with its data."""
    arrays = tensors()
    if format.endswith("npz"):
        path = folder / "c.npz"
        (np.savez if format == "npz" else np.savez_compressed)(path, **arrays)
        return path, path
    if format == "torch":
        path = folder / "c.pt"
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
        return path, path
    if format == "msgpack":
        serialization = pytest.importorskip("flax.serialization")
        path = folder / "c.msgpack"
        path.write_bytes(serialization.msgpack_serialize(arrays))
        return path, path
    path = folder / ("c.safetensors" if format == "safetensors" else "c")
    with create_checkpoint(path, format) as writer:
        names = {name: writer.add_tensor((name,), a.shape, a.dtype).name for name, a in arrays.items()}
        for name, array in arrays.items():
            for box in writer.chunks(names[name]):
                writer.write(names[name], box, array[box.slices()])
    # Without a manifest, as other programs leave it: nothing but the reads themselves can notice.
    for manifest in folder.rglob("*manifest.json"):
        manifest.unlink()
    if path.is_file():
        return path, path
    return path, max((file for file in path.rglob("*") if file.is_file()), key=lambda f: f.stat().st_size)


class Reads:
    """Counts reads of files, and calls `fault` before the one with the number `at`, from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.at = 0, -1
        self.fault: Callable[[], None] = lambda: None
        for name in ("pread", "preadv"):
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            self.count += 1
            if self.count - 1 == self.at:
                self.fault()
            return real(*args)

        return read

    def run(self, at: int, fault: Callable[[], None], command: Callable[[], object]) -> object:
        self.count, self.at, self.fault = 0, at, fault
        return command()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def failing() -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.each_value
@pytest.mark.parametrize("fault", ["shrinks", "fails", "changes"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_conversion_ends_in_a_sentence_whatever_read_the_source_fails_at(
    tmp_path: Path, reads: Reads, format: str, fault: str
) -> None:
    source, file = make(tmp_path, format)
    content, out = file.read_bytes(), tmp_path / "out"
    other = bytearray(content)
    other[len(other) // 2] ^= 1

    def command() -> object:
        return convert(source, out, to="dcp" if format == "orbax" else "orbax", workers=1)

    reads.run(-1, failing, command)
    count = reads.count
    assert count >= 3
    shutil.rmtree(out)
    kept = sorted(tmp_path.iterdir())
    faults = {
        "shrinks": lambda: os.truncate(file, len(content) // 3),
        "fails": failing,
        # As another writer does it: in place, and later.
        "changes": lambda: (file.write_bytes(other), os.utime(file, (1, 1)))[-1],
    }
    for at in range(count):
        with pytest.raises(CheckpointError) as raised:
            reads.run(at, faults[fault], command)
        text = str(raised.value)
        assert str(source) in text, text
        assert "\n" not in text, text
        assert sorted(tmp_path.iterdir()) == kept, at
        file.write_bytes(content)
    if fault == "fails":
        assert "Input/output error" in text
    assert reads.run(-1, failing, command)


@pytest.mark.parametrize("format", ["safetensors", "dcp", "npz", "torch"])
def test_the_error_of_a_bad_place_names_tensor_file_and_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source, file = make(tmp_path, format)
    bad = file.read_bytes().index(tensors()["d"].tobytes()) + 8192
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], start: int) -> int:
        # As the kernel does: all before the bad page, then the error.
        if start >= bad:
            failing()
        if start + sum(map(len, buffers)) > bad:
            (buffer,) = buffers
            return real(descriptor, [buffer[: bad - start]], start)
        return real(descriptor, buffers, start)

    with open_checkpoint(source) as reader, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        assert reader.read("c").tobytes() == tensors()["c"].tobytes()
        with pytest.raises(
            CheckpointError, match=rf"'d'.*: cannot be read at byte {bad}: Input/output error"
        ):
            reader.read("d")
        # Arrays are owned: what was read stays, whatever becomes of the file.
        kept = reader.read("b")
        os.truncate(file, 10)
        assert kept.tobytes() == tensors()["b"].tobytes()
        with pytest.raises(CheckpointError, match="the file ends at byte 10: was it shortened"):
            reader.read("b", Box((1, 1), (2, 3)))


@pytest.mark.parametrize("format", ["safetensors", "dcp", "orbax", "torch"])
def test_verify_goes_on_after_a_bad_place_and_says_what_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source, file = make(tmp_path, format)
    bad = file.read_bytes().index(tensors()["b"].tobytes()) + 4096
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], start: int) -> int:
        if start <= bad < start + sum(map(len, buffers)):
            failing()
        return real(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", preadv)
    report = verify(source, workers=1)
    assert report.opened
    assert report.damaged == ("b",)
    assert [problem.where for problem in report.problems] == ["b"]
    assert "Input/output error" in report.problems[0].text
    result = CliRunner().invoke(app, ["verify", str(source), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["damaged"] == ["b"]
    result = CliRunner().invoke(app, ["verify", str(source)])
    assert "1 of 5 tensors are damaged, the others are whole" in result.stdout


@pytest.mark.parametrize("command", ["convert", "diff", "inspect"])
def test_commands_end_with_status_2_and_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    source, _ = make(tmp_path, "safetensors")
    monkeypatch.setattr(os, "preadv", lambda *_: failing())
    monkeypatch.setattr(os, "pread", lambda *_: failing())
    second = {"convert": [str(tmp_path / "out")], "diff": [str(source)], "inspect": []}[command]
    result = CliRunner().invoke(app, [command, str(source), *second, "--json"])
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["status"] == 2
    assert "cannot be read at byte 0: Input/output error" in error["message"]
    assert not (tmp_path / "out").exists()


def test_a_comparison_with_a_checkpoint_that_is_written_to_is_none(tmp_path: Path, reads: Reads) -> None:
    source, file = make(tmp_path, "safetensors")
    reads.run(-1, failing, lambda: diff(source, source))
    last = reads.count - 1
    with pytest.raises(CheckpointError, match="was changed while it was read: it was written to"):
        reads.run(last, lambda: os.utime(file, (1, 1)), lambda: diff(source, source))


def test_a_file_that_was_replaced_while_it_was_closed_is_not_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "_MAX_OPEN_FILES", 1)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(100))
    files = source_files.SourceFiles(tmp_path)
    assert files.read("a", 0, 10) == files.read("b", 0, 10) == bytes(10)
    (tmp_path / "c").write_bytes(bytes(120))
    os.replace(tmp_path / "c", tmp_path / "a")
    with pytest.raises(
        CheckpointError, match=r"a was changed while it was read: it had 100 bytes, and now has 120"
    ):
        files.read("a", 0, 10)


def test_files_are_closed_when_the_process_has_no_descriptor_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.open, []

    def limited(path: Any, *args: Any, **options: Any) -> int:
        alive = [number for number in opened if os.path.exists(f"/proc/self/fd/{number}")]
        if str(path).startswith(str(tmp_path)):
            if len(alive) >= 3:
                raise OSError(errno.EMFILE, "Too many open files")
            opened.append(real(path, *args, **options))
            return opened[-1]
        return real(path, *args, **options)

    for number in range(20):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
    files = source_files.SourceFiles(tmp_path)
    monkeypatch.setattr(os, "open", limited)
    for number in [*range(20), *range(20)]:
        assert files.read(str(number), 0, 10) == bytes([number]) * 10


_PROGRAM = "from bridge.commands.main import main; main()"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "verify", "diff"])
def test_no_signal_ends_a_command_whose_source_another_process_shortens(tmp_path: Path, command: str) -> None:
    file = tmp_path / "m.safetensors"
    with create_checkpoint(file, "safetensors") as writer:
        for number in range(30):
            info = writer.add_tensor((f"w{number}",), (1024, 1024), np.dtype(np.float32))
        for number in range(30):
            for box in writer.chunks(f"w{number}"):
                writer.write(f"w{number}", box, np.full(box.sizes, number, info.dtype))
    size, out = file.stat().st_size, tmp_path / "out"
    second = {"convert": [str(out)], "diff": [str(file)], "verify": []}[command]
    line = [sys.executable, "-c", _PROGRAM, command, str(file), *second]
    statuses = []
    for wait in range(0, 30):
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not _has_open(process.pid, file):
            time.sleep(0.001)
        time.sleep(wait * 0.003)
        os.truncate(file, 40_960)
        _, error = process.communicate(timeout=120)
        statuses.append(process.returncode)
        assert process.returncode in ((0, 1, 2) if command == "verify" else (0, 2)), error
        assert process.returncode != -signal.SIGBUS
        assert "Traceback" not in error
        if process.returncode == 2:
            assert str(file) in error
            assert not out.exists()
        assert not list(tmp_path.glob("*.tmp-*"))
        os.truncate(file, size)
        shutil.rmtree(out, ignore_errors=True)
    assert set(statuses) - {0}, "no read was met"


def _has_open(pid: int, file: Path) -> bool:
    try:
        return any(os.readlink(link) == str(file) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_reader_notices_that_its_file_was_written_to(tmp_path: Path, name: str) -> None:
    source, file = make(tmp_path, "safetensors")
    with open_checkpoint(source) as reader:
        reader.read(name)
        os.utime(file, (1, 1))
        with pytest.raises(
            CheckpointError, match=f"'{name}' was changed while it was read: it was written to"
        ):
            reader.read(name)
        memory = memoryview(bytearray(reader.tensors[name].nbytes))
        with pytest.raises(CheckpointError, match="it was written to"):
            reader.read_into([(name, memory)])


@pytest.mark.parametrize(
    "command",
    [
        "convert",
        "verify",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("inspect", "diff", "map")),
    ],
)
@pytest.mark.parametrize("format", ["safetensors", "dcp", "orbax"])
def test_no_command_takes_a_listing_that_fails_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, command: str
) -> None:
    whole = tmp_path / "whole"
    if format == "safetensors":
        whole.mkdir()
    convert(
        make(tmp_path, "npz")[0], whole / "c.safetensors" if format == "safetensors" else whole, to=format
    )
    more = {"convert": [str(tmp_path / "out"), "--to", "dcp"], "diff": [str(whole)], "map": [str(whole)]}
    arguments = [command, str(whole), *more.get(command, []), "--json"]
    listings = 0
    fails_at = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def listing(path: Any = ".") -> Any:
            nonlocal listings
            if str(path).startswith(str(whole)):
                listings += 1
                if listings == fails_at:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path)

        return listing

    monkeypatch.setattr(os, "listdir", failing(os.listdir))
    monkeypatch.setattr(os, "scandir", failing(os.scandir))
    assert CliRunner().invoke(app, arguments).exit_code in (0, 1)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    for fails_at in range(1, listings + 1):
        listings = 0
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in ((1, 2) if command == "verify" else (2,)), (fails_at, result.output)
        assert os.strerror(errno.EIO) in result.stdout
        json.loads(result.stdout)
        assert not (tmp_path / "out").exists()
