"""Let processes save or load one checkpoint together: a step that fails on one process fails on all.

::

    process 0     step | outcomes of all ->  verdict  | next step, or raise
    process 1     step | outcome ^           v        | next step, or raise

Outcomes travel through the key-value store of ``jax.distributed``: a device collective would wait forever for a process
that raised, and could be paired with a collective of a training step.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed
from jax.sharding import Mesh

from bridge.core.formats import CheckpointError

# Seconds to wait for other processes, by default.
TIMEOUT = 900.0
# The number of saves and loads that each set of processes has begun in a lane. All processes agree on the number, so it
# is part of the keys. Background work has a separate lane: within a lane, operations run one after another.
_BEGUN: defaultdict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
_SHOWN = 2000


class Step:
    """``shared``: a message of the first process to the others, set inside the step; all have it after the step.

    ``claim``: a value that all processes must set equally inside the step, such as a path, in words for an error.
    """

    def __init__(self) -> None:
        self.shared = self.claim = ""


class Processes:
    """The processes that hold the devices of a mesh; all of them save or load together.

    ``action``: "save" or "load". ``timeout``: seconds to wait for each other in each step. ``background``: whether
    steps may run in a thread; background operations run one after another, concurrently with foreground ones. Raises
    ``ValueError`` on a process without such devices.
    """

    def __init__(self, mesh: Mesh, action: str, timeout: float, *, background: bool = False) -> None:
        self.index = jax.process_index()
        self.members = tuple(sorted({device.process_index for device in mesh.devices.flat}))
        self._action = action
        self._timeout = timeout
        self._steps = 0
        if self.index not in self.members:
            raise ValueError(
                f"checkpoint: expected a call on a process that has devices of the mesh, one of {self.members}, got "
                f"process {self.index}"
            )
        self._lane = "background" if background else "foreground"
        self._number = _BEGUN[self._lane, self.members]
        _BEGUN[self._lane, self.members] += 1

    @property
    def first(self) -> bool:
        """Whether this process does the work that only one process does."""
        return self.index == self.members[0]

    @property
    def several(self) -> bool:
        return len(self.members) > 1

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """The work of this process; the context ends when all processes have finished theirs.

        Raises the error of this process, or ``CheckpointError`` that names processes that failed or did not answer.
        """
        step = Step()
        if not self.several:
            yield step
            return
        failure: BaseException | None = None
        try:
            yield step
        except BaseException as error:
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"[:_SHOWN]
        try:
            failed = self._exchange(f"{self._action}: {name}", text, step)
        except CheckpointError as lost:
            if failure is None:
                raise
            failed = [str(lost)]
        if failure is not None:
            raise failure
        if failed:
            raise CheckpointError(f"checkpoint: {self._action}: {name}: {'; '.join(failed)}")

    def _exchange(self, step_name: str, error: str | None, step: Step) -> list[str]:
        """The failures of all processes."""
        client: Any = distributed.global_state.client
        everything = f"twinshard/{self._lane}/{'-'.join(map(str, self.members))}"
        here = f"{everything}/{self._number}/{self._steps}"
        self._steps += 1
        mine = {"step": step_name, "error": error, "claim": step.claim}
        if not self.first:
            client.key_value_set(f"{here}/{self.index}", json.dumps(mine))
            # The first process waits for the slowest, and may have begun to wait late.
            heard = self._get(client, f"{here}/verdict", 2 * self._timeout + 10)
            if heard is None:
                raise CheckpointError(
                    f"checkpoint: {step_name}: expected word from process {self.members[0]} within "
                    f"{2 * self._timeout + 10:g} s, got none: the process has died, hangs, or does not save or load"
                )
            step.shared = heard["shared"]
            return list(heard["failed"])
        failed = [] if error is None else [f"process {self.index}: {error}"]
        lost, deadline = [], time.monotonic() + self._timeout
        for member in self.members[1:]:
            outcome = self._get(client, f"{here}/{member}", deadline - time.monotonic())
            if outcome is None:
                lost.append(member)
            elif outcome["step"] != step_name:
                failed.append(
                    f"process {member}: expected step {step_name!r} as on the others, got {outcome['step']!r}"
                )
            elif outcome["error"] is not None:
                failed.append(f"process {member}: {outcome['error']}")
            elif error is None and outcome["claim"] != step.claim:
                failed.append(
                    f"process {member}: expected {step.claim} as on process {self.index}, got {outcome['claim']}"
                )
        if lost:
            failed.append(
                f"expected word from all processes within {self._timeout:g} s, got none from {lost}: these "
                "processes have died, hang, or do not save or load"
            )
        client.key_value_set(f"{here}/verdict", json.dumps({"shared": step.shared, "failed": failed}))
        if not lost and self._number:
            # All processes have left the previous operation, else they would not have reached this point.
            client.key_value_delete(f"{everything}/{self._number - 1}/")
        return failed

    def _get(self, client: Any, key: str, seconds: float) -> Any:
        """A value from the store; None if it does not arrive in time, or if its process has died."""
        try:
            return json.loads(client.blocking_key_value_get(key, max(1, int(seconds * 1000))))
        except jax.errors.JaxRuntimeError:
            return None
