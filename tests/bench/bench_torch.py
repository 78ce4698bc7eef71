"""Compare our runtime with FSDP2 and DDP in one run: time, memory, and the cost of a unit's hooks.

All engines take turns and train the same decoder (71.3 M parameters, one unit per block and one for the rest) with
torch's fused AdamW on the same tokens, different on each rank. If the losses disagree, the script ends with status 1.
The first table shows one step, and the ratios ours / theirs as median and range over the rounds. The second table shows
what forward and backward of 200 tiny units cost per unit beyond the same module without sharding.

    python -m tests.bench.bench_torch
    python -m tests.bench.bench_torch --quick --ranks 2 --dtype float32
    python -m tests.bench.bench_torch --device cuda
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.costs import Cost, Ratio, ratio
from tests.bench.torch_engines import (
    BASELINE,
    ENGINES,
    NAMES,
    TINY,
    Training,
    build_chain,
    build_step,
    prototype,
)
from tests.bench.torch_memory import LiveBytes, live_bytes
from tests.bench.torch_rounds import interleaved, over_ranks, unequal_losses
from tests.support.ranks import MAX_WORLD, RankGroup

LIMITS = {
    torch.float32: {"ours": 1e-6, "ddp": 1e-5},
    torch.bfloat16: {"ours": 2e-3, "ddp": 2e-2},
}
"""Largest relative difference of a loss from FSDP2's. Autocast rounds at other places than a bfloat16 module."""
MOST_LEFT = 65536
WARM_STEPS = 4
"""The pool of buffers is planned after two equal steps, the second and the third, and used from the fourth step on."""
CHAIN = ("plain", "ours", "fsdp2")

Launch = Callable[..., list[Any]]
"""``(world, function, *args)``: the function's result on every rank."""


@dataclass(frozen=True)
class Measured:
    """One setting: for each engine, the cost of a step in every round, live bytes, and the losses of each rank."""

    ranks: int
    dtype: str
    tokens: int
    costs: dict[str, list[Cost]]
    memory: dict[str, LiveBytes]
    losses: dict[str, list[list[float]]]

    def ratio(self, field: str, peer: str) -> Ratio:
        """Ours over the peer's ``field`` of ``Cost``."""
        return ratio(*([getattr(cost, field) for cost in self.costs[name]] for name in ("ours", peer)))

    def median(self, field: str, engine: str) -> float:
        return statistics.median(getattr(cost, field) for cost in self.costs[engine])


@dataclass(frozen=True)
class Overhead:
    """Microseconds per unit and step beyond the plain module, one number per round."""

    ranks: int
    what: str
    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]


def train(
    training: Training, rounds: int, repeat: int
) -> tuple[dict[str, list[Cost]], dict[str, list[float]]]:
    """Run all engines in turn on this rank. Returns costs and losses; losses include the warm-up steps."""
    model = prototype(training)
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in ENGINES}

    def call(step: Callable[[], torch.Tensor], into: list[torch.Tensor]) -> None:
        into.append(step())

    calls = {
        name: functools.partial(call, build_step(name, training, model), losses[name]) for name in ENGINES
    }
    interleaved(calls, 1, WARM_STEPS, training.device)
    costs = interleaved(calls, rounds, repeat, training.device)
    return costs, {name: [float(loss) for loss in steps] for name, steps in losses.items()}


def weigh(training: Training, engine: str) -> LiveBytes:
    """Measure the memory of one engine on this rank. No other engine is alive in the process."""
    model = prototype(training)
    return live_bytes(lambda: build_step(engine, training, model), torch.device(training.device), WARM_STEPS)


def chain(units: int, device: str, rounds: int, repeat: int) -> list[dict[str, list[Cost]]]:
    """Costs on this rank: forward and backward, and the optimizer's step."""
    built = {name: build_chain(name, units, device) for name in CHAIN}
    both: list[dict[str, list[Cost]]] = [{name: [] for name in CHAIN} for _ in range(2)]
    for number in range(rounds + 1):
        for _ in range(repeat):
            for part, sums in enumerate(both):
                turn = interleaved({name: calls[part] for name, calls in built.items()}, 1, 1, device)
                if number:
                    for name in CHAIN:
                        sums[name] += turn[name]
    return [{name: _means(costs, repeat) for name, costs in sums.items()} for sums in both]


def _means(costs: Sequence[Cost], repeat: int) -> list[Cost]:
    """The mean of each ``repeat`` consecutive costs."""
    parts = [costs[k : k + repeat] for k in range(0, len(costs), repeat)]
    return [
        Cost(statistics.fmean(c.wall for c in part), statistics.fmean(c.cpu for c in part)) for part in parts
    ]


def measure(launch: Launch, ranks: int, training: Training, rounds: int, repeat: int) -> Measured:
    """All engines at one number of ranks and one dtype. Memory has its own run, because tracing takes time."""
    begun = time.monotonic()
    per_rank = launch(ranks, train, training, rounds, repeat)
    memory = {name: _heaviest(launch, ranks, training, name) for name in ENGINES}
    dtype = str(training.dtype).removeprefix("torch.")
    print(f"{ranks} ranks, {dtype}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return Measured(
        ranks,
        dtype,
        training.tokens * ranks,
        over_ranks([costs for costs, _ in per_rank]),
        memory,
        {name: [losses[name] for _, losses in per_rank] for name in ENGINES},
    )


def _heaviest(launch: Launch, ranks: int, training: Training, engine: str) -> LiveBytes:
    """The largest values of all ranks. Repeats a run whose trace missed a release, as happens on a busy machine."""
    for _ in range(3):
        weights: list[LiveBytes] = launch(ranks, weigh, training, engine)
        fields = (field.name for field in dataclasses.fields(LiveBytes))
        heaviest = LiveBytes(*(max(getattr(live, field) for live in weights) for field in fields))
        if heaviest.left <= MOST_LEFT:
            break
    return heaviest


def broken_promises(runs: Sequence[Measured], emptied: Sequence[str] = ENGINES) -> list[str]:
    """One sentence for each reason not to trust the numbers: unequal losses, memory that ``emptied`` did not free."""
    sentences = []
    for run in runs:
        where = f"{run.ranks} ranks, {run.dtype}"
        limits = LIMITS[getattr(torch, run.dtype)]
        sentences += [f"{where}: {sentence}" for sentence in unequal_losses(run.losses, limits, "fsdp2")]
        sentences += [
            f"{where}: expected at most {MOST_LEFT} live bytes of {NAMES[name]} after its deletion, got {memory.left}"
            for name, memory in run.memory.items()
            if name in emptied and memory.left > MOST_LEFT
        ]
    return sentences


def overheads(
    launch: Launch, ranks: int, units: int, device: str, rounds: int, repeat: int
) -> list[Overhead]:
    """Cost of sharding per unit at one number of ranks."""
    per_rank = launch(ranks, chain, units, device, rounds, repeat)
    result = []
    for part, what in enumerate(("forward and backward", "optimizer step")):
        costs = over_ranks([rank[part] for rank in per_rank])
        wall, cpu = (
            {
                name: [
                    1e6 * (getattr(cost, field) - getattr(plain, field)) / units
                    for cost, plain in zip(costs[name], costs["plain"], strict=True)
                ]
                for name in CHAIN[1:]
            }
            for field in ("wall", "cpu")
        )
        result.append(Overhead(ranks, what, wall, cpu))
    return result


def print_steps(runs: Sequence[Measured]) -> None:
    print("One step: medians; live bytes on the rank that holds most\n")
    print(
        "| ranks | dtype | engine | wall s | CPU s per rank | tokens/s | at rest MB | peak MB | losses, rank 0 |"
    )
    print("|---:|---|---|---:|---:|---:|---:|---:|---|")
    for run in runs:
        for name in ENGINES:
            wall, cpu, memory = run.median("wall", name), run.median("cpu", name), run.memory[name]
            steps = run.losses[name][0]
            shown = ", ".join(f"{loss:.6f}" for loss in (steps[0], steps[1], steps[-1]))
            print(
                f"| {run.ranks} | {run.dtype} | {NAMES[name]} | {wall:.3f} | {cpu:.3f} | {run.tokens / wall:.0f} | "
                f"{memory.rest / 1e6:.1f} | {memory.peak / 1e6:.1f} | {shown} |"
            )
    print("\nOurs over theirs: median (least-most) of the rounds\n")
    print("| ranks | dtype | over | wall | CPU | at rest | peak |")
    print("|---:|---|---|---:|---:|---:|---:|")
    for run in runs:
        for peer in ENGINES[1:]:
            ours, theirs = run.memory["ours"], run.memory[peer]
            print(
                f"| {run.ranks} | {run.dtype} | {NAMES[peer]} | {run.ratio('wall', peer)} | "
                f"{run.ratio('cpu', peer)} | {ours.rest / theirs.rest:.3f} | {ours.peak / theirs.peak:.3f} |"
            )


def print_overheads(rows: Sequence[Overhead], units: int) -> None:
    print(
        f"\nMicroseconds per unit beyond the plain module, {units} units: median (least-most) of the rounds\n"
    )
    print("| ranks | of | Twinshard CPU | FSDP2 CPU | ratio | Twinshard wall | FSDP2 wall |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for overhead in rows:
        times = [spread(costs[name]) for costs in (overhead.cpu, overhead.wall) for name in CHAIN[1:]]
        over = ratio(overhead.cpu["ours"], overhead.cpu["fsdp2"])
        print(
            f"| {overhead.ranks} | {overhead.what} | {times[0]} | {times[1]} | {over} | {times[2]} | {times[3]} |"
        )


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def on_cuda(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run in this process, the only rank."""
    if world != 1:
        raise ValueError(f"--device cuda: expected 1 rank, got {world}")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return [function(*args)]
    finally:
        dist.destroy_process_group()


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_WORLD for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers of ranks from 1 to {MAX_WORLD}, got {text!r}")
    return [int(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=_numbers, metavar="N,N,...", help="default 2,4; on cuda 1")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of an engine in one round")
    parser.add_argument(
        "--length",
        type=int,
        default=128,
        help="tokens of a sequence, two sequences a rank; fewer where bfloat16 is slow",
    )
    parser.add_argument("--units", type=int, default=200, help="units of the model that measures hooks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="check that it runs: a tiny model, few rounds")
    parser.add_argument("--only", choices=["steps", "hooks"], help="print only one of the two tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    ranks = options.ranks or ([1] if on_gpu else [2, 4])
    if on_gpu and ranks != [1]:
        parser.error(f"--ranks: expected 1 with --device cuda, got {ranks}")
    if options.length < 2:
        parser.error(
            f"--length: expected at least 2, since the last token is only predicted, got {options.length}"
        )
    dtypes = ["float32", "bfloat16"] if options.dtype == "both" else [options.dtype]
    rounds, repeat, units = (2, 1, 20) if options.quick else (options.rounds, options.steps, options.units)
    config = TINY if options.quick else BASELINE

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "twinshard"))
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {versions}, {options.device}; "
        f"{rounds} rounds of {repeat} steps, {Training(length=options.length).tokens} tokens a rank\n"
    )
    group = RankGroup()
    launch: Launch = on_cuda if on_gpu else functools.partial(group.run, timeout=1800)
    try:
        steps = [
            measure(
                launch,
                world,
                Training(config, getattr(torch, dtype), options.device, length=options.length),
                rounds,
                repeat,
            )
            for world in ([] if options.only == "hooks" else ranks)
            for dtype in dtypes
        ]
        hooks = [
            overhead
            for world in ([] if options.only == "steps" else [1] if on_gpu else [1, 2])
            for overhead in overheads(launch, world, units, options.device, rounds, 5 * repeat)
        ]
    finally:
        group.close()
    if steps:
        print_steps(steps)
    if hooks:
        print_overheads(hooks, units)
    if options.json:
        report = {"steps": steps, "hooks": hooks}
        plain = {key: [dataclasses.asdict(row) for row in rows] for key, rows in report.items()}
        options.json.write_text(json.dumps(plain, indent=1) + "\n")
    # On CUDA all memory of the process counts, and DDP's buckets outlive its deletion.
    broken = broken_promises(steps, ("ours", "fsdp2") if on_gpu else ENGINES)
    for sentence in broken:
        print(f"broken: {sentence}")
    if broken:
        sys.exit(1)


if __name__ == "__main__":
    main()
