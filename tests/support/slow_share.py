"""A share of the slow tests that rotates with the commits: ``python -m pytest -m slow -p tests.support.slow_share``.

Where it runs for each commit, each slow test is run by one of five. A file's tests share compiled steps, so they stay
together. Tests that would begin after ``--slow-minutes`` are skipped and counted: the share is never red by its length.
So is a test whose own limit (``pytest.mark.timeout(N)``, N seconds) is above what is left of these minutes.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BEGUN = time.monotonic()
_OVER = "the slow share's minutes are over"
_TOO_LONG = "their time limit is above the minutes left"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-share", type=int, default=5, help="into how many shares slow tests are divided")
    parser.addoption(
        "--slow-minutes", type=float, default=25.0, help="after which no test of the share begins"
    )


def turn(shares: int) -> int:
    """Which share it is, from 0, by the number of commits; 0 where git does not tell."""
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) % shares if done.returncode == 0 else 0


def shares_of(counts: Mapping[str, int], shares: int) -> dict[str, int]:
    """By test file, its share: each file, the largest first, goes to the share with the fewest tests so far."""
    loads, share_of = [0] * shares, {}
    for file in sorted(counts, key=lambda file: (-counts[file], file)):
        share = loads.index(min(loads))
        loads[share] += counts[file]
        share_of[file] = share
    return share_of


# Last: the marks of slow cases are set before, and pytest deselects by them.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shares = config.getoption("--slow-share")
    share, chosen = shares_of(Counter(map(_file, items)), shares), turn(shares)
    config.hook.pytest_deselected(items=[item for item in items if share[_file(item)] != chosen])
    items[:] = [item for item in items if share[_file(item)] == chosen]


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_report_header(config: pytest.Config) -> str:
    shares = config.getoption("--slow-share")
    return f"slow tests: share {turn(shares) + 1} of {shares}, by the number of commits"


def _own_limit(item: pytest.Item) -> float:
    """Seconds that the test's own mark gives it; 0 where it has no such mark."""
    mark = item.get_closest_marker("timeout")
    if mark is None:
        return 0.0
    return float(mark.args[0] if mark.args else mark.kwargs.get("timeout", 0.0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    left = 60 * item.config.getoption("--slow-minutes") - (time.monotonic() - _BEGUN)
    if left < 0:
        pytest.skip(_OVER)
    if _own_limit(item) > left:
        pytest.skip(_TOO_LONG)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for words, reason in (("were not begun", _OVER), ("were left out", _TOO_LONG)):
        if count := sum(reason in text for text in skipped):
            terminalreporter.write_line(f"{count} slow tests of this share {words}: {reason}")
