"""The largest batch, the fewest devices, and the fewest changes with which a model fits in a device's memory.

A search only plans: it compiles nothing. Each answer equals that of an exhaustive search, which the tests run::

    largest batch     1, 2, 3, ... sequences      narrowed by the slope of the peak, then by halving; the peak never
                                                  falls when the batch grows
    fewest devices    ``device_counts``           one after another: because of padding the peak is not monotone in them
    fewest changes    ``changes.variants``        fewer changes first; at the first number of changes with which
                                                  something fits, all are tried, and listed by bytes sent

Only bytes at rest give the answer no: a larger batch than the reported one may fit, and fewer devices may be enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bridge.core.long_calls import Follow, followed
from bridge.core.sharding import ShardingPolicy
from bridge.core.text import human_bytes
from bridge.core.views import Viewed
from bridge.planning.answers.changes import variants
from bridge.planning.answers.comparison import Comparison, fits_within
from bridge.planning.cost.cost import CostPlan, Workload
from bridge.planning.models.errors import PlanError
from bridge.planning.models.model import Model

NODE = 8
"""Devices of a node, by default."""
MOST_DEVICES = 16384
"""The largest number of devices to try. A plan for this many takes less than a gigabyte of memory."""
LARGEST_BATCH = 1 << 20
_SHOWN = 5
"""Rows shown for policies that fit."""
# Above this many nodes, eight numbers per doubling: each number needs its own plan, which takes time.
_IN_STEPS_OF_A_NODE = 16
# Turns in which the slope of the peak leads. The peak is nearly a line, so a few turns find the answer;
# a peak with a bend is left to halving, which always ends.
_BY_SLOPE = 5

Planner = Callable[[str, ShardingPolicy, int, Workload], CostPlan]
"""``(runtime, policy, devices, workload) -> plan``; raises ``PlanError`` if there is no plan."""


@dataclass(frozen=True)
class LargestBatch:
    """``batch``: sequences per device and microbatch that are known to fit, 0 if not even one fits; None if the answer
    is unknown.
    """

    runtime: str
    batch: int | None

    def __str__(self) -> str:
        if self.batch is None:
            return "unknown"
        return f"{self.batch} or more" if self.batch else "none"


@dataclass(frozen=True)
class FewestDevices:
    """``devices``: known to be enough; None if none of the tried numbers is.

    not_below: the fewest devices for which the answer is open; None if the answer is known.
    """

    runtime: str
    devices: int | None
    not_below: int | None = None

    def __str__(self) -> str:
        if self.devices is not None:
            return f"{self.devices}" + ("" if self.not_below is None else f", perhaps {self.not_below}")
        return f"> {MOST_DEVICES:,}" if self.not_below is None else f"unknown, >= {self.not_below}"


@dataclass(frozen=True)
class Way:
    """A policy that fits in every runtime. ``peak``, ``sent``: the largest of the runtimes'.

    all_counted: whether all traffic is known.
    """

    changes: tuple[str, ...]
    policy: ShardingPolicy
    peak: int
    sent: int
    batches: tuple[LargestBatch, ...]
    all_counted: bool = True


@dataclass(frozen=True)
class Nearest:
    """The changes with the lowest peak, if no changes are known to fit.

    ``bound``: "upper" for a peak, which a device may stay below; "lower" for bytes at rest, if the peak is incomplete.
    fewest: on how many devices the changed policy fits.
    """

    changes: tuple[str, ...]
    policy: ShardingPolicy
    peak: int
    bound: str
    fewest: tuple[FewestDevices, ...] = ()
    above: bool = True
    """Whether the peak is above the usable memory; for a lower bound this means that nothing fits."""

    def __str__(self) -> str:
        lowest = f"{human_bytes(self.peak)} with {', '.join(self.changes)}"
        if self.bound == "lower" and not self.above:
            return (
                f"unknown, because the peak is incomplete; the fewest bytes at rest are {lowest}: run a step "
                "and measure, or compile it with --target"
            )
        needed = ", ".join(f"{fewest.runtime} {fewest}" for fewest in self.fewest)
        fits = (
            "fits; the fewest bytes at rest are"
            if self.bound == "lower"
            else "is known to fit; the lowest peak is"
        )
        return f"no set of changes {fits} {lowest}; sufficient numbers of devices: {needed}"


@dataclass(frozen=True, repr=False)
class Finding(Viewed):
    """The findings for one policy on ``devices`` devices.

    work: the workload in the model's words.
    fits: whether the unchanged policy fits, in every runtime; None if unknown.
    ways: if it does not fit, the policies with the fewest changes that fit, the one with the fewest bytes sent first.
    """

    policy: ShardingPolicy
    devices: int
    workload: Workload
    work: str
    batches: tuple[LargestBatch, ...]
    fewest: tuple[FewestDevices, ...]
    fits: bool | None
    ways: tuple[Way, ...] = ()
    nearest: Nearest | None = None

    def summary(self) -> str:
        """One sentence: whether the policy fits, and if not, which changes make it fit."""
        where = f"{self.policy.source} on {self.devices} devices, {self.work}"
        if self.fits:
            return f"{where}: fits without changes"
        if self.ways:
            count = len(self.ways[0].changes)
            changes = "1 change" if count == 1 else f"{count} changes"
            fitting = "one policy does" if len(self.ways) == 1 else f"{len(self.ways)} policies do"
            shown = f", of which {_SHOWN} are shown" if len(self.ways) > _SHOWN else ""
            start = "does not fit" if self.fits is False else "is not known to fit"
            return f"{where}: {start}; with {changes} {fitting}{shown}, fewest bytes sent first"
        return f"{where}: {self.nearest or 'does not fit, and there is nothing to change'}"

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each of the first policies that fit."""
        rows = [
            (", ".join(way.changes), human_bytes(way.peak), human_bytes(way.sent), *map(str, way.batches))
            for way in self.ways[:_SHOWN]
        ]
        batches = (f"largest batch, {batch.runtime}" for batch in self.batches)
        return [("changes", "peak", "sent", *batches), *rows]


def search(
    comparison: Comparison,
    policies: Sequence[ShardingPolicy],
    planner: Planner,
    node: int | None = None,
    progress: Follow = None,
) -> tuple[Finding, ...]:
    """The findings for each policy, number of devices and workload of ``comparison``, in its order.

    node: the devices of a node, the step of the numbers of devices. progress: called with the name of each plan; by
    default tqdm shows it in a notebook and on a terminal, and False shows nothing.

    Raises ``PlanError`` for a comparison without memory.
    """
    usable = comparison.usable
    if usable is None:
        raise PlanError("--search: expected --memory SIZE, the memory of one device, got none")
    with followed("search", progress) as say:

        def planned(runtime: str, policy: ShardingPolicy, devices: int, work: Workload) -> CostPlan:
            if say is not None:
                say(f"{policy.source} on {devices} devices in {runtime}")
            return planner(runtime, policy, devices, work)

        named = {policy.source: policy for policy in policies}
        return tuple(_findings(comparison, named, planned, usable, node or NODE))


def _findings(
    comparison: Comparison, named: Mapping[str, ShardingPolicy], planner: Planner, usable: int, node: int
) -> Iterator[Finding]:
    models = {plan.runtime: plan.model for plan in comparison.plans}
    fewest: dict[tuple[str, Workload], tuple[FewestDevices, ...]] = {}
    grouped = itertools.groupby(
        comparison.plans, key=lambda plan: (plan.policy, plan.mesh.devices, plan.workload)
    )
    for (source, devices, work), group in grouped:
        plans, policy = list(group), named[source]
        if (source, work) not in fewest:
            fewest[source, work] = tuple(
                fewest_devices(planner, plan.runtime, policy, work, usable, node) for plan in plans
            )
        fits = _all(comparison.fits(plan) for plan in plans)
        said = work.of(plans[0].model)
        finding = Finding(policy, devices, work, said, _batches(plans, usable), fewest[source, work], fits)
        yield finding if fits else _with_ways(finding, models, planner, usable, node)


def largest_batch(plan: CostPlan, usable: int) -> LargestBatch:
    """For the plan's policy, devices, length and microbatches; at most ``LARGEST_BATCH``."""

    def peak(batch: int) -> int:
        return replace(plan, workload=replace(plan.workload, batch=batch)).peak.total

    smallest = replace(plan, workload=replace(plan.workload, batch=1))
    answer, first = fits_within(smallest, usable), smallest.peak.total
    if not answer:
        return LargestBatch(plan.runtime, None if answer is None else 0)
    low, high, batch = 1, LARGEST_BATCH + 1, 2
    for turn in itertools.count():
        if high - low == 1:
            break
        total = peak(batch)
        low, high = (batch, high) if total <= usable else (low, batch)
        # Nearly a line: its slope leads to the answer or to a neighbour. Halving finishes the search otherwise.
        slope = (total - first) / (batch - 1)
        ahead = int((usable - first) / slope) + 1 if slope and turn < _BY_SLOPE else (low + high) // 2
        batch = min(max(ahead, low + 1), high - 1)
    return LargestBatch(plan.runtime, low)


def fewest_devices(
    planner: Planner, runtime: str, policy: ShardingPolicy, work: Workload, usable: int, node: int
) -> FewestDevices:
    """The first of ``device_counts`` on which the policy fits."""
    open_from = None
    for devices in device_counts(policy, node):
        plan = planner(runtime, policy, devices, work)
        fits = fits_within(plan, usable)
        if fits:
            return FewestDevices(runtime, devices, open_from)
        if fits is None:
            open_from = open_from or devices
            if not plan.peak.complete:
                break
    return FewestDevices(runtime, None, open_from)


def device_counts(policy: ShardingPolicy, node: int) -> Iterator[int]:
    """Numbers of devices that a mesh may have: parts of a node, whole nodes, above 16 nodes eight per doubling.

    A mesh of fixed size has one number. An axis of fixed size divides all numbers.
    """
    sizes = [size for _, size in policy.axes if isinstance(size, int)]
    fixed = math.prod(sizes)
    if len(sizes) == len(policy.axes):
        yield fixed
        return
    whole = math.lcm(node, fixed)
    yield from (fixed << k for k in range(whole.bit_length()) if fixed << k < whole)
    nodes = 1
    while nodes * whole <= MOST_DEVICES:
        yield nodes * whole
        nodes += 1 if nodes < _IN_STEPS_OF_A_NODE else 1 << (nodes.bit_length() - 4)


def _with_ways(
    finding: Finding, models: Mapping[str, Model], planner: Planner, usable: int, node: int
) -> Finding:
    ways: list[Way] = []
    nearest: Nearest | None = None
    work = finding.workload
    for variant in variants(finding.policy, next(iter(models.values())), finding.devices):
        if ways and len(variant.changes) > len(ways[0].changes):
            break
        try:
            plans = [planner(runtime, variant.policy, finding.devices, work) for runtime in models]
        except PlanError:
            # For example, layers of a stack that would be cut differently.
            continue
        peak = max(plan.peak.total for plan in plans)
        least = max(plan.least for plan in plans)
        if _all(fits_within(plan, usable) for plan in plans):
            sent = max(plan.traffic.wire_bytes() for plan in plans)
            counted = all(plan.exchanges is not None for plan in plans)
            ways.append(Way(variant.changes, variant.policy, peak, sent, _batches(plans, usable), counted))
        bound = "upper" if all(plan.peak.complete for plan in plans) else "lower"
        lowest = least if bound == "lower" else peak
        if nearest is None or lowest < nearest.peak:
            nearest = Nearest(variant.changes, variant.policy, lowest, bound)
    if ways:
        return replace(finding, ways=tuple(sorted(ways, key=lambda way: (way.sent, way.peak))))
    if nearest is not None:
        fewest = tuple(
            fewest_devices(planner, runtime, nearest.policy, work, usable, node) for runtime in models
        )
        nearest = replace(nearest, fewest=fewest, above=nearest.peak > usable)
    return replace(finding, nearest=nearest)


def _batches(plans: Sequence[CostPlan], usable: int) -> tuple[LargestBatch, ...]:
    return tuple(largest_batch(plan, usable) for plan in plans)


def _all(answers: Iterator[bool | None]) -> bool | None:
    known = list(answers)
    return False if False in known else None if None in known else True
