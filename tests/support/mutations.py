"""Plant faults that the tests must see: ``python -m tests.support.mutations [--jobs N] [--all] [words]``.

Each mutation changes one place in a scratch copy of the checkout and runs its tests until the first failure: tests of
the fast tier, and with ``--all`` also slow tests. ``words`` choose mutations whose line contains one of them. Prints
``red`` and the first test that saw the fault, or ``GREEN``, for each mutation. These tests then run without a fault and
must pass. Ends with status 1 if a mutation is not red.

``mutations.toml`` lists the mutations. ``where`` is a file or a folder. The text to replace must occur exactly once
there, so files can move inside the folder.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """``tests``: paths below ``tests/``, the likeliest to fail first."""

    fault: str
    where: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}"


MUTATIONS = [
    Mutation(**row)
    for rows in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).values()
    for row in rows
]


def file_of(mutation: Mutation, root: Path) -> Path:
    """The file to change. Raises ``LookupError`` unless the text occurs exactly once."""
    where = root / mutation.where
    files = [where] if where.is_file() else sorted(where.rglob("*.py"))
    holders = [file for file in files for _ in range(file.read_text().count(mutation.old))]
    if len(holders) != 1:
        raise LookupError(f"expected the text in one place, found it in {len(holders)}")
    return holders[0]


@dataclass(frozen=True)
class Verdict:
    """``by``: the first test that failed with the fault, if there is one."""

    said: str
    by: str = ""

    def __str__(self) -> str:
        return f"{self.said}: {self.by}" if self.by else self.said


def verdict(mutation: Mutation, root: Path, every: bool) -> Verdict:
    try:
        file = file_of(mutation, root)
    except LookupError as error:
        return Verdict(f"ABSENT ({error})")
    tests = [f"tests/{test}" for test in mutation.tests.split()]
    before = file.read_text()
    file.write_text(before.replace(mutation.old, mutation.new))
    try:
        done = pytest(root, ["-x", *tests], every)
    finally:
        file.write_text(before)
    failed = failures(done)
    if done.returncode != 1 or not failed:
        return Verdict("GREEN" if done.returncode == 0 else f"BROKEN: {(done.stdout + done.stderr)[-300:]}")
    return Verdict("red", failed[0])


def failures(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.*?::.*?)(?: - .*)?$", done.stdout, re.M)


def pytest(root: Path, tests: list[str], every: bool) -> subprocess.CompletedProcess[str]:
    marks = ["-m", "slow or not slow", "--hypothesis-profile", "all"] if every else []
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *marks, *tests]
    return subprocess.run(command, cwd=root, env=importing_from(root), capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(word in str(m) for word in options.words)]
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for number in range(options.jobs):
            copy = Path(scratch) / str(number)
            copy.mkdir()
            files = subprocess.run(
                ["tar", "c", "--null", "-T", "-"], cwd=ROOT, input=tracked, capture_output=True, check=True
            )
            subprocess.run(["tar", "x"], cwd=copy, input=files.stdout, check=True)
            copies.put(copy)

        def run(mutation: Mutation) -> Verdict:
            copy = copies.get()
            try:
                return verdict(mutation, copy, options.all)
            finally:
                copies.put(copy)

        verdicts = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutation, judged in zip(chosen, pool.map(run, chosen), strict=True):
                print(f"{judged}\n    {mutation}", flush=True)
                verdicts.append(judged)
        seen_by = sorted({judged.by for judged in verdicts if judged.by})
        again = pytest(copies.get(), seen_by, options.all) if seen_by else None
    if again is not None and again.returncode not in (0, 1):
        raise SystemExit(f"the tests that saw the faults could not run without them:\n{again.stdout[-2000:]}")
    unsound = [] if again is None else failures(again)
    for test in unsound:
        print(f"fails without a fault, so it proves nothing: {test}")
    red = sum(judged.said == "red" and judged.by not in unsound for judged in verdicts)
    print(f"{red} of {len(verdicts)} red")
    return int(red < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
