"""Saves in a thread: their errors reach somebody, once, whatever the program does."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.core.formats import CheckpointError
from bridge.core.formats.saving import pending

PATH = Path("runs/7")


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    yield
    pending.start(PATH, lambda: None).wait()


def _fail() -> None:
    raise OSError(28, "No space left on device", "runs/7.tmp-00000000")


def test_work_runs_behind_the_caller_and_wait_returns_after_it() -> None:
    gate, done = threading.Event(), []
    save = pending.start(PATH, lambda: (gate.wait(30), done.append(1)))  # type: ignore[arg-type, func-returns-value]
    assert not save.done()
    assert not done
    gate.set()
    save.wait()
    assert save.done()
    assert done == [1]


def test_an_error_is_raised_by_every_wait_and_then_by_nothing_else() -> None:
    save = pending.start(PATH, _fail)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left on device: 'runs/7"):
            save.wait()
    pending.settle()


def test_an_error_that_nobody_waited_for_is_raised_by_the_next_settle_only() -> None:
    pending.start(PATH, _fail)
    with pytest.raises(
        CheckpointError, match=r"asynchronous save of runs/7 failed: OSError: .*No space left"
    ):
        pending.settle()
    pending.settle()


class _Copies:
    def write(self) -> None:
        try:
            _fail()
        except OSError as error:
            raise ValueError("no such luck") from error


@pytest.mark.slow
def test_a_save_that_failed_holds_no_copies() -> None:
    copies = _Copies()
    held = weakref.ref(copies)
    save = pending.start(PATH, copies.write)
    del copies
    with pytest.raises(ValueError, match="no such luck"):
        save.wait()
    gc.collect()
    assert held() is None


PROGRAM = """
from pathlib import Path
from bridge.core.formats.saving import pending
import time
def work():
    time.sleep(0.2)
    print("written", flush=True)
    {end}
save = pending.start(Path("runs/7"), work)
{then}
"""


def _run(end: str, then: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(end=end, then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_program_that_ends_completes_its_save_and_says_its_error_on_stderr() -> None:
    done = _run("")
    assert (done.stdout, done.stderr, done.returncode) == ("written\n", "", 0)
    failed = _run("raise ValueError('no such luck')")
    assert failed.stdout == "written\n"
    assert failed.stderr == "twinshard: the asynchronous save of runs/7 failed: ValueError: no such luck\n"
    assert failed.returncode == 120
    # Also behind an error of the program's own.
    both = _run("raise ValueError('no such luck')", "raise SystemExit(3)")
    assert "no such luck" in both.stderr
    assert both.returncode == 120


def test_an_error_that_was_raised_is_not_said_again_at_the_end() -> None:
    told = _run("raise ValueError('no such luck')", "try: save.wait()\nexcept ValueError: pass")
    assert told.stderr == ""
    assert told.returncode == 0


def test_exit_functions_of_others_run_and_write_all_the_same() -> None:
    others = """
import atexit, sys
atexit.register(lambda: print("before", file=sys.stderr, flush=True))
save = None
"""
    done = subprocess.run(
        [sys.executable, "-c", others + PROGRAM.format(end="raise ValueError('no such luck')", then="")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[1:] == ["before"]
    assert done.returncode == 120


CHILD = """
import multiprocessing, sys
from pathlib import Path
from bridge.core.formats.saving import pending

def fail():
    raise OSError(28, "No space left on device")

def child(end):
    save = pending.start(Path("runs/7"), fail)
    if end == "error":
        raise RuntimeError("of the program")
    if end == "told":
        try: save.wait()
        except OSError: pass
    sys.exit(0)

if __name__ == "__main__":
    # A save of the parent must not keep children from telling of theirs.
    pending.start(Path("runs/6"), lambda: None).wait()
    for end in ("", "error", "told"):
        process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(end,))
        process.start()
        process.join()
        print(end, process.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_of_multiprocessing_tells_of_its_save_too(method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CHILD)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), method], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == " 120\nerror 1\ntold 0\n"
    assert done.stderr.count("save of runs/7 failed: OSError: [Errno 28] No space left on device") == 2
    assert "RuntimeError: of the program" in done.stderr
    assert done.returncode == 0
