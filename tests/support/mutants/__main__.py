"""Test the tests with random mutants: ``python -m tests.support.mutants [--seed S] [--count N] [--all] [ROOM ...]``.

Draws ``--count`` mutants over the packages of the product, in proportion to their lines. The tests that reach a mutated
function then run in a copy of the checkout: tests of the fast tier, and with ``--all`` also the slow tests of the same
files. The seed is printed. The same seed draws the same mutants of the same code. ``--folder`` keeps the results, so an
interrupted run can continue.

A mutant is undecided if ``--budget`` ends before all its tests have run. Undecided and surviving mutants count as not
killed. Equivalent mutants (``equivalent.toml``) do not count.

    python -m tests.support.mutants --record tests/torch_impl tests/sharding

runs tests of the fast tier once and records the functions that each test reaches. Earlier records of other tests stay.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.support.mutants.edits import Mutant, compiles, mutants_of, product_files
from tests.support.mutants.reached import Record, instrument
from tests.support.mutants.runs import ROOT, Outcome, Tests, copied
from tests.support.processes import importing_from

ROOMS = (
    "torch_impl",
    "jax_impl",
    "bridge/core/sharding",
    "bridge/core/mapping",
    "bridge/core/formats",
    "bridge/checkpoints",
    "bridge/planning",
    "bridge/parity",
    "bridge/compiling",
    "bridge/commands",
    "bridge/relay",
    "bridge/propose",
)
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


def draw(seed: int, count: int, rooms: tuple[str, ...] = ROOMS) -> list[tuple[str, Mutant]]:
    """``count`` mutants with their packages: from each package its share by lines, and at least one."""
    files = {room: list(product_files(ROOT, (room,))) for room in rooms}
    lines = {room: sum(len(file.read_text().splitlines()) for file in files[room]) for room in rooms}
    drawn: list[tuple[str, Mutant]] = []
    for room in rooms:
        rng = random.Random(f"{seed} {room}")
        wanted = max(1, round(count * lines[room] / sum(lines.values())))
        candidates = [
            (mutant, source)
            for file in files[room]
            for source in [file.read_text()]
            for mutant in mutants_of(str(file.relative_to(ROOT)), source)
        ]
        rng.shuffle(candidates)
        valid = (mutant for mutant, source in candidates if compiles(mutant, source))
        drawn += [(room, mutant) for mutant, _ in zip(valid, range(wanted), strict=False)]
    return drawn


def equivalents() -> dict[tuple[str, str, str], str]:
    """The reason of each equivalent mutant, by path, old lines and new lines."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {(entry["path"], entry["before"], entry["after"]): entry["reason"] for entry in entries}


def record_reached(paths: list[str], file: Path) -> None:
    record = Record.load(file)
    with copied() as copy:
        instrument(copy)
        plugins = ["-p", "tests.support.mutants.reached", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", *plugins, *paths]
        done = subprocess.run(command, cwd=copy, env=importing_from(copy), check=False)
        count = record.add_run(copy)
    record.save(file)
    print(f"recorded {count} tests, pytest ended with {done.returncode}")


def results(
    chosen: argparse.Namespace, drawn: list[tuple[str, Mutant]]
) -> Iterator[tuple[str, Mutant, Outcome]]:
    """The outcome of each mutant: from an earlier run with this seed, or by running the tests now."""
    known_as_equivalent = equivalents()
    kept = chosen.folder / f"seed-{chosen.seed}{'-all' if chosen.all else ''}.jsonl"
    before = {}
    if kept.exists() and not chosen.again:
        stored = map(json.loads, kept.read_text().splitlines())
        before = {json.dumps(entry["mutant"]): Outcome(**entry["outcome"]) for entry in stored}
    end = time.monotonic() + chosen.seconds
    record = Record.load(chosen.folder / "reached.json")
    mutants = [mutant for _, mutant in drawn]
    with copied() as copy, Tests(copy, record, chosen.budget, mutants) as tests:
        for room, mutant in drawn:
            key = json.dumps(asdict(mutant))
            if (mutant.path, mutant.before, mutant.after) in known_as_equivalent:
                yield room, mutant, Outcome("equivalent")
            elif key in before:
                yield room, mutant, before[key]
            elif time.monotonic() < end:
                outcome = tests.outcome(mutant, chosen.all)
                with kept.open("a") as file:
                    file.write(json.dumps({"mutant": asdict(mutant), "outcome": asdict(outcome)}) + "\n")
                print(f"{outcome.said} {outcome.tests} {outcome.by}\n{mutant}", flush=True)
                yield room, mutant, outcome
            else:
                yield room, mutant, Outcome("not run")


def table(outcomes: list[tuple[str, Mutant, Outcome]]) -> str:
    columns = (
        "killed",
        "killed by slow tests",
        "survived",
        "undecided",
        "not reached",
        "equivalent",
        "not run",
    )
    rooms = list(dict.fromkeys(room for room, _, _ in outcomes))
    counts = Counter((room, outcome.said) for room, _, outcome in outcomes)
    rows = [("room", "drawn", *columns, "fast", "all")]
    for room in [*rooms, "all rooms"]:
        members = rooms if room == "all rooms" else [room]
        by = [sum(counts[member, column] for member in members) for column in columns]
        judged = sum(by) - by[-2] - by[-1]
        shares = [f"{100 * killed / judged:.0f} %" if judged else "" for killed in (by[0], by[0] + by[1])]
        rows.append((room, str(sum(by)), *map(str, by), *shares))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="*", help="folders or files of the product; default: all rooms")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--all", action="store_true", help="slow tests, too, where fast ones see nothing")
    parser.add_argument("--record", nargs="+", metavar="TEST", help="note what these tests reach")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "twinshard-mutants",
        help="record and results",
    )
    parser.add_argument("--budget", type=float, default=90, help="CPU seconds of tests for a mutant")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--again", action="store_true", help="forget the results of earlier runs")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if chosen.record:
        record_reached(chosen.record, chosen.folder / "reached.json")
        return 0
    print(f"seed {chosen.seed}", flush=True)
    drawn = draw(chosen.seed, chosen.count, tuple(chosen.rooms) or ROOMS)
    outcomes = list(results(chosen, drawn))
    for said in ("survived", "undecided", "not reached"):
        for _, mutant, outcome in outcomes:
            if outcome.said == said:
                print(f"\n{said} {outcome.tests} {mutant}")
    print(f"\nseed {chosen.seed}\n{table(outcomes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
