"""Kill conversions in parts before their n-th file operation, for every n, each in a fresh process.

    python -m tests.support.bridge.parts_killed FOLDER FORMAT FIRST STEP [--resume] [--replace]

Part 2 of 2 is complete. Part 1 runs last and commits. It is killed before operation FIRST, FIRST + STEP, and so on,
until it needs fewer operations. Each time the destination must be absent (with --replace: the old one) or complete. A
second run of part 1 must complete the destination and leave nothing next to it. Prints the number of kills, and the
number of second runs that reused bytes from a journal.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bridge.checkpoints.convert import engine
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.convert.plan import ConvertOptions
from bridge.checkpoints.jobs import pieces
from bridge.checkpoints.jobs.array_jobs import PartReport, convert_part
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.files import atomic, data_file, record
from bridge.core.formats.orbax.zarr import chunks
from bridge.core.formats.tensors import boxes
from tests.support.bridge.killed import OPERATIONS


def small_chunks() -> None:
    """Use chunks, pieces and syncs of a few kilobytes in this process, so that small tensors have several."""
    boxes.CHUNK_BYTES = 4096
    chunks._CHUNK, chunks._MAX_CHUNK = 2048, 4096
    pieces.PIECE_BYTES = pieces._SMALLEST_PIECE = 4096
    record.SYNC_BYTES = 4000
    engine.TOGETHER_BYTES = 3000
    data_file._DIRECT_BYTES = data_file.BLOCK


def make(path: Path, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (40, 7), "b": (300, 16), "none": (0, 3), "c": (300, 17), "d": (), "e": (60, 50)}
    arrays = {
        name: np.asarray(rng.standard_normal(shape), np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    with create_checkpoint(path, "dcp") as writer:
        for name, array in arrays.items():
            writer.add_tensor((name,), array.shape, array.dtype)
        writer.add_object(("note",), f"seed {seed}")
        for name, array in arrays.items():
            for box in writer.chunks(name):
                writer.write(name, box, array[box.slices()])
    return arrays


def holds(path: Path, arrays: dict[str, np.ndarray], note: str) -> None:
    with open_checkpoint(path) as reader:
        assert set(reader.tensors) == set(arrays), path
        for name, array in arrays.items():
            assert np.array_equal(reader.read(name), array), (path, name)
        assert reader.objects["note"] == note, path
    problems = verify(path).problems
    assert not problems, problems


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a forked process that runs this, or minus the signal that ended the process."""
    child = os.fork()
    if child == 0:
        status = 0
        try:
            work()
        except BaseException:
            traceback.print_exc()
            status = 1
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_before(last: int) -> None:
    count = itertools.count(1)

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    atomic.exchange = counted(atomic.exchange)
    atomic.rename_new = counted(atomic.rename_new)


def main() -> None:
    path, format, first, step, *flags = sys.argv[1:]
    small_chunks()
    folder, options = Path(path), ConvertOptions(to=format)
    resume, replace = "--resume" in flags, "--replace" in flags
    arrays, old = make(folder / "source", 1), make(folder / "old", 2)
    home = folder / "home"

    def part(number: int, again: bool = False) -> PartReport:
        return convert_part(
            folder / "source",
            home / "c",
            options,
            number,
            2,
            workers=1,
            replace=replace,
            resume=again and resume,
        )

    def killed(last: int) -> None:
        kill_before(last)
        part(1, again=True)

    taken_over = folder / "taken_over"

    def run_again() -> None:
        report = part(1, again=True)
        assert report.committed, report
        if report.resumed_bytes:
            taken_over.write_bytes(taken_over.read_bytes() + b"x" if taken_over.exists() else b"x")
        holds(home / "c", arrays, "seed 1")
        assert os.listdir(home) == ["c"], os.listdir(home)
        assert not (home / "c" / "twinshard.parts").exists()

    kills = 0
    for last in itertools.count(int(first), int(step)):
        shutil.rmtree(home, ignore_errors=True)
        if replace:
            assert in_child(lambda: convert(folder / "old", home / "c", to=format)) == 0
        assert in_child(lambda: part(2)) == 0
        status = in_child(lambda last=last: killed(last))
        assert status in (0, -signal.SIGKILL), status
        if (home / "c").exists():
            try:
                in_child_holds(home / "c", arrays, "seed 1")
            except AssertionError:
                assert replace, f"half of it after kill {last}"
                in_child_holds(home / "c", old, "seed 2")
        else:
            assert not replace, f"the old one is gone after kill {last}"
        assert in_child(run_again) == 0, last
        if status == 0:
            break
        kills += 1
    print(kills, taken_over.stat().st_size if taken_over.exists() else 0)


def in_child_holds(path: Path, arrays: dict[str, np.ndarray], note: str) -> None:
    """Run in a child, because this process must not have tensorstore's threads when it forks."""
    saved = os.dup(2)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        assert in_child(lambda: holds(path, arrays, note)) == 0
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(silent)


if __name__ == "__main__":
    main()
