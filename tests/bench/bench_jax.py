"""Compare both engines with a hand-written optax and ``NamedSharding`` step in one run: time and compiled bytes.

All contestants take turns and train the same decoder on the same tokens. If their losses disagree, the script ends with
status 1. Each setting runs in its own process, on simulated CPU devices, or on GPUs if JAX finds GPUs. The first table
shows one step; CPU seconds add up all simulated devices. The second table shows compiled bytes of the 26 M decoder on
8 simulated devices with a row of 32 tokens each, under every strategy.

    python -m tests.bench.bench_jax
    python -m tests.bench.bench_jax --quick --devices 4
    python -m tests.bench.bench_jax --only times --devices 4 --dtype float32 --layers scan --json times.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.jax_leg import run
from tests.bench.jax_setting import BASELINE, NAMES, PJIT, SHARD_MAP, SIZES, STRATEGIES, Setting
from tests.bench.jax_tables import broken_promises, bytes_table, times_table

MOST_DEVICES = 64
PLATFORMS = ("auto", "cpu", "gpu")


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_DEVICES for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected numbers of devices from 1 to {MOST_DEVICES}, got {text!r}"
        )
    return [int(part) for part in parts]


def _contestants(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"expected different names among {', '.join(NAMES)}, got {text!r}")
    return [BASELINE, *(name for name in names if name != BASELINE)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=_numbers, metavar="N,N,...", help="default 1,4,8; on GPUs as many as exist"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--layers", choices=["scan", "unrolled", "both"], default="both")
    parser.add_argument(
        "--strategy", choices=STRATEGIES, default=STRATEGIES[-1], help="strategy of the timed engines"
    )
    parser.add_argument("--recompute", action="store_true", help="recompute in all timed steps")
    parser.add_argument(
        "--contestants", type=_contestants, default=[BASELINE, SHARD_MAP, PJIT], metavar="NAME,..."
    )
    parser.add_argument("--size", choices=SIZES, default="5M", help="size of the timed decoder")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step over all devices")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a contestant in one round")
    parser.add_argument("--bytes-devices", type=int, default=8)
    parser.add_argument("--bytes-length", type=int, default=32, help="tokens of a device in one microbatch")
    parser.add_argument(
        "--microbatches", type=int, default=1, help="microbatches in the table of bytes; not of the baseline"
    )
    parser.add_argument("--platform", choices=PLATFORMS, default="auto", help="auto: GPUs if JAX finds some")
    parser.add_argument("--quick", action="store_true", help="check that it runs: a tiny decoder, few rounds")
    parser.add_argument("--only", choices=["times", "bytes"], help="print only one of the two tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    return parser


def _checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("rows", "length", "rounds", "steps", "bytes_devices", "bytes_length", "microbatches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(options, name)}")
    uneven = [count for count in options.devices or () if options.rows % count]
    if uneven:
        parser.error(f"--rows: expected a multiple of {uneven[0]} devices, got {options.rows}")


def _settings(options: argparse.Namespace, devices: Sequence[int], simulated: bool) -> list[Setting]:
    dtypes = ["float32", "bfloat16"] if options.dtype == "both" else [options.dtype]
    return [
        Setting(
            count,
            dtype,
            stacked,
            options.recompute,
            options.strategy,
            "tiny" if options.quick else options.size,
            options.rows,
            16 if options.quick else options.length,
            simulated,
        )
        for count, dtype, stacked in itertools.product(devices, dtypes, _stacked(options))
    ]


def _stacked(options: argparse.Namespace) -> list[bool]:
    return [True, False] if options.layers == "both" else [options.layers == "scan"]


def _answers(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = []
    for request in requests:
        begun = time.monotonic()
        answers.append(run(request))
        where = Setting(**request["setting"]).where
        print(f"{request['what']}, {where}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return answers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    _checked(parser, options)
    seen = {"platform": "cpu", "kind": "cpu", "count": 0}
    if options.platform != "cpu":
        seen = run({"what": "devices"})
    simulated = seen["platform"] != "gpu"
    if simulated and options.platform == "gpu":
        parser.error(f"--platform gpu: expected JAX to find GPUs, but it found {seen['platform']}")
    devices = options.devices or [n for n in (1, 4, 8) if simulated or n <= seen["count"]]
    rounds, repeat = (2, 1) if options.quick else (options.rounds, options.steps)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax", "twinshard")
    )
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {versions}, "
        f"{'simulated devices' if simulated else seen['kind']}; {rounds} rounds of {repeat} steps\n",
        flush=True,
    )
    settings = [] if options.only == "bytes" else _settings(options, devices, simulated)
    asked = {"contestants": options.contestants, "rounds": rounds, "repeat": repeat}
    timed = _answers([{"what": "times", "setting": setting.to_json(), **asked} for setting in settings])
    if timed:
        print("\n".join(times_table(timed)), flush=True)
    weighed = _answers(
        [
            {
                "what": "bytes",
                "setting": Setting(
                    options.bytes_devices,
                    stacked=stacked,
                    recompute=recompute,
                    size="tiny" if options.quick else "26M",
                    rows=options.bytes_devices * options.microbatches,
                    length=options.bytes_length,
                ).to_json(),
                "microbatches": options.microbatches,
            }
            for stacked, recompute in itertools.product(
                _stacked(options), (False,) if options.quick else (False, True)
            )
            if options.only != "times"
        ]
    )
    if weighed:
        print("\n".join(bytes_table(weighed)))
    if options.json:
        report = {"date": time.strftime("%Y-%m-%d"), "versions": versions, "times": timed, "bytes": weighed}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    broken = broken_promises(timed)
    for sentence in broken:
        print(f"broken: {sentence}")
    if broken:
        sys.exit(1)


if __name__ == "__main__":
    main()
