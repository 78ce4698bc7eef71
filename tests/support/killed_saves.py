"""Kill runs during asynchronous saves at chosen moments, and check what must still hold.

The import of a framework takes seconds and a run takes tenths of a second, so a ``Zygote`` imports once and forks the
processes of each run. A moment is the n-th file operation of a process in any thread, or some milliseconds later.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import open_checkpoint
from bridge.core.formats.saving.steps import complete_steps

_ROOT = Path(__file__).parents[2]
_OPERATIONS = (
    "write",
    "pwrite",
    "fdatasync",
    "fsync",
    "rename",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
    "open",
)
STEPS = 4
KEPT = 2


def serve(run: Callable[[dict[str, Any], int], None], patience: float = 60) -> None:
    """For each line of JSON, fork ``world`` processes that call ``run(job, rank)``, and print how they ended.

    patience: the seconds that the other processes have to end after one process is killed. Then they are killed, too.
    """
    for line in sys.stdin:
        job = json.loads(line)
        children = [_forked(run, job, rank) for rank in range(job["world"])]
        deadline, codes = time.monotonic() + 90, [None] * len(children)
        alone = None
        while None in codes:
            for rank, child in enumerate(children):
                if codes[rank] is None and (ended := os.waitpid(child, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])  # type: ignore[call-overload]  # an int
            if alone is None and -signal.SIGKILL in codes:
                alone = time.monotonic()
            if time.monotonic() > (deadline if alone is None else min(deadline, alone + patience)):
                for child, code in zip(children, codes, strict=True):
                    if code is None:
                        os.kill(child, signal.SIGKILL)
            time.sleep(0.005)
        _import_as_they_did(Path(job["log"]))
        print("codes:", json.dumps([codes, _hung(codes, job, patience)]), flush=True)


def _hung(codes: list[Any], job: dict[str, Any], patience: float) -> bool:
    """Whether a process had to be killed although it should have ended by itself."""
    killed = [rank for rank, code in enumerate(codes) if code == -signal.SIGKILL]
    if patience < 60 and job["victim"] in killed:
        return False
    return any(rank != job["victim"] or not job["operation"] for rank in killed)


def _import_as_they_did(log: Path) -> None:
    """Import the modules that a run imported late, so that later forks have them. PyTorch's take seconds."""
    for listed in log.glob("modules-*"):
        for name in json.loads(listed.read_text()):
            if name not in sys.modules:
                # Some modules are synthetic and have no file.
                with suppress(Exception):
                    importlib.import_module(name)
        listed.unlink()


def _forked(run: Callable[[dict[str, Any], int], None], job: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        count = itertools.count(1)
        _count_operations(count, job["operation"] if rank == job["victim"] else 0, job["delay"])
        run(job, rank)
        Path(job["log"], f"operations-{rank}").write_text(str(next(count) - 1))
        Path(job["log"], f"modules-{rank}").write_text(json.dumps(list(sys.modules)))
        code = 0
    except BaseException:
        Path(job["log"], f"error-{rank}").write_text(traceback.format_exc())
        code = 1
    os._exit(code)


def _count_operations(count: itertools.count[int], last: int, delay: float) -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(operation: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if counts(*args) and next(count) == last:
                if not delay:
                    kill()
                threading.Timer(delay, kill).start()
            return operation(*args, **kwargs)

        return call

    for name in _OPERATIONS:
        setattr(os, name, counted(getattr(os, name), lambda *_: True))
    io.open = counted(io.open, lambda _, mode="r", *__: "w" in mode)


def acknowledge(job: dict[str, Any], rank: int, step: int) -> None:
    """Record that this process learned that the step is complete."""
    with open(Path(job["log"], f"told-{rank}"), "a") as log:
        log.write(f"{step}\n")


class Zygote:
    """A process that forks the runs. ``module`` is a program that calls ``serve``."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=_ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, world: int, victim: int = 0, operation: int = 0, delay: float = 0) -> Ended:
        """Run from the latest step in ``folder / "run"``, and kill process ``victim`` at ``operation`` (0: never)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log = folder / f"log-{len(list(folder.glob('log-*')))}"
        log.mkdir(parents=True)
        job = {"world": world, "victim": victim, "operation": operation, "delay": delay}
        # After a kill, the survivors must end soon. Without a kill, a process may wait for a slow one.
        job |= {"directory": str(folder / "run"), "log": str(log), "timeout": 5 if operation else 60}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        # Libraries may print lines of their own.
        line = next(line for line in self._process.stdout if line.startswith("codes: "))
        codes, hung = json.loads(line.removeprefix("codes: "))
        return Ended(log, codes, hung)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ended:
    """How the processes of a run ended, and which steps they knew to be complete."""

    def __init__(self, log: Path, codes: list[int], hung: bool) -> None:
        self.log, self.codes, self.hung = log, codes, hung

    @property
    def error(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.log.glob("error-*")))

    def operations(self, rank: int) -> int:
        return int((self.log / f"operations-{rank}").read_text())

    @property
    def told(self) -> int:
        """The last step that a process knew to be complete."""
        told = [int(line) for path in self.log.glob("told-*") for line in path.read_text().split()]
        return max(told, default=0)


def arrays_of(step: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(step) as reader:
        return {name: reader.read(name) for name in reader.tensors}


class Reference:
    """An undisturbed run: the arrays of all its steps, and the number of file operations of each process."""

    def __init__(self, zygote: Zygote, folder: Path, world: int) -> None:
        self.world = world
        self.steps: dict[int, dict[str, np.ndarray]] = {}
        ended = zygote.run(folder, world)
        assert ended.codes == [0] * world, ended.error
        assert sorted(os.listdir(folder / "run")) == [str(STEPS - k) for k in reversed(range(KEPT))]
        self.operations = [ended.operations(rank) for rank in range(world)]
        self._keep(folder / "run")

    def _keep(self, directory: Path) -> None:
        for step, (path,) in complete_steps(directory).items():
            self.steps.setdefault(step, arrays_of(path))

    def assert_intact(self, directory: Path) -> list[int]:
        """Assert that every complete step verifies and has the bits of the undisturbed run, if kept there."""
        steps = complete_steps(directory)
        for step, (path,) in steps.items():
            report = verify(path)
            assert report.good, (path, report.problems)
            assert report.manifest, path
            arrays = arrays_of(path)
            # Steps that the undisturbed run removed are compared among killed runs.
            expected = self.steps.setdefault(step, arrays)
            assert arrays.keys() == expected.keys()
            assert all(arrays[name].tobytes() == expected[name].tobytes() for name in expected), path
        return list(steps)


def check_killed(
    zygote: Zygote, reference: Reference, folder: Path, victim: int, operation: int, delay: float
) -> bool:
    """Kill a run. Assert that committed steps are intact, and that the next run continues to the undisturbed end.

    Returns whether the process was killed before it finished.
    """
    world = reference.world
    ended = zygote.run(folder, world, victim, operation, delay)
    assert not ended.hung, (operation, delay, ended.error)
    killed = ended.codes[victim] == -signal.SIGKILL
    if not killed:
        # The delay exceeded the rest of the run, or a process was too slow for the short timeout.
        assert ended.codes == [0] * world or "expected word from" in ended.error, ended.error
    run = folder / "run"
    steps = reference.assert_intact(run)
    # No step is lost that a process knew to be complete.
    assert max(steps, default=0) >= ended.told, (steps, ended.told)
    assert len(steps) >= min(KEPT, ended.told), (steps, ended.told)
    again = zygote.run(folder, world)
    assert again.codes == [0] * world, (again.codes, again.hung, again.error)
    kept = reference.assert_intact(run)
    assert kept[-KEPT:] == sorted(reference.steps)[-KEPT:]
    # If the kill came after the last step and before old steps were removed, the next run has nothing to save.
    assert len(kept) == KEPT or max(steps, default=0) == STEPS, kept
    # The next run has removed the leftovers of the killed run.
    left = [name for name in os.listdir(run) if not re.fullmatch(r"\d+", name)]
    assert not left or max(steps, default=0) == STEPS, left
    return killed


def check_instants(zygote: Zygote, references: list[Reference], folder: Path, count: int, seed: int) -> None:
    """Check ``count`` moments, spread over the operations of the runs. Half of them are some milliseconds later."""
    rng = random.Random(seed)
    killed = 0
    for k in range(count):
        reference = references[k % len(references)]
        victim = rng.randrange(reference.world)
        last = reference.operations[victim]
        # Choose one operation from each part of the run, so that few moments are spread like many.
        operation = 1 + int(last * (k // len(references) + rng.random()) / -(-count // len(references)))
        delay = rng.choice([0.0, rng.uniform(0.0, 0.02)])
        killed += check_killed(zygote, reference, folder / str(k), victim, min(operation, last), delay)
    assert killed >= 0.7 * count
