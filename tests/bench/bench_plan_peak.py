"""Compare planned peaks with the peaks that XLA compiles and that PyTorch allocates, in one table.

JAX: XLA compiles both programs of a step for CPU, in float32, for 4 simulated devices, without prefetch. Nothing runs,
and no weight is allocated. PyTorch: 2 processes train the model with gloo, and torch's profiler reports every
allocation (``torch_memory``).

    python -m tests.bench.bench_plan_peak                                  # JAX: 240 cells, an hour
    python -m tests.bench.bench_plan_peak --models llama --lengths 64,2048 --strategies fsdp
    python -m tests.bench.bench_plan_peak --runtime torch
    python -m tests.bench.bench_plan_peak --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bridge.compiling.target_step import StepRequest
from bridge.planning import make_plan, resolve_models
from tests.bench.peak_shapes import CONFIGS, DEVICES, LENGTHS, MICROBATCHES, Cell, cells, model_named

WITHIN = 0.10


@dataclass(frozen=True)
class Comparison:
    """Planned and actual bytes of a cell. ``moment``: when the planned peak occurs."""

    cell: Cell
    planned: int
    actual: int
    moment: str

    @property
    def difference(self) -> float:
        """Planned over actual bytes, minus 1."""
        return self.planned / self.actual - 1


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    models = options.models or (["decoder"] if options.quick else ["decoder", "llama"])
    lengths = options.lengths or ([64] if options.quick else LENGTHS)
    stacked = options.stacked or ((False,) if options.runtime == "torch" else (False, True))
    strategies = options.strategies or (["fsdp"] if options.quick else ["fsdp", "zero1", "zero2"])
    chosen = list(cells(models, lengths, options.microbatches or MICROBATCHES, strategies, stacked))
    measure = compiled_cells if options.runtime == "jax" else _torch_cells
    rows = []
    print(
        f"| model | tokens | microbatches | recomputed | scanned | strategy | planned MB | {options.runtime} MB | |"
    )
    print("|---|--:|--:|---|---|---|--:|--:|--:|")
    for row in measure(chosen):
        rows.append(row)
        cell = row.cell
        print(
            f"| {cell.model} | {cell.length} | {cell.microbatches} | {'yes' if cell.recompute else ''} | "
            f"{'yes' if cell.stacked else ''} | {cell.strategy} | {row.planned / 1e6:.1f} | {row.actual / 1e6:.1f} | "
            f"{100 * row.difference:+.1f} % |",
            flush=True,
        )
    print("\n".join(summary(rows)))
    if options.json:
        options.json.write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), "found": [asdict(row) for row in rows]}) + "\n"
        )
    sys.exit(any(abs(row.difference) > WITHIN for row in rows))


def summary(rows: Sequence[Comparison]) -> Iterator[str]:
    """One line per model: number of cells, smallest and largest difference."""
    yield ""
    for model in dict.fromkeys(row.cell.model for row in rows):
        mine = [row.difference for row in rows if row.cell.model == model]
        beyond = sum(abs(difference) > WITHIN for difference in mine)
        yield f"{model}: {len(mine)} cells, {100 * min(mine):+.1f} to {100 * max(mine):+.1f} %, {beyond} beyond 10 %"


def compiled_cells(chosen: Sequence[Cell]) -> Iterator[Comparison]:
    """Compile in this process. Nothing may have used JAX here before."""
    import jax_impl
    from bridge.compiling.compiled_leg import compiled

    jax_impl.simulate_devices(DEVICES)

    with tempfile.TemporaryDirectory() as scratch:
        for cell in chosen:
            model, policy = model_named(cell.model, Path(scratch)), cell.policy()
            step = StepRequest(model, cell.workload, cell.stacks)
            request = {"step": step.to_json(), "policy": policy.to_toml(), "source": policy.source}
            answer = compiled({**request, "devices": DEVICES})
            (shapes,) = resolve_models(model, ["jax"], cell.stacks).values()
            peak = make_plan(shapes, policy, DEVICES, "jax", cell.workload).peak
            yield Comparison(cell, peak.total, answer["peak"], peak.moment)


def _torch_cells(chosen: Sequence[Cell]) -> Iterator[Comparison]:
    from tests.bench.torch_peaks import measured_cells

    for cell, planned, actual, moment in measured_cells(chosen):
        yield Comparison(cell, planned, actual, moment)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def names(text: str) -> list[str]:
        return text.split(",")

    def flags(text: str) -> tuple[bool, ...]:
        return {"yes": (True,), "no": (False,), "both": (False, True)}[text]

    parser: Any = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runtime", choices=["jax", "torch"], default="jax")
    parser.add_argument("--models", type=names, metavar="NAME,...", help=f"decoder,{','.join(CONFIGS)}")
    parser.add_argument("--lengths", type=numbers, metavar="N,...")
    parser.add_argument("--microbatches", type=numbers, metavar="N,...")
    parser.add_argument("--strategies", type=names, metavar="NAME,...")
    parser.add_argument("--stacked", type=flags, metavar="yes|no|both")
    parser.add_argument("--quick", action="store_true", help="the decoder at 64 tokens under fsdp")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
