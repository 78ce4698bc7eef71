"""Record the CPU time of each test: ``python -m pytest -p tests.support.costs --costs costs.tsv``.

The CPU time counts the test's process, its running descendants, and its children that ended: rank processes, legs of
the relay, notebook kernels. On a busy machine wall time grows by a factor of 2 to 10, but CPU time hardly grows.

Each line has the CPU seconds of the test with its set-up, the seconds of compiling in the test's own process, the
seconds of compiling that the persistent cache saved there, and the node id. Workers of pytest-xdist append to the same
file.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
COMPILED = "/jax/core/compile/backend_compile_duration"
SAVED = "/jax/compilation_cache/compile_time_saved_sec"

seconds: Counter[str] = Counter()


def tree_seconds() -> float:
    """CPU seconds of this process, its ended children and its running descendants."""
    return trees_seconds([os.getpid()])[0]


def trees_seconds(roots: list[int]) -> tuple[float, bool]:
    """CPU seconds of processes with their ended children and running descendants, and whether any of them is active.

    Active processes run, or wait for a disk.
    """
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    states: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process ended meanwhile
            continue
        pid = int(stat.parent.name)
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
        states[pid] = fields[0]
    waiting, total, runs = list(roots), 0, False
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        runs = runs or states.get(pid) in ("R", "D")
        waiting += children[pid]
    return total / TICKS, runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="append the CPU seconds of each test to this file")


def note(event: str, duration: float, **_: Any) -> None:
    seconds[event] += duration


listening = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global listening
    if "jax" in sys.modules and not listening:
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(note)
        listening = True
    start, before = tree_seconds(), Counter(seconds)
    outcome = yield
    spent = tree_seconds() - start
    compiled, saved = (seconds[name] - before[name] for name in (COMPILED, SAVED))
    with item.config.getoption("--costs").open("a") as file:
        file.write(f"{spent:.2f}\t{compiled:.2f}\t{saved:.2f}\t{item.nodeid}\n")
    return outcome
