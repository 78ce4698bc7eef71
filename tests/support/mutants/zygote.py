"""A process that imports frameworks, product and tests once, and forks a pytest for each run.

Run this in a copy of the checkout, with the requested test files as arguments. Its first output line, ``ready``, says
that all imports are done, so files can change. Each input line is JSON, ``{"arguments": [...], "limit": seconds,
"mutant": [path, function] or null}``, and each output line is ``{"code": ..., "output": ...}``. Code None means that
the run exceeded its limit. Code ``NOT_LIVE`` means that the mutant needs a process without imports of the product.
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
from collections.abc import Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import tests.conftest  # noqa: F401  # the environment that the frameworks are imported in
from tests.support import ranks
from tests.support.mutants.live import replace_code, serve

NOT_LIVE = 99


def _import_all(files: Sequence[str]) -> None:
    """The tests, as pytest imports them, and what they import.

    A test that makes arrays where it is imported is left to the runs: JAX's threads would be lost in a fork.
    """

    def refuse() -> None:
        raise RuntimeError("an array is made where a test is imported")

    bridge = importlib.import_module("jax._src.xla_bridge")
    backends, bridge.backends = bridge.backends, refuse
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", *files])
    bridge.backends = backends
    assert not bridge.backends_are_initialized()


def _start_rank_server(files: Sequence[str]) -> set[int]:
    """The server that forks rank processes, and the processes beside it, for all runs."""
    torch_tests = [file for file in files if file.startswith("tests/torch_impl/")]
    modules = [file.removesuffix(".py").replace("/", ".") for file in torch_tests]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*ranks.PRELOADED, "torch_impl", *modules])
    # The server is ready after all imports. Before that no mutant may be in the files.
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
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


def _run(arguments: list[str], mutant: tuple[str, str] | None, output: int) -> int:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if mutant is not None and not replace_code(Path.cwd(), *mutant):
        return NOT_LIVE
    # The server is the parent's child, which this process cannot wait for.
    vars(forkserver._forkserver)["ensure_running"] = lambda: None
    vars(ranks)["_serve"] = partial(serve, mutant)
    return int(pytest.main(arguments))


def answer(job: dict[str, Any], servers: set[int]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            code = 3
            try:
                code = _run(job["arguments"], job["mutant"], output.fileno())
            finally:
                sys.stdout.flush()
                os._exit(code)
        deadline, status = time.monotonic() + job["limit"], None
        while status is None and time.monotonic() < deadline:
            done, ended = os.waitpid(child, os.WNOHANG)
            status = ended if done else None
            time.sleep(0.02)
        # A mutant can make rank processes wait or run forever.
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
    answers = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    files = sys.argv[1:]
    _import_all(files)
    # Output of rank processes goes to the server's output.
    stderr = os.dup(2)
    os.dup2(silence, 2)
    servers = _start_rank_server(files)
    os.dup2(stderr, 2)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), servers)), file=answers, flush=True)


if __name__ == "__main__":
    main()
