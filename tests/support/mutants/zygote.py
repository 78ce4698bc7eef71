"""A process that has imported the frameworks once, and forks a pytest for each run that it is asked for.

Nothing of the product is imported before the fork, so that each run sees the files as they are then. Run in a copy of
the checkout: a line of JSON in, ``{"arguments": [...], "limit": seconds}``, a line out, ``{"code": ..., "output":
...}``; code None: the run was ended after its limit.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import tests.conftest  # noqa: F401  # the environment that the frameworks are imported in
from tests.support.ranks import PRELOADED

_FRAMEWORKS = [
    *PRELOADED,
    "jax",
    "optax",
    "flax.linen",
    "flax.nnx",
    "orbax.checkpoint",
    "hypothesis",
    "safetensors",
]


def _start_rank_server() -> set[int]:
    """The server that forks rank processes, and the processes beside it, for all runs."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return set(_descendants())


def _descendants() -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
        except OSError:  # the process ended meanwhile
            continue
    below, queue = [], [os.getpid()]
    while queue:
        below += children[queue[0]]
        queue += children[queue.pop(0)]
    return below


def _run(arguments: list[str], output: int) -> int:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The server is the parent's child, which this process cannot wait for.
    vars(forkserver._forkserver)["ensure_running"] = lambda: None
    return int(pytest.main(arguments))


def answer(arguments: list[str], limit: float, servers: set[int]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            code = 3
            try:
                code = _run(arguments, output.fileno())
            finally:
                sys.stdout.flush()
                os._exit(code)
        deadline, status = time.monotonic() + limit, None
        while status is None and time.monotonic() < deadline:
            done, ended = os.waitpid(child, os.WNOHANG)
            status = ended if done else None
            time.sleep(0.02)
        # A mutant may let rank processes wait or run for ever.
        for pid in set(_descendants()) - servers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if status is None:
            os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"code": None if status is None else os.waitstatus_to_exitcode(status), "output": text[-4000:]}


def main() -> None:
    servers = _start_rank_server()
    for name in _FRAMEWORKS:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(answer(job["arguments"], job["limit"], servers)), flush=True)


if __name__ == "__main__":
    main()
