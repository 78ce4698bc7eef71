"""Plans of one model under several policies, numbers of devices and workloads, and the cheapest of them.

The cheapest plan is the one that fits and whose devices send the fewest bytes in a step; among equals, the one with
the lowest peak. Plans for different numbers of devices or different workloads are not compared, because some do more
work than others. A policy fits a number of devices if it fits in every requested runtime. Its bytes and its peak are
the larger ones of the runtimes.

``docs/explanation/planning.md`` says when a policy fits, and which peaks are bounds. The reserve covers what a peak
leaves out. A plan with an incomplete peak is never the cheapest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from bridge.core.sharding import ShardingPolicy
from bridge.core.text import human_bytes
from bridge.core.views import Viewed
from bridge.planning.cost.cost import CostPlan, Workload, make_plan
from bridge.planning.cost.optimizers import ADAMW, Optimizer
from bridge.planning.models.errors import PlanError
from bridge.planning.models.model import Model

RESERVE = Fraction(1, 10)
"""The share of a device's memory that a plan leaves free by default."""
ANSWERS = {True: "yes", False: "no", None: "unknown"}


def fits_within(plan: CostPlan, usable: int) -> bool | None:
    """Whether a plan's peak is within ``usable`` bytes; None if its bounds do not decide."""
    if plan.least > usable:
        return False
    return True if plan.peak.complete and plan.peak.total <= usable else None


@dataclass(frozen=True)
class Choice:
    """The cheapest policy that fits on ``devices`` devices for ``workload``; None if no policy is known to fit.

    unknown: policies that may or may not fit.
    """

    devices: int
    workload: Workload
    policy: str | None
    unknown: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The answer in words, without the devices and the workload."""
        if self.policy is not None:
            return f"{self.policy} is the cheapest that fits"
        return self.doubt if self.unknown else "no policy fits"

    @property
    def doubt(self) -> str:
        return f"unknown whether {', '.join(self.unknown)} {'fits' if len(self.unknown) == 1 else 'fit'}"


@dataclass(frozen=True, repr=False)
class Comparison(Viewed):
    """``plans`` in the order of policies, devices, workloads, runtimes. ``memory``: bytes of one device, or None.

    ``reserve``: the share of ``memory`` that stays free, from 0 to below 1.
    ``refused``: the reasons why a policy is impossible on a number of devices.
    """

    plans: tuple[CostPlan, ...]
    memory: int | None = None
    refused: tuple[str, ...] = ()
    reserve: Fraction = RESERVE

    def summary(self) -> str:
        """The number of plans, and with ``memory`` the answer for each number of devices and workload."""
        names = ", ".join(dict.fromkeys(plan.model.name for plan in self.plans))
        answers = [f"{choice.devices} devices: {choice.answer}" for choice in self.choices]
        return "; ".join([f"{len(self.plans)} plans of {names}", *answers])

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each plan."""
        rows = [
            (
                "" if self.memory is None else ANSWERS[self.fits(plan)],
                *(plan.policy, plan.runtime, str(plan.mesh.devices), str(plan.workload), plan.peak_in_words),
                *(human_bytes(plan.least), human_bytes(plan.traffic.wire_bytes())),
            )
            for plan in self.plans
        ]
        return [("fits", "policy", "runtime", "devices", "workload", "peak", "at rest", "sent"), *rows]

    @property
    def usable(self) -> int | None:
        """Bytes of one device without the reserve, rounded down; None without ``memory``."""
        return None if self.memory is None else int(self.memory * (1 - self.reserve))

    def fits(self, plan: CostPlan) -> bool | None:
        """Whether a plan's peak is within ``usable``; None without ``memory``, or when the answer is unknown."""
        return None if self.usable is None else fits_within(plan, self.usable)

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """Each workload once, in the order of the plans."""
        return tuple(dict.fromkeys(plan.workload for plan in self.plans))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The cheapest policy for each number of devices and workload; empty without ``memory``."""
        if self.memory is None:
            return ()
        asked = dict.fromkeys((plan.mesh.devices, plan.workload) for plan in self.plans)
        return tuple(self._choice(devices, workload) for devices, workload in asked)

    def where(self, choice: Choice) -> str:
        """The devices of a choice, and its workload if there are several."""
        work = f", {choice.workload.of(self.plans[0].model)}" if len(self.workloads) > 1 else ""
        return f"{choice.devices} devices{work}"

    @property
    def in_runtimes(self) -> str:
        """Words after "no policy fits": a policy must fit in all planned runtimes."""
        names = sorted({plan.runtime for plan in self.plans})
        return f" in both runtimes; --runtime {' or '.join(names)} asks for one" if len(names) > 1 else ""

    @property
    def anything_fits(self) -> bool:
        """Whether any plan is known to fit; True without ``memory``."""
        return self.memory is None or any(choice.policy is not None for choice in self.choices)

    def _choice(self, devices: int, workload: Workload) -> Choice:
        by_policy: dict[str, list[CostPlan]] = {}
        for plan in self.plans:
            if (plan.mesh.devices, plan.workload) == (devices, workload):
                by_policy.setdefault(plan.policy, []).append(plan)
        answers = {policy: [self.fits(plan) for plan in plans] for policy, plans in by_policy.items()}
        costs = {
            policy: (max(p.traffic.wire_bytes() for p in plans), max(p.peak.total for p in plans))
            for policy, plans in by_policy.items()
            if all(answers[policy])
        }
        return Choice(
            devices,
            workload,
            min(costs, key=lambda policy: costs[policy]) if costs else None,
            tuple(policy for policy, fits in answers.items() if None in fits and False not in fits),
        )


def compare(
    models: Mapping[str, Model],
    policies: Sequence[ShardingPolicy],
    devices: Sequence[int],
    workloads: Workload | Sequence[Workload],
    memory: int | None = None,
    reserve: Fraction = RESERVE,
    optimizer: Optimizer = ADAMW,
) -> Comparison:
    """Plan every model (by runtime) under every policy on every number of devices, for every workload.

    A runtime that cannot run ``optimizer`` is left out, and listed in ``refused``.

    Raises ``PlanError`` if a policy does not fit the model or any of the numbers of devices, and if no runtime can run
    the optimizer.
    """
    reasons = {runtime: optimizer.why_not(runtime, model.stacks) for runtime, model in models.items()}
    models = {runtime: model for runtime, model in models.items() if reasons[runtime] is None}
    if not models:
        raise PlanError("; ".join(reason for reason in reasons.values() if reason))
    works = [workloads] if isinstance(workloads, Workload) else workloads
    plans: list[CostPlan] = []
    refused = [reason for reason in reasons.values() if reason]
    for policy in policies:
        possible = []
        for count in devices:
            try:
                policy.mesh_sizes(count)
                possible.append(count)
            except ValueError as error:
                refused.append(str(error))
        if not possible:
            raise PlanError(refused[-1])
        for count in possible:
            plans += [
                make_plan(model, policy, count, runtime, workload, optimizer=optimizer)
                for workload in works
                for runtime, model in models.items()
            ]
    return Comparison(tuple(plans), memory, tuple(refused), reserve)
