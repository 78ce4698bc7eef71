"""Run a relay: references, legs and the conversions between them, into one run folder.

<out>/reference-float32, -float64        the uninterrupted runs
<out>/repeat1, ...                       repeats of the fp32 run
<out>/start/checkpoint                   the initial state (DCP)
<out>/leg1-torch/checkpoint              the state after leg 1 (DCP)
<out>/hop2-orbax                         the same state converted (Orbax), where leg 2 starts
...
<out>/report.json, relay.png
"""

from __future__ import annotations

import importlib.util
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.core.extras import install_advice, installed_versions, why_no_pictures
from bridge.core.long_calls import is_watched
from bridge.relay.config import ConfigError, Leg, RelayConfig
from bridge.relay.job import Job, read_metrics
from bridge.relay.launch import LegError, OnStep, Reference, rehearse, run_leg, run_references
from bridge.relay.norms import Norms
from bridge.relay.report import Hop, LegResult, RelayReport

MAPPING = "decoder"
FORMATS = {"torch": "dcp", "jax": "orbax"}
FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "flax", "optax")}


class Measured(NamedTuple):
    """The measurements of each step of a run."""

    losses: tuple[float, ...]
    norms: tuple[Norms, ...]


class RelayError(RuntimeError):
    """A relay stopped; the text names the leg and contains the leg's own error."""


def run(config: RelayConfig, out: Path, console: Console | None = None) -> RelayReport:
    """Run all of ``config`` under the new folder ``out``, with live progress on ``console``.

    By default the console is standard error, where a terminal or a notebook shows it.
    Without matplotlib the folder has no picture.

    Raises ``ConfigError``, before the folder is made, when a leg's policy does not fit its ranks or the model.
    Raises ``RelayError`` when a framework is not installed, the folder exists, or a leg or a conversion fails. Legs
    that had finished stay in the folder.
    """
    _require_frameworks(config)
    if out.exists():
        raise RelayError(f"run folder {out} exists already: expected a new folder; choose another --out")
    shown = console or Console(stderr=True, force_jupyter=False, quiet=not is_watched())
    with _progress(shown) as progress:
        runner = _Runner(config, out.resolve(), progress)
        runner.rehearse()
        out.mkdir(parents=True)
        start, (fp32, fp64, *repeats) = runner.references()
        legs = runner.legs(start)
    report = RelayReport(
        config,
        tuple(legs),
        fp32.losses,
        fp64.losses,
        versions(),
        norms_fp32=fp32.norms,
        norms_fp64=fp64.norms,
        repeats=tuple(repeat.losses for repeat in repeats),
    )
    report.write(out / "report.json")
    if why_no_pictures() is None:
        from bridge.relay.chart import save_picture

        save_picture(report, out / "relay.png")
    return report


def _require_frameworks(config: RelayConfig) -> None:
    # The references that every leg is compared with run in PyTorch, so a relay of JAX legs alone needs it as well.
    needed = dict.fromkeys(["torch", *(leg.framework for leg in config.legs)])
    modules = [module for framework in needed for module in FRAMEWORKS[framework]]
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        raise RelayError(
            f"a relay runs PyTorch and JAX, but {' and '.join(absent)} cannot be imported: "
            f"{install_advice('torch', 'jax', 'pictures')}"
        )


def _unfit(number: int, leg: Leg, error: str) -> Exception:
    """The error to raise for a leg whose rehearsal ended with ``error``."""
    source = leg.sharding.source
    if source in error:
        return ConfigError(f"leg {number} ({leg.title}): {error}")
    if error.startswith("ValueError: "):
        return ConfigError(f"leg {number} ({leg.title}): {source}: {error}")
    # Other errors come from a framework or from a bug in Twinshard, and the policy may not be the reason.
    return RelayError(f"leg {number} ({leg.title}): the rehearsal under policy {source} raised {error}")


def versions() -> dict[str, str]:
    """The versions of the interpreter and the packages, for the report."""
    names = ("twinshard", "torch", "jax", "jaxlib", "flax", "optax", "numpy", "tensorstore")
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    return {**machine, **dict.fromkeys(names, "not installed"), **installed_versions(*names)}


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console, disable=not console.is_interactive)


class _Runner:
    def __init__(self, config: RelayConfig, out: Path, progress: Progress) -> None:
        self.config, self.out, self.progress = config, out, progress

    def rehearse(self) -> None:
        """Find an impossible policy at the start, not when its leg begins."""
        _, done = self._start("rehearsal of the legs", 1)
        started = time.perf_counter()
        legs = list(enumerate(self.config.legs, 1))
        with TemporaryDirectory(prefix="relay-") as folder:
            jobs = [replace(self._job("", leg, None), folder=Path(folder, f"leg{n}")) for n, leg in legs]
            try:
                errors = rehearse(jobs)
            except LegError as error:
                raise RelayError(f"rehearsal of the legs failed: {error}") from error
        for (number, leg), refusal in zip(legs, errors, strict=True):
            if refusal is not None:
                raise _unfit(number, leg, refusal)
        done(f"{time.perf_counter() - started:.1f} s")

    def references(self) -> tuple[Path, list[Measured]]:
        """The initial checkpoint, and the measurements of the fp32 reference, the fp64 reference and the repeats."""
        config = self.config
        start = self._job("start", Leg("torch", 1, "no_shard", steps=1), None)
        start = replace(start, destination=start.folder / "checkpoint")
        titled = {"initial checkpoint": Reference(start)}
        leg = Leg("torch", 1, "no_shard", steps=config.steps)
        for dtype in ("float32", "float64"):
            job = self._job(f"reference-{dtype}", leg, start.destination)
            titled[f"reference {dtype}"] = Reference(job, dtype)
        for number in range(1, config.repeats + 1):
            job = self._job(f"repeat{number}", leg, start.destination)
            titled[f"repeat {number}"] = Reference(job, repeat=number)
        titles = list(titled)
        done: list[Callable[[str], None]] = []

        def follow(reference: Reference) -> OnStep:
            on_step, at_end = self._follow_steps(titles[len(done)], reference.job.leg.steps)
            done.append(at_end)
            return on_step

        try:
            for seconds in run_references(list(titled.values()), follow):
                done[-1](f"{seconds:.1f} s")
        except LegError as error:
            raise RelayError(f"{titles[len(done) - 1]} failed: {error}") from error
        assert start.destination is not None
        jobs = [reference.job for reference in titled.values()]
        return start.destination, [self._read_measurements(job) for job in jobs if job is not start]

    def legs(self, checkpoint: Path) -> list[LegResult]:
        """All legs in order, each starting from the previous one."""
        results: list[LegResult] = []
        held, first = "dcp", 0
        for number, leg in enumerate(self.config.legs, 1):
            job = self._job(f"leg{number}-{leg.framework}", leg, None)
            wanted = FORMATS[leg.framework]
            hop = None
            if wanted != held:
                target = self.out / f"hop{number}-{wanted}"
                hop = self._hop(f"hop to leg {number} ({held} -> {wanted})", checkpoint, target)
                checkpoint = target
            destination = job.folder / "checkpoint"
            job = replace(job, source=checkpoint, destination=destination)
            seconds = self._run(f"leg {number} {leg.title}", job)
            size = folder_bytes(destination)
            losses, norms = self._read_measurements(job)
            results.append(
                LegResult(leg.title, leg.precision_words, first, losses, seconds, size, hop, norms)
            )
            checkpoint, held, first = destination, wanted, first + leg.steps
        return results

    def _job(self, name: str, leg: Leg, source: Path | None) -> Job:
        config = self.config
        return Job(config.model, config.data, config.optimizer, leg, self.out / name, source, None)

    def _read_measurements(self, job: Job) -> Measured:
        lines = read_metrics(job.metrics)
        if len(lines) != job.leg.steps:
            raise RelayError(f"{job.metrics}: expected {job.leg.steps} steps, got {len(lines)}")
        return Measured(*(tuple(line[key] for line in lines) for key in ("loss", "norms")))

    def _run(self, title: str, job: Job) -> float:
        on_step, done = self._follow_steps(title, job.leg.steps)
        try:
            seconds = run_leg(job, on_step)
        except LegError as error:
            raise RelayError(f"{title} failed: {error}") from error
        done(f"{seconds:.1f} s")
        return seconds

    def _follow_steps(self, title: str, steps: int) -> tuple[OnStep, Callable[[str], None]]:
        """A function that shows each step of a run, and a function that shows its end with a note."""
        task, done = self._start(title, steps)

        def on_step(step: int, loss: float) -> None:
            self.progress.update(task, advance=1, note=f"step {step} loss {loss:.5f}")

        return on_step, done

    def _hop(self, title: str, source: Path, destination: Path) -> Hop:
        _, done = self._start(title, 1)
        started = time.perf_counter()
        try:
            convert(source, destination, mapping=MAPPING, progress=False)
            difference = diff(source, destination, mapping=MAPPING, progress=False)
        except Exception as error:
            raise RelayError(f"{title} failed: {error}") from error
        seconds = time.perf_counter() - started
        done(f"{difference.total.max_ulp} ULP, {seconds:.1f} s")
        found = len(difference.tensors), difference.total.max_ulp, difference.same
        sizes = folder_bytes(source), folder_bytes(destination)
        return Hop(str(source), str(destination), *found, *sizes, seconds)

    def _start(self, title: str, total: int) -> tuple[TaskID, Callable[[str], None]]:
        task = self.progress.add_task(title, total=total, note="")
        plain = not self.progress.console.is_interactive
        if plain:
            self.progress.console.print(f"{title} ...", highlight=False)

        def done(note: str) -> None:
            self.progress.update(task, completed=total, note=note)
            if plain:
                self.progress.console.print(f"{title}: {note}", highlight=False)

        return task, done


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
