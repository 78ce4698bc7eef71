"""The checkpoints of one run: saved at intervals; the best and the latest are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from bridge.core.formats.saving.manager import StepManager
from bridge.core.formats.saving.pending import PendingSave
from bridge.core.mapping.plan.running import AnyMapping
from torch_impl.checkpoint.checkpoint import load_checkpoint, start_save, together
from torch_impl.comm.agreement import agree, rank


class CheckpointManager(StepManager):
    """Saves and loads the steps of one run, one directory each; ``StepManager`` has the arguments and other methods.

    Example::

        with CheckpointManager("runs", max_to_keep=3, best_metric="loss") as manager:
            if manager.latest_step() is not None:
                first = manager.load(model, optimizer)["step"]
            for index in range(first, last):
                loss = train_step(model, optimizer, index)
                if index % 100 == 0:
                    manager.save(index, model, optimizer, {"step": index + 1}, metrics={"loss": loss})
    """

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        train: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        mapping: AnyMapping | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> PendingSave:
        """Save as ``<directory>/<step>``, then remove superseded steps; all ranks of the group call it.

        ``metrics``: numbers by name, stored in the checkpoint's own directory; the first rank's metrics are stored.
        Other arguments and errors: as ``save_checkpoint_async``, or ``save_checkpoint`` if not ``asynchronous``.
        ``ValueError`` for a step below 0, metrics that are not numbers, and calls after ``close``.
        """
        group = together(model, process_group)
        # Together: a rank that raised alone would leave the others waiting.
        (path, extras), _ = agree(
            lambda: (self.path_of(step), self.extras(step, metrics if rank(group) == 0 else None)),
            group=group,
            claim={"the call": "a save", "the path": f"{self.directory}/{step}"},
        )
        return start_save(
            path,
            model,
            optimizer,
            train,
            mapping=mapping,
            process_group=process_group,
            extras=extras,
            asynchronous=self.asynchronous,
        )

    def load(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, step: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Load the latest complete step, or ``step``, in place; all ranks of the group call it.

        Returns the train state.

        ``options``: of ``load_checkpoint``, which may raise its errors. ``CheckpointError`` if no step is complete.
        """
        # Together: on a slow file system, ranks that see no step yet would leave the others waiting.
        agree(
            self.require_step,
            group=together(model, options.get("process_group")),
            claim={"the call": "a load", "the path": str(self.directory)},
        )
        return load_checkpoint(self.directory, model, optimizer, step=step, **options)
