"""Compile steps of both engines and hand-written steps with XLA's compilers for GPUs and TPUs that are not there.

No device is used. Weights are shapes, and the numbers describe compiled programs, not runs. For each contestant the
table shows the seconds to compile (an upper bound on a shared machine) and the temporary bytes on one device. For each
kind of collective it shows the number in a step, the bytes of the full arrays, and the share of these bytes that can
overlap: a matrix product lies between the start and the end of the transfer. A step computes loss and gradients under
``optim_grads_params``, with 2 rows of 1024 tokens a device, or 512 tokens at width 512.

    make compilers
    python -m tests.bench.bench_compilers --target h100:8,h100:64
    python -m tests.bench.bench_compilers --target v5e:4x4 --size 1024 --layers scan
    python -m tests.bench.bench_compilers --quick
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bridge.compiling.machines.targets import target_named
from bridge.planning.models.errors import PlanError
from tests.support.compilers.setting import CONTESTANTS, PJIT, SHARD_MAP, Compiled, Setting
from tests.support.compilers.worker import Compiler, unavailable

TARGETS = ("h100:8", "h100:64", "v5e:4x4", "v5p:4x4x4")
APART = ("embed", "layers/*", "lm_head")
KINDS = {"all_gather": "all-gathers", "reduce_scatter": "reduce-scatters", "psum": "all-reduces"}
Row = tuple[Setting, Compiled | str]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    names = options.target or (["h100:8"] if options.quick else TARGETS)
    reasons = {name: reason for name in names if (reason := unavailable(target_named(name).platform))}
    for name, reason in reasons.items():
        print(f"{name} left out: {reason}", file=sys.stderr)
    if len(reasons) == len(names):
        sys.exit(1)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax"))
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, {versions}; compiled without a device\n",
        flush=True,
    )
    rows: list[Row] = []
    for name in names:
        if name in reasons:
            continue
        compiler = Compiler(target_named(name).platform)
        for settings in _tables(name, options):
            table = [(setting, _compiled(compiler, setting)) for setting in settings]
            print("\n".join(_table(table)), flush=True)
            rows += table
        compiler.close()
    if options.json:
        records = [
            {"setting": setting.to_json(), "found": what if isinstance(what, str) else what.to_json()}
            for setting, what in rows
        ]
        options.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "found": records}) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=_targets, metavar="NAME,...", help=f"default {','.join(TARGETS)}")
    parser.add_argument(
        "--size", choices=["512", "1024", "1024x12", "1024x48", "Llama-3-8B", "both"], default="both"
    )
    parser.add_argument(
        "--layers", choices=["scan", "unrolled", "both"], default="both", help="layers at widths 512 and 1024"
    )
    parser.add_argument(
        "--recompute", choices=["yes", "no", "both"], default="both", help="recompute at widths 512 and 1024"
    )
    parser.add_argument(
        "--recommended", action="store_true", help="compile with XLA's GPU options for overlap"
    )
    parser.add_argument(
        "--quick", action="store_true", help="check that the script runs: a small decoder, unrolled"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every collective")
    return parser.parse_args(arguments)


def _targets(text: str) -> list[str]:
    try:
        return [target_named(name).name for name in text.split(",")]
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _tables(target: str, options: argparse.Namespace) -> Iterator[list[Setting]]:
    """The settings of each table, one per contestant."""
    if options.quick:
        yield _contestants(Setting(target, CONTESTANTS[0], "256", recommended=options.recommended))
        return
    both = {"both": (False, True)}
    if options.size != "Llama-3-8B":
        for stacked, recompute in itertools.product(
            both.get(options.layers, (options.layers == "scan",)),
            both.get(options.recompute, (options.recompute == "yes",)),
        ):
            yield _contestants(
                Setting(
                    target,
                    CONTESTANTS[0],
                    "1024" if options.size == "both" else options.size,
                    stacked,
                    recompute,
                    length=512 if options.size == "512" else 1024,
                    recommended=options.recommended,
                )
            )
    if options.size in ("Llama-3-8B", "both"):
        yield _contestants(
            Setting(
                target,
                CONTESTANTS[0],
                "Llama-3-8B",
                True,
                True,
                dtype="bfloat16",
                length=1024,
                recommended=options.recommended,
            )
        )


def _contestants(setting: Setting) -> list[Setting]:
    return [
        *(dataclasses.replace(setting, contestant=name) for name in CONTESTANTS),
        *(dataclasses.replace(setting, contestant=name, units=APART) for name in (SHARD_MAP, PJIT)),
    ]


def _compiled(compiler: Compiler, setting: Setting) -> Compiled | str:
    try:
        compiled = compiler.compile(setting)
    except RuntimeError as error:
        return str(error)
    print(f"{setting}: {compiled.seconds:.0f} s", file=sys.stderr, flush=True)
    return compiled


def _table(rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0][0]
    what = [
        f"width {first.size}" if first.size.isdecimal() else first.size,
        first.dtype,
        "scanned" if first.stacked else "unrolled",
        *(["recomputed"] if first.recompute else []),
        *(["XLA's options for overlap"] if first.recommended else []),
    ]
    yield f"{first.target}, {', '.join(what)}: number, MB and overlapping share of collectives\n"
    yield f"| | compile s | temporary MB | {' | '.join(KINDS.values())} |"
    yield f"|---|{'---:|' * (2 + len(KINDS))}"
    for setting, outcome in rows:
        name = (
            f"{setting.contestant} engine" if setting.contestant in (SHARD_MAP, PJIT) else setting.contestant
        )
        name += ", embed and lm_head as units" if setting.units else ""
        if isinstance(outcome, str):
            yield f"| {name} | failed: {' '.join(outcome.split())[:120]} |{' |' * (1 + len(KINDS))}"
            continue
        cells = [_cell(outcome, collective) for collective in KINDS]
        yield f"| {name} | {outcome.seconds:.0f} | {outcome.temporary / 1e6:.0f} | {' | '.join(cells)} |"
    yield ""


def _cell(compiled: Compiled, collective: str) -> str:
    """Number, MB and overlap of one kind of collective, without scalars such as the loss."""
    chosen: list[Any] = [
        call for call in compiled.collectives if call.kind == collective and call.bytes > 64 * call.times
    ]
    if not chosen:
        return "0"
    times, size = sum(call.times for call in chosen), sum(call.bytes for call in chosen)
    return f"{times}, {size / 1e6:.0f}, {compiled.overlap(collective):.0%}"


if __name__ == "__main__":
    main()
