"""Ray as the cluster: each part is a task; a task whose worker or machine is lost is submitted again.

Needs the extra `ray` here, and Twinshard on all machines of the cluster, as source and destination: at the
same paths. `RAY_ADDRESS` or a cluster begun on this machine (`ray start`) is used, else one is begun here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from bridge.checkpoints.jobs.array_jobs import PartReport
from bridge.checkpoints.jobs.cluster import TELL_SECONDS, PartTask, Told, WorkerLost
from bridge.core.extras import install_advice
from bridge.core.formats.tensors.base import CheckpointError

_BOARD_SECONDS = 1.0
_LOST = (
    *("WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError"),
    *("LocalRayletDiedError", "NodePreemptedError"),
)
"""Ray's errors for a lost worker or machine, as far as this version of Ray has them."""


class RayCluster:
    """Runs parts as Ray tasks of `workers` CPUs each; see `Cluster`. CheckpointError if Ray is not available."""

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise CheckpointError(
                f"--engine ray needs Ray, which cannot be imported: {error}; use --engine processes, or install Ray: "
                f"{install_advice('ray')}"
            ) from None
        self._ray = ray
        self._begun = not ray.is_initialized()
        if self._begun:
            try:
                ray.init(log_to_driver=False)
            except Exception as error:  # any kind: Ray has no base class for these errors
                raise CheckpointError(
                    f"no Ray cluster: {_first_line(error)}; check RAY_ADDRESS, or use --engine processes"
                ) from error
        with _ray_errors("listing its machines"):
            cpus = int(ray.cluster_resources().get("CPU", 0))
        if cpus < workers:
            self.close()
            raise CheckpointError(
                f"expected a Ray cluster with {workers} CPUs or more on one machine, found {cpus} in all: give fewer "
                "workers, or start more machines"
            )
        # Two per slot: one waits while the other runs, and machines may join.
        self.slots = max(1, 2 * (cpus // workers))
        # Ray itself would silently retry lost tasks.
        self._run = ray.remote(num_cpus=workers, max_retries=0)(_run)
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        self._handles: dict[int, Any] = {}

    def submit(self, task: PartTask) -> Any:
        """Submit a part to the cluster."""
        with _ray_errors(f"taking part {task.part}"):
            self._handles[task.part] = self._run.remote(task, self._board)
        return self._handles[task.part]

    def wait(self, handles: Sequence[Any], hear: Callable[[Any, Told], None]) -> Any:
        """Wait for one of these to end. hear: called with their progress meanwhile."""
        while True:
            with _ray_errors("waiting for a part"):
                done, _ = self._ray.wait(list(handles), num_returns=1, timeout=TELL_SECONDS)
            for part, said in self._said().items():
                if self._handles[part] in handles:
                    hear(self._handles[part], said)
            if done:
                return done[0]

    def result(self, handle: Any) -> PartReport:
        """The part's report. WorkerLost if its worker or machine is gone; otherwise the part's own error, if any.

        CheckpointError for all other Ray errors: another attempt would fail in the same way.
        """
        errors = self._ray.exceptions
        lost = tuple(getattr(errors, name) for name in _LOST if hasattr(errors, name))
        try:
            with _ray_errors("running a part"):
                report = self._ray.get(handle)
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, lost):
                raise WorkerLost(_first_line(cause)) from None
            if isinstance(cause, errors.RayTaskError):
                # Only an error that cannot be pickled: others arrive as values.
                raise CheckpointError(f"a part failed: {cause.cause!r}") from cause
            raise
        if isinstance(report, Exception):
            raise report
        assert isinstance(report, PartReport)
        return report

    def close(self) -> None:
        """Leave the cluster; a cluster that was started here ends, with its tasks."""
        if self._begun:
            # Finished work is safe, and a cluster that is gone need not be left.
            with suppress(Exception):
                self._ray.shutdown()

    def _said(self) -> dict[int, Told]:
        """Workers' progress since the last call; nothing as long as the board does not exist."""
        try:
            told: dict[int, Told] = self._ray.get(self._board.taken.remote(), timeout=_BOARD_SECONDS)
        except Exception:  # the board is optional, and `wait` reports a cluster that is gone
            return {}
        return told


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _ray_errors(doing: str) -> Iterator[None]:
    """Turn any Ray error into a CheckpointError; Ray's errors have no common base class."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"Ray failed while {doing}: {type(error).__name__}: {_first_line(error)}; check that the cluster is up "
            "(ray status), and run the command again: complete parts are kept"
        ) from error


class _Board:
    """An actor to which workers write their parts' progress: a Ray task returns only its result."""

    def __init__(self) -> None:
        self._told: dict[int, Told] = {}

    def tell(self, part: int, told: Told) -> None:
        self._told[part] = told

    def taken(self) -> dict[int, Told]:
        told, self._told = self._told, {}
        return told


def _run(task: PartTask, board: Any) -> PartReport | Exception:
    try:
        return task.run(lambda told: board.tell.remote(task.part, told))
    except Exception as error:
        return error
