"""Many small tensors: what a tensor costs beside its bytes. Conversion of each format into each other, and listing.

python -m tests.bench.bench_small_tensors --tensors 5000
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bridge.checkpoints.convert import convert
from bridge.checkpoints.summary import inspect
from bridge.formats import create_checkpoint

FORMATS = ("dcp", "orbax", "safetensors")
ROOT = Path(__file__).parents[2]


def make(path: Path, tensors: int) -> None:
    rng = np.random.default_rng(0)
    with create_checkpoint(path, "dcp") as writer:
        names = [
            writer.add_tensor(("model", f"layers.{i}.w"), (8, 16), np.dtype(np.float32)).name
            for i in range(tensors)
        ]
        for name in names:
            for box in writer.chunks(name):
                writer.write(name, box, rng.standard_normal(box.sizes).astype(np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=5000)
    options = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{options.tensors} tensors of 512 bytes\n\n| work | wall s | CPU s |\n|---|---:|---:|")

    def timed(title: str, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        work()
        print(f"| {title} | {time.perf_counter() - wall:.2f} | {sum(os.times()[:4]) - cpu:.2f} |", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make(folder / "dcp", options.tensors)
        for format in FORMATS[1:]:
            convert(folder / "dcp", folder / format, to=format)
        for a, b in itertools.permutations(FORMATS, 2):
            timed(f"{a} -> {b}", lambda a=a, b=b: convert(folder / a, folder / f"{a}-{b}", to=b))
        for format in FORMATS:
            timed(f"list {format}", lambda format=format: inspect(folder / format))
        for format in FORMATS:
            command = [sys.executable, "-m", "bridge.commands.main", "inspect", str(folder / format)]
            timed(
                f"`twinshard inspect`, {format}, imports and printing included",
                lambda command=command: subprocess.run(
                    command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL
                ),
            )


if __name__ == "__main__":
    main()
