"""The checkpoints of one run: save regularly, keep the best and the latest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import optax

from bridge.core.formats import TreePath
from bridge.core.formats.saving.manager import StepManager
from bridge.core.formats.saving.pending import PendingSave
from bridge.core.mapping.plan.running import AnyMapping
from jax_impl.checkpoint.checkpoint import SaveRequest, start_save
from jax_impl.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from jax_impl.comm.agreement import TIMEOUT, Processes
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from jax_impl.train_state import TrainState


class CheckpointManager(StepManager):
    """Saves and loads the steps of one run, one directory per step; arguments and other methods as in ``StepManager``.

    Example::

        with CheckpointManager("runs", max_to_keep=3, best_metric="loss") as manager:
            if manager.latest_step() is not None:
                loaded = manager.load(plan, optimizer)
                state, first = loaded.state, loaded.train["step"]
            for index in range(first, last):
                state, metrics = step(state, batch(index))
                if index % 100 == 0:
                    manager.save(index, plan, state, {"step": index + 1}, metrics={"loss": metrics["loss"]})
    """

    def save(
        self,
        step: int,
        plan: ShardingPlan,
        state: TrainState,
        train: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        objects: Mapping[TreePath, object] | None = None,
        item: str | None = None,
        mapping: AnyMapping | None = None,
        timeout: float = TIMEOUT,
    ) -> PendingSave:
        """Save as ``<directory>/<step>``, then remove superseded steps; all processes call this.

        ``metrics``: numbers by name, stored in the checkpoint's own directory; the first process's are used. Other
        arguments and errors: as ``save_checkpoint_async``, or ``save_checkpoint`` if not ``asynchronous``. Raises
        ``ValueError`` for a step below 0, for metrics that are not numbers, and after ``close``.
        """
        processes = Processes(plan.mesh, "save", timeout)
        # If one process refuses a step number, all processes raise: the others would wait for that process.
        with processes.step("prepare") as prepared:
            path = self.path_of(step)
            prepared.claim = f"the path {path}"
            extras = self.extras(step, metrics if processes.first else None)
        request = SaveRequest(path, plan, state, train, objects, item, mapping, timeout)
        return start_save(request, extras, asynchronous=self.asynchronous)

    def load(
        self,
        plan: ShardingPlan,
        optimizer: optax.GradientTransformation | None = None,
        *,
        step: int | None = None,
        **options: Any,
    ) -> LoadedCheckpoint:
        """Load the latest complete step, or ``step``; all processes call this.

        ``options``: of ``load_checkpoint``, with the same errors. Raises ``CheckpointError`` if no step is complete.
        """
        # All together: on a slow file system, a process that sees no step yet would leave the others waiting.
        with Processes(plan.mesh, "load", options.get("timeout", TIMEOUT)).step("prepare") as prepared:
            prepared.claim = f"the path {self.directory}"
            self.require_step()
        return load_checkpoint(self.directory, plan, optimizer, step=step, **options)
