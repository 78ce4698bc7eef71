"""The files between the relay and a leg's processes: a job file, a metrics file, an error file.

<leg folder>/job.json         written by the relay
<leg folder>/metrics.jsonl    one line per step (loss, norms of the state), appended by rank 0 during the run
<leg folder>/memory.json      bytes at rest by kind after the last step, of rank 0 or of each device
<leg folder>/error-rank<k>    the error that ended rank k, if one did
<leg folder>/checkpoint       the state after the last step
<leg folder>/done             empty, written last, by a reference
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.relay.config import DataConfig, Leg, ModelConfig, OptimizerConfig
from bridge.relay.corpus import Corpus
from bridge.relay.lifetime import end_with_parent
from bridge.relay.norms import Norms

REHEARSE = "--rehearse"


@dataclass(frozen=True)
class Job:
    """Train ``leg.steps`` steps from checkpoint ``source`` (None: from fresh weights) and save to ``destination``."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    leg: Leg
    folder: Path
    source: Path | None
    destination: Path | None

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def done(self) -> Path:
        return self.folder / "done"

    def write(self) -> Path:
        """Create the leg's folder and its job file; returns the file's path."""
        # Raises if the folder exists: a second leg must not append to the first one's metrics.
        self.folder.mkdir(parents=True)
        path = self.folder / "job.json"
        path.write_text(json.dumps(dataclasses.asdict(self), default=str, indent=1), encoding="utf-8")
        return path

    @staticmethod
    def read(path: str | Path) -> Job:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        return Job(
            ModelConfig(**table["model"]),
            DataConfig(**table["data"]),
            OptimizerConfig(**table["optimizer"]),
            Leg.of_json(table["leg"]),
            Path(table["folder"]),
            *(None if table[key] is None else Path(table[key]) for key in ("source", "destination")),
        )


def train_state(job: Job, corpus: Corpus, step: int) -> dict[str, Any]:
    """The ``train`` tree of a checkpoint after ``step`` steps: the next batch is number ``position``."""
    text = np.frombuffer(corpus.sha256, np.uint8)
    data = {"seed": job.data.seed, "position": step, "corpus_sha256": text}
    return {"step": step, "data": data, "model": job.model.as_train_state()}


def resume_position(job: Job, corpus: Corpus, train: Mapping[str, Any]) -> int:
    """The position at which to continue in the data. Raises ``ValueError`` for a checkpoint of other text or model."""
    data = train["data"]
    stored = np.asarray(data["corpus_sha256"], np.uint8).tobytes()
    if stored != corpus.sha256:
        raise ValueError(
            f"checkpoint {job.source}: expected text with SHA-256 {corpus.sha256.hex()[:16]}..., got a checkpoint "
            f"trained on {stored.hex()[:16]}...; the text is this Python's standard library, so continue with "
            f"the Python version of the first leg"
        )
    if int(data["seed"]) != job.data.seed:
        raise ValueError(
            f"checkpoint {job.source}: expected data seed {job.data.seed}, got {int(data['seed'])}"
        )
    model = {name: int(value) for name, value in train["model"].items()}
    if model != job.model.as_train_state():
        raise ValueError(f"checkpoint {job.source}: expected model {job.model.as_train_state()}, got {model}")
    return int(data["position"])


class Metrics:
    """Appends one line per step to the metrics file: the loss, and the norms of the state after the step."""

    def __init__(self, job: Job) -> None:
        self._file = job.metrics.open("a", encoding="utf-8")

    def add(self, step: int, loss: float, norms: Norms) -> None:
        self._file.write(json.dumps({"step": step, "loss": loss, "norms": norms}) + "\n")
        # The relay follows the file, and the last steps must not be lost if the rank is killed.
        self._file.flush()


def write_memory(job: Job, report: Any) -> None:
    """Keep a runtime's memory report (a dataclass) in the leg's folder."""
    text = json.dumps(dataclasses.asdict(report), default=str, indent=1)
    (job.folder / "memory.json").write_text(text, encoding="utf-8")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file, oldest first; none if the file does not exist yet."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@contextmanager
def report_errors(folder: Path, rank: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        summary = f"{type(error).__name__}: {error}{_place(error)}"
        (folder / f"error-rank{rank}").write_text(summary + "\n\n" + traceback.format_exc(), encoding="utf-8")
        raise


def _place(error: BaseException) -> str:
    """The place where the error was raised; empty for a ``ValueError``, whose text names the wrong input."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) or not frames:
        return ""
    return f" (at {frames[-1].filename}:{frames[-1].lineno})"


def main(run: Callable[[Job], None], rehearse: Callable[[Job], None] | None = None, rank: int = 0) -> None:
    """Entry point of a leg's process: ``argv[1]`` is the job file. An error goes to the error file and to stderr.

    After ``--rehearse``, ``argv`` lists the job files of several legs. Each leg is rehearsed: set up as in the relay,
    but without a checkpoint or a step.
    """
    if rehearse is not None and sys.argv[1] == REHEARSE:
        end_with_parent(signal.SIGKILL)
        for job in map(Job.read, sys.argv[2:]):
            with suppress(Exception), report_errors(job.folder, rank):
                rehearse(job)
        return
    job = Job.read(sys.argv[1])
    with report_errors(job.folder, rank):
        end_with_parent(signal.SIGKILL)
        run(job)
