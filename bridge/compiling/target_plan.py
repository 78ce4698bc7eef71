"""The answers of targets' compilers for a model under policies: memory, collectives, and the cheapest policy that fits.

One row is one policy on one target with one engine. The cheapest row of a target is the one that fits and whose sent
arrays in a step have the fewest bytes; an all-reduce sends its array twice.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.compiling.leg_process import Leg, LegError
from bridge.compiling.machines.compilers import why_not
from bridge.compiling.machines.targets import Target
from bridge.compiling.machines.tpu_lock import SECONDS, wait_for_lock
from bridge.compiling.target_step import StepRequest
from bridge.core.sharding import PolicyError, ShardingPolicy
from bridge.planning.models.errors import PlanError

RESERVE = 0.10
"""The default share of a device's memory for what no compiler counts: fragmentation, buffers of libraries."""
LEG = "bridge.compiling.target_leg"
GATHERS, REDUCTIONS = ("all_gather",), ("reduce_scatter", "psum")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One row to compile. ``recommended``: with the options of XLA's GPU scheduler that ``compilers.py`` lists."""

    policy: ShardingPolicy
    target: Target
    engine: str
    recommended: bool = False

    def __str__(self) -> str:
        return f"{self.policy.source} for {self.target.name}, {self.engine}"


@dataclass(frozen=True)
class TargetRow:
    """``memory``: bytes of a device that a step may not exceed, including the reserve. ``found``: the leg's answer.

    ``failed``: why there is no answer. ``reserve``: the share of the memory that a fitting step leaves free.
    """

    task: Task
    memory: int
    found: dict[str, Any] | None = None
    failed: str | None = None
    reserve: float = RESERVE

    @property
    def held(self) -> dict[str, int]:
        """Bytes on one device by kind: weights, moments, gradients, batch, variables."""
        return self.found["held"] if self.found else {}

    @property
    def host(self) -> int:
        """Bytes of a device's part of the state in the host's memory."""
        return int((self.found or {}).get("host", 0))

    @property
    def peak(self) -> int | None:
        """The most bytes alive on a device in the step; a lower bound if the compiler ran out of memory."""
        if not self.found:
            return None
        if self.exhausted:
            return int(self.found["exhausted"])
        return max(program["peak"] for program in self.found["memory"].values())

    @property
    def exhausted(self) -> bool:
        """Whether the compiler refused the program because it does not fit."""
        return bool(self.found and "exhausted" in self.found)

    @property
    def temporary(self) -> int | None:
        """Bytes that the program with the highest peak needs in addition to its arguments and results."""
        if not self.found or self.exhausted:
            return None
        return int(max(self.found["memory"].values(), key=lambda program: program["peak"])["temporary"])

    @property
    def fits(self) -> bool | None:
        """Whether the step fits with the reserve; None if the compiler gave no answer."""
        if self.peak is None:
            return None
        return not self.exhausted and self.peak <= self.memory * (1 - self.reserve)

    def collectives(self, kinds: Collection[str]) -> tuple[int, int, float]:
        """Number per step, bytes of their full arrays, and the share of bytes during a matrix product."""
        listed = (self.found or {}).get("collectives", [])
        known = [collective for collective in listed if collective["kind"] in kinds]
        times, nbytes = (sum(collective[key] for collective in known) for key in ("times", "bytes"))
        overlapped = sum(collective["bytes"] for collective in known if collective["overlaps"])
        return times, nbytes, overlapped / nbytes if nbytes else 0.0

    @property
    def unread(self) -> str | None:
        """Why the collectives of the programs are unknown."""
        return (self.found or {}).get("unread")

    @property
    def sent(self) -> int | None:
        """Bytes of the arrays of a step's collectives; an all-reduce counts twice. None if they are unknown."""
        listed = (self.found or {}).get("collectives")
        if listed is None:
            return None
        return sum(collective["bytes"] * (2 if collective["kind"] == "psum" else 1) for collective in listed)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        target = self.task.target
        return {
            "policy": self.task.policy.source,
            "target": target.name,
            "engine": self.task.engine,
            "xla": "recommended" if self.task.recommended else "default",
            "devices": target.devices,
            "mesh": self.task.policy.mesh_sizes(target.devices),
            "device_memory": self.memory,
            "reserve": self.reserve,
            "fits": self.fits,
            "peak": self.peak,
            "temporary": self.temporary,
            "failed": self.failed,
            **(self.found or {}),
        }


@dataclass(frozen=True)
class TargetPlan:
    """``rows`` in the order of policies, targets, engines. ``refused``: why a policy is impossible on a target."""

    rows: tuple[TargetRow, ...]
    refused: tuple[str, ...] = ()

    @property
    def reserve(self) -> float:
        """The reserve of all rows."""
        return self.rows[0].reserve

    @property
    def good(self) -> bool:
        """Whether something fits, and nothing failed."""
        return any(row.fits for row in self.rows) and not any(row.failed for row in self.rows)

    def cheapest(self) -> Iterator[tuple[Target, TargetRow | None]]:
        """The cheapest row that fits, for each target."""
        for target in dict.fromkeys(row.task.target for row in self.rows):
            fit = [row for row in self.rows if row.task.target == target and row.fits]
            # A row of unknown cost does not count as cheap.
            fit.sort(key=lambda row: (row.sent is None, row.sent or 0, row.peak or 0))
            yield target, next(iter(fit), None)

    def as_dict(self, times: Sequence[dict[str, Any] | None] = ()) -> dict[str, Any]:
        """As JSON values. ``times``: the estimate for each row."""
        cheapest = [
            {
                "target": target.name,
                "policy": row and row.task.policy.source,
                "engine": row and row.task.engine,
            }
            for target, row in self.cheapest()
        ]
        return {
            "rows": [
                {**row.as_dict(), "time": time} for row, time in itertools.zip_longest(self.rows, times)
            ],
            "cheapest": cheapest,
            "refused": list(self.refused),
        }


def tasks_of(
    policies: Sequence[ShardingPolicy],
    targets: Sequence[Target],
    engines: Sequence[str],
    recommended: bool = False,
) -> tuple[list[Task], list[str]]:
    """The tasks to compile, and the reasons why policies are left out on targets.

    Raises ``PlanError`` if no task is left, or a compiler is not installed.
    """
    for platform in dict.fromkeys(target.platform for target in targets):
        if reason := why_not(platform):
            raise PlanError(reason)
    tasks, refused = [], []
    for policy in policies:
        for target in targets:
            try:
                policy.mesh_sizes(target.devices)
            except PolicyError as error:
                refused.append(f"{target.name}: {error}")
                continue
            tasks += [Task(policy, target, engine, recommended) for engine in engines]
    if not tasks:
        raise PlanError(refused[-1])
    return tasks, refused


def plan_targets(
    step: StepRequest,
    policies: Sequence[ShardingPolicy],
    targets: Sequence[Target],
    engines: Sequence[str] = ("shard_map",),
    *,
    recommended: bool = False,
    memory: int | None = None,
    reserve: float = RESERVE,
    say: Say = print,
) -> TargetPlan:
    """Compile a step under every policy, for every target, with every engine.

    memory: bytes of a device, None: the target's. reserve: the share of it that a fitting step leaves free. say: gets
    messages for people who wait. Raises ``PlanError`` if nothing can be compiled.
    """
    tasks, refused = tasks_of(policies, targets, engines, recommended)
    rows = list(compile_tasks(step, tasks, (memory, reserve), lambda task: say(f"compiling {task}"), say))
    return in_order(rows, tasks, refused)


def in_order(rows: Sequence[TargetRow], tasks: Sequence[Task], refused: Sequence[str]) -> TargetPlan:
    """Rows in the order of the tasks, whatever the order of compilation."""
    places = {str(task): position for position, task in enumerate(tasks)}
    return TargetPlan(tuple(sorted(rows, key=lambda row: places[str(row.task)])), tuple(refused))


def compile_tasks(
    step: StepRequest,
    tasks: Sequence[Task],
    limit: tuple[int | None, float],
    begin: Callable[[Task], None],
    say: Say,
) -> Iterator[TargetRow]:
    """Rows in the order of ``tasks``, each as soon as it is compiled; one process per platform compiles at a time.

    limit: bytes of a device, None: the target's; and the share of them in reserve. begin: called before a task. say:
    gets messages for people.
    """
    # If several processes wait for the lock, the wait may happen more than once.
    say = functools.cache(say)
    for platform in dict.fromkeys(task.target.platform for task in tasks):
        with Leg(LEG, platform) as leg:
            for task in tasks:
                if task.target.platform == platform:
                    begin(task)
                    yield _compiled(leg, step, task, limit, say)


def _compiled(
    leg: Leg, step: StepRequest, task: Task, limit: tuple[int | None, float], say: Say
) -> TargetRow:
    memory, reserve = limit
    memory = task.target.memory if memory is None else memory
    request = {
        "step": step.to_json(),
        "policy": task.policy.to_toml(),
        "source": task.policy.source,
        "target": task.target.name,
        "engine": task.engine,
        "recommended": task.recommended,
    }
    try:
        return TargetRow(task, memory, _asked(leg, request, say), reserve=reserve)
    except LegError as error:
        return TargetRow(task, memory, failed=" ".join(str(error).split()), reserve=reserve)


def _asked(leg: Leg, request: dict[str, Any], say: Say) -> dict[str, Any]:
    """The answer, even if another process holds the lock of the compiler for a while."""
    end = time.monotonic() + SECONDS
    held = False
    while True:
        if leg.platform == "tpu" and not leg.running:
            wait_for_lock(say, max(0.0, end - time.monotonic()), held)
        try:
            return leg.ask(request)
        except LegError as error:
            # Another process may have taken the lock in the meantime.
            if "lockfile" not in str(error) or time.monotonic() >= end:
                raise
            held = True
            leg.restart()
