"""Run a share of the slow tests that changes with each commit.

    python -m pytest -m slow -p tests.support.slow_share

If CI runs this for each commit, five commits run every slow test. Tests of a file stay together, because they share
compiled steps. After ``--slow-minutes`` the remaining tests are skipped and counted, so a long share never fails. The
next round of commits starts the share at a later file, so that no file is always among the remaining ones. A test is
also skipped if its own limit (``pytest.mark.timeout(N)``, N seconds) exceeds the remaining minutes.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BEGUN = time.monotonic()
_OVER = "the slow share's minutes are over"
_TOO_LONG = "their time limit is above the minutes left"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-share", type=int, default=5, help="number of shares of the slow tests")
    parser.addoption(
        "--slow-minutes", type=float, default=25.0, help="no test of the share begins after this many minutes"
    )


def turn(shares: int) -> tuple[int, int]:
    """The numbers, from 0, of this round of shares and of its share, by the number of commits; 0, 0 without git."""
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return divmod(int(done.stdout), shares) if done.returncode == 0 else (0, 0)


def shares_of(counts: Mapping[str, int], shares: int) -> dict[str, int]:
    """The share of each test file. Each file, the largest first, goes to the share with the fewest tests so far."""
    loads, share_of = [0] * shares, {}
    for file in sorted(counts, key=lambda file: (-counts[file], file)):
        share = loads.index(min(loads))
        loads[share] += counts[file]
        share_of[file] = share
    return share_of


def in_order(files: Sequence[str], round_number: int, shares: int) -> list[str]:
    """The files of a share as this round runs them: each round starts ``1 / shares`` of the files later."""
    start = len(files) * (round_number % shares) // shares
    return [*files[start:], *files[:start]]


# This runs last, after slow cases are marked and after pytest deselects by marks.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shares = config.getoption("--slow-share")
    share, (round_number, chosen) = shares_of(Counter(map(_file, items)), shares), turn(shares)
    config.hook.pytest_deselected(items=[item for item in items if share[_file(item)] != chosen])
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(_file(item), []).append(item)
    own = [file for file in by_file if share[file] == chosen]
    items[:] = [item for file in in_order(own, round_number, shares) for item in by_file[file]]


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_report_header(config: pytest.Config) -> str:
    shares = config.getoption("--slow-share")
    return f"slow tests: share {turn(shares)[1] + 1} of {shares}, by the number of commits"


def _own_limit(item: pytest.Item) -> float:
    """Seconds of the test's own ``timeout`` mark; 0 without a mark."""
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
