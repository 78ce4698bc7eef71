"""Compare the padding of the layout planner with other rules, on the 34 reference groups and 8 to 16,384 shards.

Prints padding in % of the real elements for Megatron-FSDP's one-chunk rule (LCM), for FSDP2's rule (each parameter by
itself), for ours, and for the bound of whole rows. Also prints medians, the cost of shards that are whole tiles of 128
elements, and planning times. If ours pads more than it may, the script lists the cases and ends with status 1.

    python -m tests.bench.bench_layout
    python -m tests.bench.bench_layout --groups Llama --shards 8,1024 --plot layouts.png
    python -m tests.bench.bench_layout --speed
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.core.sharding import plan_layout
from bridge.report_page.palette import BLUE, ORANGE, VERMILION
from tests.bench.layout_groups import Shape, Shapes, reference_groups
from tests.bench.layout_rules import fsdp2_rule, lcm_rule, row_bound

ROOT = Path(__file__).parents[2]
SHARDS = (8, 64, 256, 1024, 4096, 16384)
ALIGN = 128
MOST_MEDIAN = {1024: 0.1, 4096: 0.6, 16384: 2.0}
"""Largest allowed median padding over all groups, in %, by number of shards."""

# Figures of earlier research notes on packing. Each line is a group at 8, 64, 256, 1024, 4096 and 16384 shards. Each
# cell is the padding in % of Megatron-FSDP's planner at d98e8a64 (run from its source), of FSDP2, of a simple row-class
# planner, which ours must not exceed, and of the row bound.
NOTES = """
Llama3-8B layer        |.01/0/.01/0|.12/0/.12/0|.96/0/.48/0|7.7/0/0/0|7.7/19/3.8/0|115/192/100/7.7
Llama2-7B layer        |.26/0/.26/0|.26/0/.26/0|11/0/0/0|78/1.0/1.0/0|256/5.2/5.2/0|1326/188/89/1.6
Qwen2.5-7B layer       |.14/0/.14/0|2.0/0/.10/0|2.0/0/.39/0|17/8.9/4.2/.11|133/21/8.9/.78|832/235/109/33
Qwen3-235B non-expert  |.08/0/.08/0|.72/0/0/0|2.2/.73/.72/.72|5.1/11/5.1/5.1|40/64/17/17|87/461/87/87
Qwen3-235B layer, 3-D  |1.2/0/0/0|29/0/.02/0|29/97/.15/0|418/680/.15/0|1972/3012/.48/.06|8187/12347/2.5/.15
Mixtral layer, 2-D     |.02/0/.02/0|.02/.02/.02/.01|.14/.07/.14/.03|1.2/.29/.29/.14|5.2/12/.58/.58|29/127/1.7/1.7
Mixtral experts, 3-D   |33/0/0/0|433/700/0/0|2033/3100/0/0|8433/12700/0/0|34033/51100/0/0|136433/204700/0/0
DeepSeek-V3 non-expert |.41/0/.02/0|4.0/0/.02/0|13/.59/.13/.02|51/5.3/1.7/.13|505/51/2.6/.81|2319/310/87/15
DeepSeek-V3 dense layer|.48/0/.48/0|1.9/0/.41/0|36/.24/.19/.01|81/1.2/.82/.01|625/19/9.3/.28|2798/130/58/.64
DeepSeek-V3 whole, 2-D |1.9/0/0/0|1.9/0/0/0|1.9/.01/.02/0|1.9/.11/.02/0|2.1/71/.18/0|3.3/503/.04/0
GPT-OSS-120B layer     |3.3/0/.05/0|32/0/.01/0|32/99/.05/0|429/694/.07/0|2015/3075/.38/0|8359/12601/2.0/.03
GPT-2 XL layer         |.43/0/.43/0|3.9/0/.27/0|12/8.0/5.3/0|28/23/6.6/1.3|156/113/49/6.6|923/668/497/241
SigLIP-so400m layer    |14/0/.02/0|30/.36/.27/0|421/7.9/3.9/0|1982/59/28/0|8229/202/109/16|33216/983/487/363
SigLIP-so400m whole    |18/0/0/0|135/.37/.01/0|841/7.9/.10/0|3665/59/.78/0|14960/202/2.1/0|60140/986/5.0/0
"""

# Rows of public models, whose least common multiple is 2 * 10^17.
ODD_ROWS = (
    256,
    512,
    576,
    768,
    1152,
    1176,
    1280,
    1408,
    1536,
    1600,
    1920,
    2048,
    2880,
    3420,
    3584,
    4304,
    5120,
    7168,
)
ODD_ROWS += (8960, 11008, 13696, 14336, 18944)
SPEED_KINDS = ("mixture of experts", "23 odd rows", "20,000 distinct rows")
SPEED = """
import resource, sys, time
from tests.bench.bench_layout import speed_shapes
from bridge.core.sharding import plan_layout
shapes = speed_shapes(sys.argv[1])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
before, started = peak(), time.process_time()
layout = plan_layout(shapes, 16384, align=1)
print(time.process_time() - started, before, peak(), 100 * layout.overhead(), len(layout.shard_sizes))
"""


@dataclass(frozen=True)
class Cell:
    """One group over one number of shards: padding in % of the real elements; buffers and CPU seconds of our layout.

    ``coarse`` is ours if slices of dimension 0 are the rows, as in the LCM and FSDP2 rules. It differs from ``ours``
    only if a tensor has three or more dimensions; ``flat`` means that no tensor has. ``tiled`` is ours with shards of
    whole tiles of ``ALIGN`` elements; ``tiled_lcm`` and ``tiled_bound`` belong to such shards. ``starts`` tells whether
    all tensors of ``tiled`` start on a tile. ``auto`` is ours with the alignment that the planner chooses.
    """

    group: str
    shards: int
    tensors: int
    flat: bool
    lcm: float
    fsdp2: float
    ours: float
    coarse: float
    bound: float
    buffers: int
    seconds: float
    tiled: float
    tiled_lcm: float
    tiled_bound: float
    starts: bool
    auto: float
    auto_align: int


def measure(group: str, shapes: Shapes, shards: int) -> Cell:
    sizes = tuple(shapes.values())
    real = sum(map(math.prod, sizes))

    def padding(padded: int) -> float:
        return 100 * (padded - real) / real

    started = time.process_time()
    layout = plan_layout(shapes, shards, align=1)
    seconds = time.process_time() - started
    tiled = plan_layout(shapes, shards, align=ALIGN)
    auto = plan_layout(shapes, shards, align="auto")
    flattened = {name: _flattened(shape) for name, shape in shapes.items()}
    flat = flattened == shapes
    coarse = layout if flat else plan_layout(flattened, shards, align=1)
    return Cell(
        group,
        shards,
        len(sizes),
        flat,
        padding(lcm_rule(sizes, shards)),
        padding(fsdp2_rule(sizes, shards)),
        padding(layout.padded_size),
        padding(coarse.padded_size),
        padding(row_bound(sizes, shards)),
        len(layout.shard_sizes),
        seconds,
        padding(tiled.padded_size),
        padding(lcm_rule(sizes, shards, ALIGN)),
        padding(row_bound(sizes, shards, ALIGN)),
        all(slot.offset % ALIGN == 0 for slot in tiled.slots),
        padding(auto.padded_size),
        auto.align,
    )


def sweep(groups: dict[str, Shapes], shards: Sequence[int] = SHARDS) -> list[Cell]:
    return [measure(name, shapes, n) for name, shapes in groups.items() for n in shards]


def medians(cells: Iterable[Cell]) -> dict[int, dict[str, float]]:
    """``{shards: {rule: median padding in %}}``."""
    by_shards: dict[int, list[Cell]] = {}
    for cell in cells:
        by_shards.setdefault(cell.shards, []).append(cell)
    rules = ("lcm", "fsdp2", "ours", "coarse", "bound", "tiled", "tiled_lcm", "tiled_bound", "auto")
    return {
        n: {rule: statistics.median(getattr(cell, rule) for cell in group) for rule in rules}
        for n, group in by_shards.items()
    }


def notes_figures() -> dict[tuple[str, int], tuple[str, ...]]:
    """``{(group, shards): (LCM, FSDP2, row classes, row bound)}`` as printed in the notes."""
    figures = {}
    for line in NOTES.strip().splitlines():
        group, *row = line.split("|")
        for n, cell in zip(SHARDS, row, strict=True):
            figures[group.strip(), n] = tuple(cell.split("/"))
    return figures


def as_printed(value: float, figure: str) -> float:
    """``value`` rounded to the digits of a printed figure."""
    return round(value, len(figure.partition(".")[2]))


def violations(cells: Sequence[Cell]) -> list[str]:
    """One sentence for each promise of the planner that ``cells`` break. Medians count only over all groups."""
    figures = notes_figures()
    lines = []
    for cell in cells:
        where = f"{cell.group}, {cell.shards} shards"
        if cell.ours > cell.lcm:
            lines.append(f"{where}: expected at most the LCM rule's {cell.lcm:.4f} %, got {cell.ours:.4f} %")
        if cell.ours < cell.bound:
            lines.append(f"{where}: expected at least the bound's {cell.bound:.4f} %, got {cell.ours:.4f} %")
        if not cell.tiled_bound <= cell.tiled <= cell.tiled_lcm:
            lines.append(
                f"{where}, align={ALIGN}: expected from the bound's {cell.tiled_bound:.4f} % to the LCM rule's "
                f"{cell.tiled_lcm:.4f} %, got {cell.tiled:.4f} %"
            )
        figure = figures.get((cell.group, cell.shards), ("", "", "", ""))[2]
        if figure and as_printed(cell.ours, figure) > float(figure):
            lines.append(f"{where}: expected at most the notes' {figure} %, got {cell.ours:.4f} %")
    if {cell.group for cell in cells} == set(reference_groups()):
        for (n, median), (rule, with_align) in itertools.product(
            medians(cells).items(), (("ours", ""), ("tiled", f", align={ALIGN}"))
        ):
            if median[rule] > MOST_MEDIAN.get(n, math.inf):
                lines.append(
                    f"median over {n} shards{with_align}: expected at most {MOST_MEDIAN[n]} %, got {median[rule]:.4f} %"
                )
    return lines


def percent(value: float) -> str:
    """At least two significant digits, none below 0.01."""
    if value == 0:
        return "0"
    if value < 0.005:
        return "<.01"
    if value < 1:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def print_cells(cells: Sequence[Cell]) -> None:
    shards = list(dict.fromkeys(cell.shards for cell in cells))
    print("Padding in %: LCM / FSDP2 / **ours** / row bound (our buffers)\n")
    print(f"| group | {' | '.join(f'N={n}' for n in shards)} |")
    print(f"|---|{'---|' * len(shards)}")
    for group, row in itertools.groupby(cells, key=lambda cell: cell.group):
        texts = [
            f"{percent(c.lcm)} / {percent(c.fsdp2)} / **{percent(c.ours)}** / {percent(c.bound)} ({c.buffers})"
            for c in row
        ]
        print(f"| {group} | {' | '.join(texts)} |")


def print_medians(cells: Sequence[Cell], title: str) -> None:
    count = len({cell.group for cell in cells})
    print(f"\nMedian padding in % over {title} ({count})\n")
    print("| N | LCM | FSDP2 | ours | ours, slices as rows | row bound |")
    print("|---:|---:|---:|---:|---:|---:|")
    for n, row in medians(cells).items():
        values = [row[rule] for rule in ("lcm", "fsdp2", "ours", "coarse", "bound")]
        print(f"| {n} | {' | '.join(map(percent, values))} |")


def print_tiled(cells: Sequence[Cell]) -> None:
    print(f"\nShards of whole tiles of {ALIGN} elements: median padding in %, and the groups that pay most\n")
    print(
        "| N | ours, any shard | ours, tiles | LCM, tiles | bound, tiles | all starts on tiles | most added, points | "
        f'"auto" | of it, {ALIGN} |'
    )
    print("|---:|---:|---:|---:|---:|---:|---|---:|---:|")
    for n, row in medians(cells).items():
        here = [cell for cell in cells if cell.shards == n]
        values = [percent(row[rule]) for rule in ("ours", "tiled", "tiled_lcm", "tiled_bound")]
        starts = f"{sum(cell.starts for cell in here)} of {len(here)}"
        most = sorted(here, key=lambda cell: cell.ours - cell.tiled)[:3]
        added = ", ".join(f"{cell.group} {percent(max(0.0, cell.tiled - cell.ours))}" for cell in most)
        chosen = f"{sum(cell.auto_align == ALIGN for cell in here)} of {len(here)}"
        print(f"| {n} | {' | '.join(values)} | {starts} | {added} | {percent(row['auto'])} | {chosen} |")


def print_stacks(cells: Sequence[Cell]) -> None:
    print(
        "\nGroups with tensors of three or more dimensions, in %: ours with slices of dimension 0 as rows / ours\n"
    )
    shards = list(dict.fromkeys(cell.shards for cell in cells))
    print(f"| group | {' | '.join(f'N={n}' for n in shards)} |")
    print(f"|---|{'---:|' * len(shards)}")
    for group, row in itertools.groupby(cells, key=lambda cell: cell.group):
        print(f"| {group} | {' | '.join(f'{percent(c.coarse)} / {percent(c.ours)}' for c in row)} |")


def print_losses(cells: Sequence[Cell]) -> None:
    print("\nGroups where FSDP2 pads less than ours\n")
    print("| N | groups | by at most, points |")
    print("|---:|---:|---:|")
    for n in dict.fromkeys(cell.shards for cell in cells):
        lost = [cell.ours - cell.fsdp2 for cell in cells if cell.shards == n and cell.fsdp2 < cell.ours]
        print(f"| {n} | {len(lost)} | {percent(max(lost, default=0.0))} |")


def print_times(cells: Sequence[Cell]) -> None:
    print()
    for title, chosen in (
        ("layers and their parts", [cell for cell in cells if "whole" not in cell.group]),
        ("whole models", [cell for cell in cells if "whole" in cell.group]),
    ):
        if chosen:
            slowest = max(chosen, key=lambda cell: cell.seconds)
            print(
                f"planning {title}: at most {1000 * slowest.seconds:.0f} ms CPU ({slowest.group}, "
                f"{slowest.tensors} tensors, {slowest.shards} shards)"
            )


def speed_shapes(case: str) -> Shapes:
    """100,000 tensors of one of ``SPEED_KINDS``."""
    layer = list(reference_groups()["DeepSeek-V3 layer, 2-D"].values())

    def shape(i: int) -> Shape:
        if case == "mixture of experts":
            return layer[i % len(layer)]
        return i % 97 + 1, ODD_ROWS[i % len(ODD_ROWS)] if case == "23 odd rows" else 256 + i % 20_000

    return {f"p{i}": shape(i) for i in range(100_000)}


def print_speed() -> None:
    print("\n100,000 tensors over 16,384 shards, each in a process of its own\n")
    print("| shapes | CPU s | peak RSS MB | of which before | padding % | buffers |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in SPEED_KINDS:
        command = [sys.executable, "-c", SPEED, name]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        cpu, before, peak, padding, buffers = map(float, done.stdout.split())
        print(f"| {name} | {cpu:.2f} | {peak:.0f} | {before:.0f} | {percent(padding)} | {buffers:.0f} |")


def save_plot(cells: Sequence[Cell], path: Path) -> None:
    """Draw median padding against the number of shards, for all groups and for groups without stacks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    panels = (("all", cells), ("vectors and matrices only:", [cell for cell in cells if cell.flat]))
    styles = {
        "lcm": ("one common multiple (Megatron-FSDP)", {"color": VERMILION, "marker": "s"}),
        "fsdp2": ("each parameter by itself (FSDP2)", {"color": ORANGE, "marker": "^"}),
        "ours": ("Twinshard", {"color": BLUE, "marker": "o", "lw": 2.5}),
        "bound": ("bound for whole rows", {"color": "black", "ls": ":"}),
    }
    for axis, (title, chosen) in zip(axes, panels, strict=True):
        rows = medians(chosen)
        for rule, (label, style) in styles.items():
            axis.plot(list(rows), [row[rule] for row in rows.values()], label=label, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("symlog", linthresh=0.01, linscale=0.5)
        axis.set_xticks(list(rows), [f"{n:,}" for n in rows])
        axis.minorticks_off()
        axis.set_ylim(bottom=-0.002)
        ticks = [0, 0.01, 0.1, 1, 10, 100, 1000]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.grid(axis="y", lw=0.4, alpha=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("shards")
        axis.set_title(f"{title} {len({cell.group for cell in chosen})} groups", fontsize=10)
    axes[0].set_ylabel("median padding (% of real elements)")
    axes[0].legend(frameon=False, fontsize=8)
    FigureCanvasAgg(figure).print_figure(str(path), dpi=130)


def _flattened(shape: Shape) -> Shape:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape


def _shard_counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.isdecimal() and int(part)]
    if len(counts) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers of shards such as 8,1024, got {text!r}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=_shard_counts, default=list(SHARDS), metavar="N,N,...")
    parser.add_argument(
        "--groups", default="", metavar="SUBSTRING", help="only groups whose name contains it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the medians")
    parser.add_argument("--speed", action="store_true", help="also plan 100,000 tensors")
    options = parser.parse_args()
    groups = {
        name: shapes for name, shapes in reference_groups().items() if options.groups.lower() in name.lower()
    }
    if not groups:
        parser.error(f"--groups: expected a part of one of {', '.join(reference_groups())}")

    cells = sweep(groups, options.shards)
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "twinshard": importlib.metadata.version("twinshard"),
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()) + "\n")
    print_cells(cells)
    flat = [cell for cell in cells if cell.flat]
    stacks = [cell for cell in cells if not cell.flat]
    print_medians(cells, "all groups")
    if flat:
        print_medians(flat, "groups of vectors and matrices only")
    if stacks:
        print_stacks(stacks)
    print_tiled(cells)
    print_losses(cells)
    print_times(cells)
    if options.speed:
        print_speed()
    if options.json:
        report = {**about, "medians": medians(cells), "cells": [dataclasses.asdict(cell) for cell in cells]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        save_plot(cells, options.plot)
    broken = violations(cells)
    print()
    for sentence in broken:
        print(f"broken: {sentence}")
    if broken:
        sys.exit(1)
    print("Ours pads no more than allowed in every case.")


if __name__ == "__main__":
    main()
