"""Measure the cost per tensor of many small tensors: conversions between all formats, inspect, verify and diff.

The work and `cp -r` of the same checkpoint take turns in one run. The table shows the fastest of several runs, in wall
seconds and CPU seconds. The work runs in this process. Only the last lines run the `twinshard` command with its
start-up.

    python -m tests.bench.bench_small_tensors                                    20,000 tensors, 2 GB
    python -m tests.bench.bench_small_tensors --tensors 5000 --bytes 512
    python -m tests.bench.bench_small_tensors --scratch /dev/shm                 without a disk
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.workers import default_workers
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint

FORMATS = ("dcp", "orbax", "safetensors")
ROOT = Path(__file__).parents[2]
COLUMNS = 64


def make(path: Path, tensors: int, nbytes: int) -> None:
    rng = np.random.default_rng(0)
    shape = (max(1, nbytes // (4 * COLUMNS)), COLUMNS)
    with create_checkpoint(path, "dcp") as writer:
        names = [
            writer.add_tensor(("model", f"layers.{i}.w"), shape, np.dtype(np.float32)).name
            for i in range(tensors)
        ]
        for name in names:
            for box in writer.chunks(name):
                writer.write(name, box, rng.random(box.sizes, np.float32))


def command(*arguments: object) -> Callable[[], object]:
    line = [sys.executable, "-m", "bridge.commands.main", *map(str, arguments)]
    return lambda: subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=100 << 10, help="bytes of each tensor")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="a directory on the disk to measure")
    options = parser.parse_args()
    gigabytes = options.tensors * options.bytes / 1e9
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end=""
    )
    print(
        f"load {os.getloadavg()[0]:.0f}; {options.tensors} tensors of {options.bytes} bytes, {gigabytes:.2f} GB\n"
    )

    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        make(folder / "dcp", options.tensors, options.bytes)
        for format in FORMATS[1:]:
            convert(folder / "dcp", folder / format, to=format)
        out, workers = folder / "out", default_workers()
        works: dict[str, Callable[[], object]] = {
            "`cp -r`": lambda: subprocess.run(["cp", "-r", folder / "dcp", out], check=True)
        }
        for a, b in itertools.permutations(FORMATS, 2):
            works[f"{a} -> {b}"] = lambda a=a, b=b: convert(folder / a, out, to=b)
        for format in FORMATS:
            works[f"inspect {format}"] = lambda format=format: inspect(folder / format)
        for format in FORMATS:
            works[f"verify {format}"] = lambda format=format: verify(folder / format)
        for a, b in itertools.combinations(FORMATS, 2):
            works[f"diff {a} {b}"] = lambda a=a, b=b: diff(folder / a, folder / b, workers=workers)
        for format in FORMATS:
            works[f"`twinshard inspect`, {format}"] = command("inspect", folder / format)
        works["`twinshard --version`, for comparison"] = command("--version")

        best: dict[str, tuple[float, float]] = {}
        for title in list(works) * options.repeat:
            if out.exists():
                shutil.rmtree(out)
            # Earlier writes must not reach the disk during a measurement.
            os.sync()
            wall, cpu = time.perf_counter(), sum(os.times()[:4])
            works[title]()
            spent = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
            best[title] = tuple(map(min, best.get(title, spent), spent))
    copy = best["`cp -r`"][0]
    print("| work | wall s | over `cp -r` | CPU s | CPU us per tensor |\n|---|---:|---:|---:|---:|")
    for title, (wall, cpu) in best.items():
        print(f"| {title} | {wall:.2f} | {wall / copy:.1f} | {cpu:.2f} | {cpu / options.tensors * 1e6:.0f} |")


if __name__ == "__main__":
    main()
