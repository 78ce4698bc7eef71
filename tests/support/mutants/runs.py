"""Run tests in a copy of the checkout that holds a mutant. The checkout itself never changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.support.mutants.edits import Mutant
from tests.support.mutants.reached import Record, by_promise
from tests.support.mutants.zygote import NOT_LIVE
from tests.support.pairwise import covered_cases
from tests.support.processes import importing_from

ROOT = Path(__file__).parents[3]
_EVERY = ["-m", "slow or not slow", "--hypothesis-profile", "all"]
_OPTIONS = [
    *("-x", "-q", "--no-header", "--tb=no", "--timeout", "90"),
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
]
# Budgets in recorded CPU seconds: the first tests to try, then more tests, and at last all tests.
_STAGES = (2.0, 8.0, 30.0, 1e9)


@contextmanager
def copied() -> Iterator[Path]:
    """Copy the current files of the checkout that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


@dataclass(frozen=True)
class Outcome:
    """``said``: a column of the table. ``by``: the first test that failed. ``tests``: how many ran, of how many."""

    said: str
    by: str = ""
    tests: str = ""


class Tests:
    """The tests of a copy of the checkout; a context manager, which ends the processes it started."""

    def __init__(self, root: Path, record: Record, budget: float, mutants: Iterable[Mutant]) -> None:
        self._root, self._record, self._budget = root, record, budget
        self._breadth = record.breadth()
        self._sound: set[str] = set()
        self._edits = 0
        tests = set().union(*(record.tests.get(mutant.reach, set()) for mutant in mutants))
        files = sorted({test.partition("::")[0] for test in tests})
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.support.mutants.zygote", *files],
            cwd=root,
            env=importing_from(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        assert self._zygote.stdout is not None
        assert self._zygote.stdout.readline() == "ready\n"

    def __enter__(self) -> Tests:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait()

    def outcome(self, mutant: Mutant, every: bool) -> Outcome:
        reaching = self._record.reaching(mutant) - covered_cases()
        ranked = by_promise(self._record, mutant.path, reaching, self._breadth)
        slow = sorted({test.partition("::")[0] for test in reaching or self._record.of_file(mutant.path)})
        if not ranked and not (every and slow):
            return Outcome("not reached")
        with self._changed(mutant):
            tried = 0
            for stage in self._stages(ranked):
                if by := self._killer(mutant, stage):
                    return Outcome("killed", by, f"{tried + len(stage)} of {len(ranked)}")
                tried += len(stage)
            if every and slow and (by := self._killer(mutant, [*_EVERY, "-m", "slow", *slow])):
                return Outcome("killed by slow tests", by)
        said = "not reached" if not ranked else "survived" if tried == len(ranked) else "undecided"
        return Outcome(said, "", f"{tried} of {len(ranked)}")

    def _stages(self, ranked: Sequence[str]) -> Iterator[list[str]]:
        spent, stage, stages = 0.0, list[str](), iter(_STAGES)
        limit = next(stages)
        for test in ranked:
            spent += self._record.seconds[test] + 0.02
            if spent > self._budget and (stage or spent - self._record.seconds[test] > 1):
                break
            stage.append(test)
            if spent >= limit:
                yield stage
                stage, limit = [], next(stages)
        if stage:
            yield stage

    @contextmanager
    def _changed(self, mutant: Mutant) -> Iterator[None]:
        file = self._root / mutant.path
        source, stat = file.read_text(), file.stat()
        self._edits += 1
        file.write_text(mutant.apply(source))
        # Python's cached bytecode is valid while the file's size and modification second stay the same.
        os.utime(file, (0, 1_000_000_000 + self._edits))
        try:
            yield
        finally:
            file.write_text(source)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def _killer(self, mutant: Mutant, arguments: list[str]) -> str:
        """The first test that fails with the mutant, and passes without it; else nothing."""
        tests = [argument for argument in arguments if argument.startswith("tests/")]
        limit = 120 + 8 * sum(self._record.seconds.get(test, 30) for test in tests)
        code, output = self._pytest(arguments, limit, mutant)
        if code == 0 or code == 5:
            return ""
        if code is None:
            return "time limit"
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.M)
        by = failed[0] if failed else "no test can be collected"
        suspects = [by] if "::" in by else tests[:1]
        if suspects[0] not in self._sound:
            source = (self._root / mutant.path).read_text()
            (self._root / mutant.path).write_text((ROOT / mutant.path).read_text())
            marks = ["-m", "slow or not slow"]
            code, output = self._pytest([*marks, *suspects], limit, None)
            (self._root / mutant.path).write_text(source)
            if code != 0:
                print(f"fails without a mutant, is left out: {suspects[0]}", flush=True)
                self._record.seconds.pop(suspects[0], None)
                for names in self._record.tests.values():
                    names.discard(suspects[0])
                rest = [argument for argument in arguments if argument != suspects[0]]
                return self._killer(mutant, rest) if len(rest) < len(arguments) and rest else ""
            self._sound.add(suspects[0])
        return by

    def _pytest(self, arguments: list[str], limit: float, mutant: Mutant | None) -> tuple[int | None, str]:
        """Exit status of pytest (None if it exceeded ``limit`` seconds) and the end of its output."""
        arguments = [*_OPTIONS, *arguments]
        if mutant is None or mutant.reach not in self._record.imported:
            job = {"arguments": arguments, "limit": limit}
            job["mutant"] = None if mutant is None else (mutant.path, mutant.function)
            assert self._zygote.stdin is not None
            assert self._zygote.stdout is not None
            self._zygote.stdin.write(json.dumps(job) + "\n")
            self._zygote.stdin.flush()
            answer = json.loads(self._zygote.stdout.readline())
            if answer["code"] != NOT_LIVE:
                return answer["code"], answer["output"]
        command = [sys.executable, "-m", "pytest", *arguments]
        environment = importing_from(self._root)
        with tempfile.TemporaryFile() as said:
            try:
                code = subprocess.run(
                    command, cwd=self._root, env=environment, stdout=said, stderr=said, timeout=limit
                ).returncode
            except subprocess.TimeoutExpired:
                return None, ""
            said.seek(0)
            return code, said.read().decode(errors="replace")[-4000:]
