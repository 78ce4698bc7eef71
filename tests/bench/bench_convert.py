"""Conversion against its peers in one run: `twinshard convert`, the naive way through both frameworks, and `cp -r`.

Makes a DCP checkpoint of the given size (weights and two moments of equal fp32 matrices), converts it to Orbax and
back by each path, every path in a fresh process, and prints wall seconds, CPU seconds and peak RSS with ratios.

    python -m tests.bench.bench_convert --megabytes 512 --repeat 3
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

MAKE = """
import sys, torch, torch.distributed.checkpoint as dcp
path, matrices = sys.argv[1], int(sys.argv[2])
names = [f"layers.{i}.weight" for i in range(matrices)]
draw = lambda: torch.randn(1024, 2731)  # 11.2 MB
state = {"model": {n: draw() for n in names},
         "optimizer": {"state": {n: {"exp_avg": draw(), "exp_avg_sq": draw()} for n in names}}}
dcp.save(state, checkpoint_id=path, no_dist=True)
"""
NAIVE_TO_ORBAX = """
import sys, torch, numpy as np, orbax.checkpoint as ocp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
state = _load_state_dict_from_keys(checkpoint_id=sys.argv[1])
to_numpy = lambda x: {k: to_numpy(v) for k, v in x.items()} if isinstance(x, dict) else x.numpy()
checkpointer = ocp.StandardCheckpointer()
checkpointer.save(sys.argv[2], to_numpy(state))
checkpointer.wait_until_finished()
"""
NAIVE_TO_DCP = """
import sys, torch, numpy as np, orbax.checkpoint as ocp, torch.distributed.checkpoint as dcp
to_torch = lambda x: {k: to_torch(v) for k, v in x.items()} if isinstance(x, dict) else torch.from_numpy(np.array(x))
dcp.save(to_torch(ocp.StandardCheckpointer().restore(sys.argv[1])), checkpoint_id=sys.argv[2], no_dist=True)
"""


@dataclass(frozen=True)
class Cost:
    """One process, imports included: wall and CPU seconds, peak RSS in MB (10^6 bytes)."""

    wall: float
    cpu: float
    peak: float


def measure(arguments: list[str]) -> Cost:
    started = time.perf_counter()
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"exit status {status}: {' '.join(arguments)[:200]}")
    return Cost(time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6)


def median(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(getattr(c, field) for c in costs) for field in ("wall", "cpu", "peak")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    python = sys.executable
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dcp, orbax = folder / "dcp", folder / "orbax"
        matrices = max(1, round(options.megabytes / (3 * 1024 * 2731 * 4 / 1e6)))
        subprocess.run([python, "-c", MAKE, str(dcp), str(matrices)], check=True)
        ours = [python, "-m", "bridge.cli", "convert"]
        subprocess.run([*ours, str(dcp), str(orbax)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        size = sum(path.stat().st_size for path in dcp.rglob("*") if path.is_file()) / 1e6

        paths: dict[str, Callable[[str], list[str]]] = {
            "DCP -> Orbax, twinshard": lambda out: [*ours, str(dcp), out],
            "DCP -> Orbax, naive": lambda out: [python, "-c", NAIVE_TO_ORBAX, str(dcp), out],
            "Orbax -> DCP, twinshard": lambda out: [*ours, str(orbax), out, "--to", "dcp"],
            "Orbax -> DCP, naive": lambda out: [python, "-c", NAIVE_TO_DCP, str(orbax), out],
            "cp -r": lambda out: ["cp", "-r", str(dcp), out],
        }
        costs: dict[str, list[Cost]] = {name: [] for name in paths}
        for _ in range(options.repeat):
            for name, build in paths.items():
                costs[name].append(measure(build(str(folder / "out"))))
                shutil.rmtree(folder / "out")
        imports = measure([python, "-c", "import bridge.cli, bridge.convert, tensorstore"])

    versions = ", ".join(
        f"{n} {importlib.metadata.version(n)}" for n in ("torch", "jax", "orbax-checkpoint", "tensorstore")
    )
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
    )
    print(f"checkpoint {size:.0f} MB, median of {options.repeat}; imports alone {imports.peak:.0f} MB\n")
    print("| path | wall s | CPU s | peak RSS MB | peak over checkpoint |")
    print("|---|---:|---:|---:|---:|")
    for name, runs in costs.items():
        cost = median(runs)
        print(f"| {name} | {cost.wall:.1f} | {cost.cpu:.1f} | {cost.peak:.0f} | {cost.peak / size:.2f} |")


if __name__ == "__main__":
    main()
