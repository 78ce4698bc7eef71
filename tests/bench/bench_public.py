"""Compare the estimates of ``twinshard plan --target`` with published measurements of other programs.

Nothing runs. The table shows what XLA's compilers and the roofline say of a Llama in plain flax (``public_llama.py``),
next to the published rate of another program of the same sizes on a real machine. The two programs differ in known
ways. The largest difference is attention: without a fused kernel its scores go to memory and back. The table therefore
also shows the rate of the matrix products alone, and the published rate lies between the two. Here whole layers are
recomputed; for 8 B models torchtitan recomputed selected operations only.

    make compilers
    python -m tests.bench.bench_public                 # GPUs, minutes
    python -m tests.bench.bench_public --only v5p      # targets and models with these letters; TPUs take longer
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bridge.compiling.machines.hardware import machine_named
from bridge.compiling.machines.targets import target_named
from bridge.compiling.target_plan import TargetRow, plan_targets
from bridge.compiling.target_step import BatchArray, StepRequest
from bridge.compiling.target_time import Estimate, Roofline
from bridge.core.text import human_bytes
from bridge.planning import Workload, load_policy
from bridge.planning.models.models import resolve_models

TORCHTITAN = "torchtitan, docs/performance.md"
TIERING = "MaxText, docs/reference/models/tiering.md"


@dataclass(frozen=True)
class Published:
    """``rate``: tokens a second and device. ``memory``: bytes of one device, or None if they were not published."""

    model: str
    parameters: str
    target: str
    rows: int
    length: int
    recompute: str
    rate: float
    memory: float | None
    source: str


FIGURES = (
    Published("llama3_8b", "8 B", "a100:64", 1, 8192, "selected operations", 2973, None, TORCHTITAN),
    Published("llama3_70b", "70 B", "a100:64", 1, 8192, "layers", 331, None, TORCHTITAN),
    # On cards with 96 GB at 2.4 TB/s and 500 W; ours have 80 GB at 3.35 TB/s and 700 W.
    Published("llama3_8b", "8 B", "h100:8", 2, 8192, "selected operations", 5762, 82.4 * 2**30, TORCHTITAN),
    Published("llama3_8b", "8 B", "v6e:16x16", 1, 8192, "as tuned", 7207, None, TIERING),
    Published("llama2_70b", "70 B", "v5p:8x8x8", 1, 4096, "as tuned", 692, None, TIERING),
)
HEADINGS = (
    "model", "machine", "rows x tokens", "published tokens/s", "estimate", "over published", "products alone", "peak",
    "measured peak", "products", "memory", "exposed", "compile s",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="100:", help="only targets and models that contain this text; default: GPUs"
    )
    options = parser.parse_args(arguments)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("|" + "|".join(HEADINGS) + "|\n" + "|---" * 3 + "|---:" * (len(HEADINGS) - 3) + "|", flush=True)
    for figure in FIGURES:
        if options.only in f"{figure.target} {figure.model}":
            print("|" + "|".join(cells(figure)) + "|", flush=True)
    for source in dict.fromkeys(figure.source for figure in FIGURES):
        print(f"\npublished: {source}")


def cells(figure: Published) -> tuple[str, ...]:
    """The cells of one row of the table."""
    row, estimate = compiled(figure)
    time_, per_device = estimate.time, figure.rows * figure.length
    first = (
        f"Llama, {figure.parameters}",
        figure.target,
        f"{figure.rows} x {figure.length}",
        f"{figure.rate:,.0f}",
    )
    peak = "failed" if row.peak is None else human_bytes(row.peak)
    measured = "" if figure.memory is None else human_bytes(int(figure.memory))
    if time_ is None:
        return (*first, "unknown", "", "", peak, measured, "", "", "", "")
    rate = per_device / time_.total
    parts = (f"{part / time_.total:.0%}" for part in (time_.products, time_.memory, time_.exposed))
    seconds = f"{(row.found or {})['seconds']:.0f}"
    alone = f"{per_device / time_.products:,.0f}"
    return (*first, f"{rate:,.0f}", f"{rate / figure.rate:.2f}", alone, peak, measured, *parts, seconds)


def compiled(figure: Published) -> tuple[TargetRow, Estimate]:
    """Compile with recomputed layers, float32 parameters and moments, and bfloat16 products."""
    module = "tests.bench.public_llama"
    batch = {"tokens": BatchArray((figure.rows, figure.length + 1), "int32")}
    step = StepRequest(
        f"{module}:{figure.model}",
        Workload(figure.rows, figure.length, 1),
        ("layers",),
        f"{module}:loss",
        batch,
    )
    policy = replace(load_policy("fsdp_bf16"), source="fsdp_bf16")
    (row,) = plan_targets(
        step, [policy], [target_named(figure.target)], recommended=True, say=lambda _: None
    ).rows
    model = resolve_models(step.model, ("jax",), step.stacked)["jax"]
    roofline = Roofline(model.numel, figure.rows * figure.length)
    assert machine_named(figure.target).devices == row.task.target.devices
    return row, roofline.estimate(row)


if __name__ == "__main__":
    main()
