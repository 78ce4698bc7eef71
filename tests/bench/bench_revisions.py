"""Compare conversions by two revisions of this repository, in turns, and `cp -r` of the same bytes.

Converts few large tensors (8 of 64 MB) and many small tensors (10,000 of 50 kB) without a disk, so that a slower
revision shows clearly. Every conversion runs in a fresh process. Prints the median wall seconds of both revisions, the
median ratio of the rounds with its spread, and both revisions as multiples of `cp -r`.

    git worktree add ../before REVISION
    python -m tests.bench.bench_revisions --before ../before --scratch FOLDER_IN_MEMORY --rounds 5
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = {"8 of 64 MB": (8, 4096, 4096), "10,000 of 50 kB": (10_000, 128, 100)}
PATHS = (
    ("orbax", "dcp"),
    ("dcp", "orbax"),
    ("safetensors", "orbax"),
    ("dcp", "safetensors"),
)
MAKE = """
import sys, torch, torch.distributed.checkpoint as dcp
count, rows, columns = map(int, sys.argv[2:])
model = {f"layers.{i}.weight": torch.randn(rows, columns) for i in range(count)}
dcp.save({"model": model}, checkpoint_id=sys.argv[1], no_dist=True)
"""
CONVERT = """
import resource, sys, time
import bridge.core.formats.dcp.reader, bridge.core.formats.orbax.reader, bridge.core.formats.safetensors.reader
from bridge.checkpoints.convert.conversion import convert
before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
convert(sys.argv[1], sys.argv[2], to=sys.argv[3])
print("RESULT", time.perf_counter() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def run(tree: Path, text: str, *arguments: object) -> str:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    # `python -c` first imports from its working directory.
    process = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{tree}: {process.stderr[-2000:]}")
    return process.stdout


def removed(path: Path) -> Path:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def converted(tree: Path, source: Path, target: Path, form: str) -> tuple[float, float]:
    """Wall seconds of a conversion, and its peak MiB of memory above the imports."""
    printed = run(tree, CONVERT, source, removed(target), form)
    line = next(line for line in printed.splitlines() if line.startswith("RESULT"))
    wall, peak = map(float, line.split()[1:])
    return wall, peak


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other revision")
    parser.add_argument("--scratch", type=Path, default=None, help="a folder for the checkpoints")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| tensors | path | before, s | now, s | now / before | before / cp | now / cp | peaks, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for label, size in SIZES.items():
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            folder = Path(scratch)
            sources = {"dcp": folder / "dcp", "orbax": folder / "o", "safetensors": folder / "s.safetensors"}
            run(ROOT, MAKE, sources["dcp"], *size)
            for form in ("orbax", "safetensors"):
                converted(ROOT, sources["dcp"], sources[form], form)
            for source, form in PATHS:
                target = folder / ("to.safetensors" if form == "safetensors" else "to")
                walls: list[tuple[float, float, float]] = []
                peaks = [0.0, 0.0]
                for number in range(options.rounds):
                    seconds = [0.0, 0.0]
                    # The second run finds a warmer machine, so the order alternates.
                    for which in (0, 1) if number % 2 else (1, 0):
                        tree = ROOT if which else options.before.resolve()
                        seconds[which], peak = converted(tree, sources[source], target, form)
                        peaks[which] = max(peaks[which], peak)
                    copy = removed(folder / "copy")
                    started = time.perf_counter()
                    subprocess.run(["cp", "-r", sources[source], copy], check=True)
                    walls.append((*seconds, time.perf_counter() - started))
                    removed(copy)
                removed(target)
                before, now, copies = zip(*walls, strict=True)
                ratios = [b / a for a, b, _ in walls]
                over = [statistics.median(times) / statistics.median(copies) for times in (before, now)]
                print(
                    f"| {label} | {source} to {form} | {statistics.median(before):.2f} | {statistics.median(now):.2f} "
                    f"| {spread(ratios)} | {over[0]:.2f} | {over[1]:.2f} | {peaks[0]:.0f}, {peaks[1]:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
