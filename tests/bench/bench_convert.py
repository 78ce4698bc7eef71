"""Compare `twinshard convert` with the naive way through both frameworks and with `cp -r`, in one run.

Makes a DCP checkpoint of the given size (weights and two moments of matrices, all fp32 or all bf16). Converts the
checkpoint to Orbax and back by each path, and a safetensors copy to Orbax. Every path runs in a fresh process. Prints
wall seconds, CPU seconds and peak memory above the imports, with ratios to `cp -r` of the same bytes. The naive way is
the script that people write by hand:

    DCP -> Orbax    dcp_to_torch_save, torch.load, NumPy, StandardCheckpointer.save
    Orbax -> DCP    StandardCheckpointer.restore, torch, dcp.save

Before every path the script syncs the disk and pauses, so that earlier writes and freed memory do not matter.

"save of resident arrays" is the frameworks' own save of arrays that are already in memory.

    python -m tests.bench.bench_convert --gigabytes 2 --repeat 3
    python -m tests.bench.bench_convert --gigabytes 8 --repeat 1 --no-naive
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
ROWS, COLUMNS = 4096, 8192
SETTLE_SECONDS = 8

COMMON = """
import resource, sys, time, warnings
warnings.simplefilter("ignore")
def done(started, before):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("RESULT", time.perf_counter() - started, (peak - before) / 1e3 * 1.024)
def begin():
    return time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""
TREE = """
def tree(draw, matrices):
    names = [f"layers.{i}.weight" for i in range(matrices)]
    return {"model": {n: draw() for n in names},
            "optimizer": {"state": {n: {"exp_avg": draw(), "exp_avg_sq": draw()} for n in names}}}
"""
MAKE = (
    TREE
    + """
import sys, torch, torch.distributed.checkpoint as dcp
path, matrices, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
draw = lambda: torch.randn(ROWS, COLUMNS).to(dtype)
dcp.save(tree(draw, matrices), checkpoint_id=path, no_dist=True)
"""
)
OURS = (
    COMMON
    + """
import tensorstore, bridge.core.formats.dcp.reader, bridge.core.formats.dcp.writer
import bridge.core.formats.orbax.reader, bridge.core.formats.orbax.writer
import bridge.core.formats.safetensors.reader, bridge.core.formats.safetensors.writer
from bridge.checkpoints.convert import convert
start = begin()
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], verify="unverified" not in sys.argv)
done(*start)
"""
)
NAIVE_TO_ORBAX = (
    COMMON
    + """
import os, ml_dtypes, numpy as np, torch, orbax.checkpoint as ocp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
start = begin()
single = sys.argv[2] + ".pt"
dcp_to_torch_save(sys.argv[1], single)
state = torch.load(single, weights_only=True)
def numpy(x):
    if isinstance(x, dict):
        return {k: numpy(v) for k, v in x.items()}
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
checkpointer = ocp.StandardCheckpointer()
checkpointer.save(sys.argv[2], numpy(state))
checkpointer.wait_until_finished()
os.unlink(single)
done(*start)
"""
)
NAIVE_TO_DCP = (
    COMMON
    + """
import numpy as np, torch, orbax.checkpoint as ocp, torch.distributed.checkpoint as dcp
start = begin()
def tensors(x):
    if isinstance(x, dict):
        return {k: tensors(v) for k, v in x.items()}
    x = np.array(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
dcp.save(tensors(ocp.StandardCheckpointer().restore(sys.argv[1])), checkpoint_id=sys.argv[2], no_dist=True)
done(*start)
"""
)
DCP_SAVE = (
    COMMON
    + TREE
    + """
import torch, torch.distributed.checkpoint as dcp
draw = lambda: torch.randn(ROWS, COLUMNS).to(getattr(torch, sys.argv[3]))
state = tree(draw, int(sys.argv[1]))
start = begin()
dcp.save(state, checkpoint_id=sys.argv[2], no_dist=True)
done(*start)
"""
)
ORBAX_SAVE = (
    COMMON
    + TREE
    + """
import ml_dtypes, numpy as np, orbax.checkpoint as ocp
rng = np.random.default_rng(0)
draw = lambda: rng.standard_normal((ROWS, COLUMNS), np.float32).astype(sys.argv[3])
state = tree(draw, int(sys.argv[1]))
start = begin()
checkpointer = ocp.StandardCheckpointer()
checkpointer.save(sys.argv[2], state)
checkpointer.wait_until_finished()
done(*start)
"""
)


@dataclass(frozen=True)
class Cost:
    """Wall seconds of the work, CPU seconds of the whole process, and peak MB of memory above the imports."""

    wall: float
    cpu: float
    peak: float


def program(text: str, *arguments: object) -> list[str]:
    text = f"ROWS, COLUMNS = {ROWS}, {COLUMNS}\n{text}"
    return [sys.executable, "-c", text, *map(str, arguments)]


def measure(arguments: list[str]) -> Cost:
    """Run one path. A program prints the seconds of its own work; `cp` is timed from outside."""
    started = time.perf_counter()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"exit status {status}: {' '.join(arguments)[:400]}")
    cpu = used.ru_utime + used.ru_stime
    for line in printed.splitlines():
        if line.startswith("RESULT"):
            wall, peak = map(float, line.split()[1:])
            return Cost(wall, cpu, peak)
    return Cost(time.perf_counter() - started, cpu, used.ru_maxrss * 1024 / 1e6)


def median(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(getattr(c, field) for c in costs) for field in ("wall", "cpu", "peak")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--no-naive", action="store_true", help="skip the paths that hold everything in memory"
    )
    options = parser.parse_args()
    size = ROWS * COLUMNS * (4 if options.dtype == "float32" else 2)
    matrices = max(1, round(options.gigabytes * 1e9 / (3 * size)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dcp, orbax, safetensors = folder / "dcp", folder / "orbax", folder / "safetensors"
        subprocess.run(program(MAKE, dcp, matrices, options.dtype), check=True, stderr=subprocess.DEVNULL)
        for path, format in ((orbax, "orbax"), (safetensors, "safetensors")):
            subprocess.run(program(OURS, dcp, path, format), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        bytes_ = sum(path.stat().st_size for path in dcp.rglob("*") if path.is_file())

        paths: dict[str, Callable[[str], list[str]]] = {
            "cp -r": lambda out: ["cp", "-r", str(dcp), out],
            "DCP -> Orbax, twinshard": lambda out: program(OURS, dcp, out, "orbax"),
            "Orbax -> DCP, twinshard": lambda out: program(OURS, orbax, out, "dcp"),
            "safetensors -> Orbax, twinshard": lambda out: program(OURS, safetensors, out, "orbax"),
            "safetensors -> Orbax, twinshard, --no-verify": lambda out: program(
                OURS, safetensors, out, "orbax", "unverified"
            ),
        }
        if not options.no_naive:
            paths |= {
                "DCP -> Orbax, naive": lambda out: program(NAIVE_TO_ORBAX, dcp, out),
                "Orbax -> DCP, naive": lambda out: program(NAIVE_TO_DCP, orbax, out),
                "Orbax, save of resident arrays": lambda out: program(
                    ORBAX_SAVE, matrices, out, options.dtype
                ),
                "DCP, save of resident arrays": lambda out: program(DCP_SAVE, matrices, out, options.dtype),
            }
        costs: dict[str, list[Cost]] = {name: [] for name in paths}
        for _ in range(options.repeat):
            for name, build in paths.items():
                # Freed memory is cheap to reuse for some seconds, until a virtual machine returns it to its host: `cp`
                # right after a removal takes a third of the time. A program that first imports its libraries is too
                # late.
                os.sync()
                time.sleep(SETTLE_SECONDS)
                costs[name].append(measure(build(str(folder / "out"))))
                shutil.rmtree(folder / "out")

    versions = ", ".join(
        f"{n} {importlib.metadata.version(n)}" for n in ("torch", "jax", "orbax-checkpoint", "tensorstore")
    )
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
    )
    print(f"checkpoint {bytes_ / 1e6:.0f} MB, {options.dtype}, median of {options.repeat}\n")
    print("| path | wall s | over cp -r | CPU s, with imports | peak MB above imports |")
    print("|---|---:|---:|---:|---:|")
    base = median(costs["cp -r"]).wall
    for name, runs in costs.items():
        cost = median(runs)
        print(f"| {name} | {cost.wall:.1f} | {cost.wall / base:.2f} | {cost.cpu:.1f} | {cost.peak:.0f} |")


if __name__ == "__main__":
    main()
