"""Ray as the cluster: each part is a task; a task whose worker or machine is lost is submitted again.

Needs the extra `twinshard[ray]` here, and Twinshard on all machines of the cluster, as source and destination: at the
same paths. `RAY_ADDRESS` or a cluster begun on this machine (`ray start`) is used, else one is begun here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bridge.checkpoints.cluster import TELL_SECONDS, PartTask, Told, WorkerLost
from bridge.checkpoints.parts import PartReport
from bridge.formats.base import CheckpointError

_BOARD_SECONDS = 1.0


class RayCluster:
    """Runs parts as Ray tasks of `workers` CPUs each; see `Cluster`. CheckpointError when Ray is not there."""

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise CheckpointError(
                f"--engine ray needs Ray, which cannot be imported: {error}; pip install 'twinshard[ray]', or use "
                "--engine processes"
            ) from None
        self._ray = ray
        self._begun = not ray.is_initialized()
        if self._begun:
            try:
                ray.init(log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise CheckpointError(f"no Ray cluster: {error}; check RAY_ADDRESS") from error
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if cpus < workers:
            self.close()
            raise CheckpointError(
                f"expected a Ray cluster with {workers} CPUs or more on one machine, found {cpus} in all: give fewer "
                "workers, or start more machines"
            )
        # Two for each place: one waits while the other runs, and machines may join.
        self.slots = max(1, 2 * (cpus // workers))
        # Ray itself would do lost tasks again without telling.
        self._run = ray.remote(num_cpus=workers, max_retries=0)(_run)
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        self._handles: dict[int, Any] = {}

    def submit(self, task: PartTask) -> Any:
        """Hand a part to the cluster."""
        self._handles[task.part] = self._run.remote(task, self._board)
        return self._handles[task.part]

    def wait(self, handles: Sequence[Any], hear: Callable[[Any, Told], None]) -> Any:
        """One of these that has ended. hear: called with what they tell meanwhile."""
        while True:
            done, _ = self._ray.wait(list(handles), num_returns=1, timeout=TELL_SECONDS)
            for part, said in self._said().items():
                if self._handles[part] in handles:
                    hear(self._handles[part], said)
            if done:
                return done[0]

    def result(self, handle: Any) -> PartReport:
        """The part's report. WorkerLost when its worker or machine is gone; the part's own error otherwise."""
        errors = self._ray.exceptions
        lost = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
        )
        try:
            found = self._ray.get(handle)
        except lost as error:
            raise WorkerLost(str(error).splitlines()[0]) from None
        except errors.RayTaskError as error:
            # Only an error that cannot be sent: others come as values.
            raise CheckpointError(f"a part failed: {error.cause!r}") from error
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, PartReport)
        return found

    def close(self) -> None:
        """Leave the cluster; one that was begun here ends, with its tasks."""
        if self._begun:
            self._ray.shutdown()

    def _said(self) -> dict[int, Told]:
        """What workers have told since the last time; nothing while the board is not there."""
        try:
            found: dict[int, Told] = self._ray.get(self._board.taken.remote(), timeout=_BOARD_SECONDS)
        except self._ray.exceptions.RayError:
            return {}
        return found


class _Board:
    """Where the workers write how far their parts are, as an actor: a task of Ray's tells only its result."""

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
