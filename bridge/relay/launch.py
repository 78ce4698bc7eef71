"""Start a leg's processes, follow their metrics, and report their own error if they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bridge.relay.job import REHEARSE, Job, read_metrics
from bridge.relay.lifetime import parent_variables

# Short compared to the shortest step, long compared to reading a file of a thousand lines.
POLL_SECONDS = 0.2
# A first step compiles for minutes on one core; a deadlock never ends.
STALL_SECONDS = 900.0
REHEARSE_SECONDS = 600.0
# torchrun itself gives its workers 30 s before it kills them.
STOP_SECONDS = 45.0
OUTPUT = "output.log"

# Gets a step's number and its loss.
OnStep = Callable[[int, float], None]


class LegError(RuntimeError):
    """A leg's process ended with an error; the text is the leg's own."""


@dataclass(frozen=True)
class Reference:
    """A run on one process that never hops. ``repeat``: the number of a repeat, whose rows are reordered; else 0."""

    job: Job
    dtype: str = "float32"
    repeat: int = 0


def command(job: Job) -> list[str]:
    """The command line of a leg."""
    file = str(_file_of(job))
    if job.leg.framework == "jax":
        return [sys.executable, "-m", "bridge.relay.jax_leg", file]
    ranks = str(job.leg.ranks)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return [sys.executable, "-m", "bridge.relay.lifetime", *torchrun, "-m", "bridge.relay.torch_leg", file]


def command_of_references(references: Sequence[Reference]) -> list[str]:
    """The command line of all references, one after another in one process."""
    arguments = [sys.executable, "-m", "bridge.relay.torch_reference"]
    for reference in references:
        arguments += [str(_file_of(reference.job)), reference.dtype, str(reference.repeat)]
    return arguments


def _file_of(job: Job) -> Path:
    return job.folder / "job.json"


def environment(processes: int) -> dict[str, str]:
    """A leg's environment, with the machine's cores divided among its rank processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env = {**os.environ, **parent_variables()}
    path = [str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path).rstrip(os.pathsep)
    env["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    return env


def run_leg(job: Job, on_step: OnStep) -> float:
    """Run the job's processes to their end; returns wall seconds. ``on_step(step, loss)`` follows each new step.

    Raises ``LegError`` with the leg's own error if it fails, or if no step ends within ``STALL_SECONDS``.
    """
    job.write()
    started = time.perf_counter()
    with _run_process(command(job), job, job.leg.ranks if job.leg.framework == "torch" else 1) as process:
        _follow(process, job, on_step)
    _require_success(process, job, job)
    return time.perf_counter() - started


def run_references(
    references: Sequence[Reference], on_step: Callable[[Reference], OnStep]
) -> Iterator[float]:
    """Run the references in one process; yields the wall seconds of each at its end.

    ``on_step`` is called for each reference at its start. Raises ``LegError`` as ``run_leg`` does.
    """
    for reference in references:
        reference.job.write()
    first = references[0].job
    with _run_process(command_of_references(references), first, 1) as process:
        for reference in references:
            started = time.perf_counter()
            _follow(process, reference.job, on_step(reference))
            if not reference.job.done.exists():
                _require_success(process, reference.job, first)
            yield time.perf_counter() - started
    _require_success(process, references[-1].job, first)


@contextmanager
def _run_process(command: Sequence[str], job: Job, processes: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended, or is stopped, when the context closes; its output goes to the job's folder."""
    with (job.folder / OUTPUT).open("wb") as output:
        process = _start(command, processes, output)
        try:
            yield process
        except BaseException:
            _stop(process)
            raise
        process.wait()


def _start(command: Sequence[str], processes: int, output: BinaryIO) -> subprocess.Popen[bytes]:
    """A process in its own session: it is stopped as a group, and Ctrl-C reaches only the relay."""
    return subprocess.Popen(
        command,
        env=environment(processes),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def rehearse(jobs: Sequence[Job]) -> list[str | None]:
    """The error that would stop each job's leg before its first step, found in seconds by a rehearsal.

    None for a leg that can start. Each framework rehearses its own legs. Raises ``LegError`` when it cannot rehearse.
    """
    # A process creates its simulated devices once, so the first leg must need the most.
    ordered = sorted(jobs, key=lambda job: -job.leg.ranks)
    by_framework = {
        framework: [job for job in ordered if job.leg.framework == framework]
        for framework in dict.fromkeys(job.leg.framework for job in jobs)
    }
    with ExitStack() as stack:
        started = []
        for framework, own in by_framework.items():
            files = [str(job.write()) for job in own]
            log = stack.enter_context((own[0].folder / OUTPUT).open("wb"))
            command = [sys.executable, "-m", f"bridge.relay.{framework}_leg", REHEARSE, *files]
            process = _start(command, len(by_framework), log)
            stack.callback(_stop, process)
            started.append((process, own[0]))
        for process, first in started:
            try:
                status = process.wait(REHEARSE_SECONDS)
            except subprocess.TimeoutExpired:
                raise LegError(
                    f"{first.leg.framework}: expected the rehearsal to end within {REHEARSE_SECONDS:.0f} s, it did not"
                ) from None
            if status:
                raise LegError(f"{first.leg.framework}: {_own_error(first, status, first.folder / OUTPUT)}")
    reports = [job.folder / "error-rank0" for job in jobs]
    return [_summary(report) if report.exists() else None for report in reports]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the leg and its ranks; torchrun's workers have sessions of their own, so torchrun must pass the signal on.

    If torchrun has already ended, its workers end on their own: see ``lifetime``.
    """
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _follow(process: subprocess.Popen[bytes], job: Job, on_step: OnStep) -> None:
    """Return when the process has ended, or the job is done."""
    seen, last = 0, time.monotonic()
    while True:
        ended = process.poll() is not None or job.done.exists()
        lines = read_metrics(job.metrics)
        for line in lines[seen:]:
            on_step(int(line["step"]), line["loss"])
            last = time.monotonic()
        seen = len(lines)
        if ended:
            return
        if time.monotonic() - last > STALL_SECONDS:
            raise LegError(f"no step ended within {STALL_SECONDS:.0f} s; the output is in {job.folder}")
        time.sleep(POLL_SECONDS)


def _require_success(process: subprocess.Popen[bytes], job: Job, first: Job) -> None:
    """``first``: the job whose folder contains the process's output."""
    if process.wait():
        raise LegError(_own_error(job, process.returncode, first.folder / OUTPUT))


def _own_error(job: Job, status: int, log: Path) -> str:
    reports = sorted(job.folder.glob("error-rank*"))
    if reports:
        # Ranks that lose a peer also fail, but later: the oldest report contains the cause.
        first = min(reports, key=lambda path: path.stat().st_mtime_ns)
        return f"{first.name.removeprefix('error-')}: {_summary(first)} (full text in {first})"
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return f"exit status {status}; the end of {log}:\n" + "\n".join(tail)


def _summary(report: Path) -> str:
    return report.read_text(encoding="utf-8").split("\n\nTraceback")[0]
