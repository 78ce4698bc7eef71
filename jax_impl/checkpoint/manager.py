"""The checkpoints of one run: saved every so often, the best and the latest kept."""

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
    """Saves and loads the steps of one run, a directory each; ``StepManager`` has the arguments and other methods.

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
        """Save as ``<directory>/<step>``, then remove steps that are superseded; all processes call it.

        ``metrics``: numbers by name, stored in the checkpoint's own directory; of several processes the first one's.
        Other arguments and errors: as ``save_checkpoint_async``, or ``save_checkpoint`` if not ``asynchronous``.
        ``ValueError`` for a step below 0, metrics that are no numbers, and after ``close``.
        """
        processes = Processes(plan.mesh, "save", timeout)
        # A number that only one process refuses is an error on all: the others would wait for it.
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
        """Load the latest complete step, or ``step``; all processes call it.

        ``options``: of ``load_checkpoint``, whose errors are raised. ``CheckpointError`` where no step is complete.
        """
        # Together: a process that sees no step yet, on a slow file system, would leave the others waiting.
        with Processes(plan.mesh, "load", options.get("timeout", TIMEOUT)).step("prepare") as prepared:
            prepared.claim = f"the path {self.directory}"
            self.require_step()
        return load_checkpoint(self.directory, plan, optimizer, step=step, **options)
