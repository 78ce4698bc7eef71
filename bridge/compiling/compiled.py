"""Compares the plan of a language model with the program that XLA compiles for simulated devices.

XLA's figures come from its CPU compiler, which computes in float32 if the policy asks for bfloat16. For bfloat16 the
figures are therefore upper bounds, and only a float32 peak must agree. This compiler also runs no computation during a
transfer, so here both the plan and the program are without prefetch, whatever the policy says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.compiling.target_step import StepRequest
from bridge.core.dtype_names import BYTES
from bridge.core.sharding import ShardingPolicy
from bridge.core.text import human_bytes
from bridge.planning.cost.cost import CostPlan, Workload, make_plan
from bridge.planning.cost.optimizers import ADAMW, Optimizer
from bridge.planning.models.errors import PlanError
from bridge.planning.models.formulas import Attention
from bridge.planning.models.language_models import is_language_model
from bridge.planning.models.models import resolve_models

TOLERANCE = 0.10
"""Tolerance of the peak, relative to the compiled one: without prefetch, planned peaks were within 8 % of XLA's
(``docs/measured/memory.md``). Bytes and calls must be equal."""
LARGEST = 512
"""The most devices to simulate. XLA can compile for more, but needs a thread for each."""
# A process that hangs in the compiler would block the command forever.
_SECONDS = 900


@dataclass(frozen=True)
class Line:
    """One figure, planned and compiled. ``agrees``: None if the two need not agree."""

    what: str
    planned: int
    compiled: int
    agrees: bool | None


@dataclass(frozen=True)
class CompiledCheck:
    """The comparison for one policy on one number of devices."""

    policy: str
    devices: int
    workload: Workload
    lines: tuple[Line, ...]

    @property
    def agrees(self) -> bool:
        return all(line.agrees is not False for line in self.lines)

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Headings and rows."""
        verdicts = {True: "yes", False: "NO", None: ""}
        rows: list[tuple[str, ...]] = [
            (verdicts[line.agrees], line.what, f"{line.planned:,}", f"{line.compiled:,}")
            for line in self.lines
        ]
        return ("agrees", "JAX, compiled", "planned", "XLA"), rows

    def summary(self) -> str:
        """One sentence."""
        peak = next(line for line in self.lines if line.what == "peak")
        verdict = "the plan agrees with" if self.agrees else "the plan differs from"
        return (
            f"{self.policy} on {self.devices} devices, {self.workload}: {verdict} what XLA compiled; peak "
            f"{human_bytes(peak.planned)} planned, {human_bytes(peak.compiled)} compiled "
            f"({100 * (peak.planned / peak.compiled - 1):+.1f} %), both without prefetch"
        )


def check_compiled(
    model: str,
    policy: ShardingPolicy,
    devices: int,
    workload: Workload,
    stacked: Sequence[str] = (),
    optimizer: Optimizer = ADAMW,
    attention: Attention | None = None,
) -> CompiledCheck:
    """Compile and compare.

    Raises ``PlanError`` for users' models, for optimizer state in CPU memory, and if XLA fails.
    """
    if not is_language_model(model):
        raise PlanError(
            f"--compile: expected decoder:CONFIG, a config.json or a built-in shape, got {model!r}; compile your own "
            "model with --target"
        )
    if attention is Attention.fused:
        raise PlanError(
            "--compile: expected --attention plain or none, since jax_impl's models run plain attention"
        )
    if policy.model_axes:
        raise PlanError(
            f"--compile: expected a policy without model axes, since XLA chooses their transfers, got "
            f"{', '.join(policy.model_axes)} in {policy.source}; compile it with --target"
        )
    if devices > LARGEST:
        raise PlanError(f"--compile: expected at most {LARGEST} devices to simulate, got {devices}")
    if optimizer.offload:
        raise PlanError("--compile: expected no --offload: simulated devices have no separate memory")
    policy = replace(policy, prefetch=0)
    planned = resolve_models(model, ["jax"], stacked, attention)["jax"]
    plan = make_plan(planned, policy, devices, "jax", workload, optimizer=optimizer)
    request = {
        "step": StepRequest(model, workload, tuple(stacked), optimizer=optimizer).to_json(),
        "policy": policy.to_toml(),
        "source": policy.source,
        "devices": devices,
    }
    command = [sys.executable, "-m", "bridge.compiling.compiled_leg"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"--compile: expected XLA to finish within {_SECONDS} s, it did not") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PlanError(f"--compile: compiling failed: {reason[0]}")
    return CompiledCheck(policy.source, devices, workload, tuple(_lines(plan, json.loads(done.stdout))))


def _lines(plan: CostPlan, measured: dict[str, Any]) -> list[Line]:
    rest = plan.at_rest
    pairs = [
        ("main weights", rest.main_weights.allocated, measured["weights"]),
        # A plan does not count the optimizer's step counter.
        ("moments, step counter", rest.moments.allocated + measured["counters"], measured["moments"]),
    ]
    lines = [Line(what, planned, actual, planned == actual) for what, planned, actual in pairs]
    planned_calls: Counter[tuple[str, str, int]] = Counter()
    for call, times in plan.traffic.calls.items():
        planned_calls[call.kind, call.dtype, call.nbytes] += times
    planned_calls["all_reduce", "float32", 4] += plan.traffic.loss
    traced_calls = Counter({(kind, dtype, size): calls for kind, dtype, size, calls in measured["traced"]})
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        mine, its = (
            {key: calls for key, calls in calls_of.items() if key[0] == kind and calls}
            for calls_of in (planned_calls, traced_calls)
        )
        if mine or its:
            # All sizes and dtypes must agree, not only the sum.
            lines.append(Line(f"{kind} calls", sum(mine.values()), sum(its.values()), mine == its))
            planned, actual = (sum(key[2] * calls for key, calls in counts.items()) for counts in (mine, its))
            lines.append(Line(f"{kind} bytes", planned, actual, planned == actual))
        planned_sizes = Counter[int]()
        for (_, dtype, nbytes), calls in mine.items():
            planned_sizes[nbytes // BYTES[dtype]] += calls
        kept = Counter({size: calls for name, size, calls in measured["compiled"] if name == kind})
        what = f"{kind} calls that XLA kept"
        lines.append(Line(what, planned_sizes.total(), kept.total(), planned_sizes == kept))
    total = plan.peak.total
    wide = all(
        group.shape.dtypes.compute == group.shape.dtypes.main for unit in plan.units for group in unit.groups
    )
    within = abs(total / measured["peak"] - 1) <= TOLERANCE
    lines.append(Line("peak", total, measured["peak"], within if wide and plan.peak.complete else None))
    return lines
