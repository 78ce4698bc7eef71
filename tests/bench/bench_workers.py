"""Measure the speed-up of a second worker, for a mapped conversion that transposes every matrix.

Also tells which steps keep Python's global lock: a thread that sleeps 1 ms at a time counts how often it runs.

Every conversion is a fresh process, and one and two workers take turns. If other programs keep the cores busy, wall
seconds say little, because the system gives each process a fixed share. The table therefore also estimates the ratio on
idle cores from the kernel's counts for each thread: seconds on a core, and seconds blocked (neither on a core nor
waiting for a core). A thread that waits for the lock counts as blocked, even while the holder of the lock waits for a
core. Use the estimate only if no core is idle.

    python -m tests.bench.bench_workers --megabytes 1000 --repeat 5
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
import zstandard

from bridge.core.formats import create_checkpoint
from bridge.core.formats.tensors.arrays import extend

ROOT = Path(__file__).parents[2]
ROWS, COLUMNS = 4096, 4096
MAPPING = """
[convention.one]
[convention.two]
[[rule]]
one = "layers.{i}.weight : x y"
two = "layers.{i}.kernel : y x"
"""
CONVERT = """
import sys, threading, time, tensorstore
import bridge.checkpoints.convert.conversion as convert
from bridge.checkpoints.convert.engine import Copier
from bridge.core.formats.orbax import writer; from bridge.core.formats.dcp import reader
alone = []
def on_core_and_queued():
    text = open(f"/proc/self/task/{threading.get_native_id()}/schedstat").read()
    return [int(number) / 1e9 for number in text.split()[:2]]
def measured(self, copy=Copier._copy):
    begun, (core, queued) = time.perf_counter(), on_core_and_queued()
    copy(self)
    wall, after = time.perf_counter() - begun, on_core_and_queued()
    # Leave out the time spent waiting for a core.
    alone.append(wall - (after[1] - queued))
Copier._copy = measured
started, core = time.perf_counter(), time.thread_time()
source, destination, mapping, workers = sys.argv[1:]
convert.convert(source, destination, to="orbax", mapping=mapping, into="two", workers=int(workers))
serial = time.thread_time() - core - (alone[0] if workers == "1" else 0)
print(time.perf_counter() - started, max(serial, 0) + max(alone))
"""


@dataclass(frozen=True)
class Run:
    """Seconds of one conversion: wall time, wall time without waits for a core, and CPU time with imports."""

    wall: float
    alone: float
    user: float
    system: float


def make(path: Path, matrices: int) -> None:
    rng = np.random.default_rng(0)
    with create_checkpoint(path, "dcp") as writer:
        names = [
            writer.add_tensor(("layers", str(i), "weight"), (ROWS, COLUMNS), np.dtype(np.float32)).name
            for i in range(matrices)
        ]
        for name in names:
            for box in writer.chunks(name):
                writer.write(name, box, rng.standard_normal(box.sizes, np.float32))


def measure(source: Path, destination: Path, mapping: Path, workers: int) -> Run:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, source, destination, mapping, str(workers)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(destination)
    return Run(
        *map(float, done.stdout.split()), after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    )


def spare_cores() -> float:
    """Number of idle cores, averaged over a second."""
    first = _idle()
    time.sleep(1)
    return (_idle() - first) / os.sysconf("SC_CLK_TCK")


def _idle() -> int:
    return int(Path("/proc/stat").read_text().split()[4])


def keeps_lock(work: Callable[[], object]) -> tuple[float, int]:
    """CPU seconds of the work, and how often another thread ran during the work."""
    moments: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            moments.append(time.perf_counter())
            time.sleep(1e-3)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    time.sleep(0.02)
    began, cpu = time.perf_counter(), time.thread_time()
    work()
    ended, cpu = time.perf_counter(), time.thread_time() - cpu
    stop.set()
    thread.join()
    return cpu, sum(began < moment < ended for moment in moments)


def print_steps() -> None:
    nbytes = 128 << 20
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    data.flags.writeable = False
    fp32, half = data.view(np.float32).reshape(4096, -1), data.view(ml_dtypes.bfloat16).reshape(4096, -1)
    packed = zstandard.ZstdCompressor(level=1).compress(data)
    steps: dict[str, Callable[[], object]] = {
        "CRC-32C by the Python extension (not used)": lambda: google_crc32c.extend(0, data),
        "CRC-32C by the C library (used)": lambda: extend(0, data),
        "CRC-32 (zlib)": lambda: zlib.crc32(data),
        "transpose fp32": lambda: np.ascontiguousarray(fp32.T),
        "transpose bf16, as uint16": lambda: np.ascontiguousarray(half.view(np.uint16).T),
        "transpose bf16, by ml_dtypes": lambda: np.ascontiguousarray(half.T),
        "cast bf16 to fp32": lambda: half.astype(np.float32),
        "zstd decompression": lambda: zstandard.ZstdDecompressor().decompress(packed, max_output_size=nbytes),
    }
    print("| step, 134 MB | CPU s | another thread ran, times |\n|---|---:|---:|")
    for name, work in steps.items():
        with np.errstate(invalid="ignore"):
            cpu, times = keeps_lock(work)
        print(f"| {name} | {cpu:.3f} | {times} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    matrices = max(2, round(options.megabytes * 1e6 / (ROWS * COLUMNS * 4)))
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print_steps()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source, mapping = folder / "source", folder / "mapping.toml"
        mapping.write_text(MAPPING)
        make(source, matrices)
        print(
            f"\n{matrices} matrices of {ROWS} x {COLUMNS} fp32, transposed, DCP to Orbax\n\n"
            "| idle cores | 1 worker: wall s | user | system | 2 workers: wall s | user | system | ratio "
            "| with idle cores |\n"
            "|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
        )
        best = idle = 0.0
        for _ in range(options.repeat):
            spare = spare_cores()
            single = measure(source, folder / "out", mapping, 1)
            double = measure(source, folder / "out", mapping, 2)
            best, idle = max(best, single.wall / double.wall), max(idle, single.alone / double.alone)
            print(
                f"| {spare:.1f} | {single.wall:.2f} | {single.user:.2f} | {single.system:.2f} "
                f"| {double.wall:.2f} | {double.user:.2f} | {double.system:.2f} "
                f"| {single.wall / double.wall:.2f} | {single.alone / double.alone:.2f} |",
                flush=True,
            )
        print(f"\nbest ratio: {best:.2f}, with idle cores {idle:.2f}")


if __name__ == "__main__":
    main()
