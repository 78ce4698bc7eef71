"""An estimate of the time of a step that was compiled for a target, from the compiled programs of a row.

A step runs its programs one after the other, so their times add up. Model operations are 6 per parameter and token
(arXiv 2001.08361). So MFU, the share of the peak that they reach, needs the number of tokens: the language models of
``jax_impl`` give it, other models need ``--tokens``. In a user's mixture of experts, all elements count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.compiling.machines.hardware import machine_named
from bridge.compiling.target_plan import TargetRow
from bridge.compiling.timing.program import Program, read_program
from bridge.compiling.timing.step_time import (
    Efficiency,
    StepTime,
    Throughput,
    step_time,
    throughput,
    timeline,
)
from bridge.compiling.timing.timeline import Span
from bridge.planning.models.errors import PlanError

Row = tuple[str, ...]
HEADINGS = (
    "policy", "target", "engine", "ms a step", "products", "memory", "exposed", "of transfers", "tokens/s",
    "MFU", "HFU",
)  # fmt: skip
LEFT = 3
"""The number of columns with words, which are aligned left."""
PRICE = "$/M tokens"


@dataclass(frozen=True)
class Roofline:
    """The assumptions of an estimate. ``price``: dollars per device-hour. ``tokens``: of one data rank and step.

    ``parameters``: elements of the model that a token uses: in a mixture only those of the token's experts. ``given``:
    the original dtype of most of them, in which a policy may leave them.
    """

    parameters: int
    tokens: int | None
    price: float | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)
    given: str = "float32"

    def estimate(self, row: TargetRow) -> Estimate:
        """Never raises because of a compiler's text: an estimate that cannot be made says why."""
        if row.found is None or row.exhausted:
            return Estimate(row, why="nothing was compiled")
        if row.unread:
            return Estimate(row, why=row.unread)
        machine = machine_named(row.task.target.name)
        try:
            parts = [step_time(program, machine, self.efficiency) for program in _programs(row)]
        except ValueError as error:
            return Estimate(row, why=str(error))
        whole = _sum(parts)
        # A program without operations takes no time and has no rate.
        if not self.tokens or not whole.total:
            return Estimate(row, whole)
        dtype = row.task.policy.precision.compute_dtype or self.given
        rate = throughput(
            whole,
            machine,
            tokens=self.tokens * row.task.policy.data_ranks(machine.devices),
            parameters=self.parameters,
            dtype={"bfloat16": "bf16", "float16": "bf16"}.get(dtype, "f32"),
            price=self.price,
        )
        return Estimate(row, whole, rate)

    def timeline(self, row: TargetRow) -> tuple[Span, ...]:
        """The spans of a step, its programs one after the other; none if ``estimate`` has no time."""
        if self.estimate(row).time is None:
            return ()
        machine, placed, end = machine_named(row.task.target.name), list[Span](), 0.0
        for program in _programs(row):
            spans = timeline(program, machine, self.efficiency)
            placed += [replace(span, start=span.start + end) for span in spans]
            end = max((span.end for span in placed), default=end)
        return tuple(placed)


def _programs(row: TargetRow) -> Iterator[Program]:
    """The programs of a step, in the order in which they run. Raises ``ValueError`` as ``read_program``."""
    for path in (row.found or {}).get("programs", {}).values():
        yield read_program(Path(path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Estimate:
    """``why``: the reason if there is no time. ``rate``: None if the number of tokens is unknown."""

    row: TargetRow
    time: StepTime | None = None
    rate: Throughput | None = None
    why: str | None = None

    def as_dict(self) -> dict[str, Any] | None:
        """As JSON values: seconds, flops of one device, and the rates of all devices."""
        if self.time is None:
            return {"unknown": self.why}
        return {
            **asdict(self.time),
            "flops": dict(self.time.flops),
            "total": self.time.total,
            "rate": None if self.rate is None else asdict(self.rate),
        }

    def cells(self, priced: bool) -> Row:
        task = self.row.task
        first = (task.policy.source, task.target.name, task.engine)
        if self.time is None:
            return (*first, "unknown", *("",) * (7 + priced))
        time = self.time
        parts = (time.total, time.products, time.memory, time.exposed, time.communication)
        hfu = f"{time.product_peak / time.total:.0%}" if time.total else ""
        if self.rate is None:
            return (*first, *map(_milliseconds, parts), "", "", hfu, *("",) * priced)
        rate = (f"{self.rate.tokens_per_second:,.0f}", f"{self.rate.mfu:.1%}", hfu)
        price = (f"{self.rate.dollars:.3g}",) if priced and self.rate.dollars is not None else ()
        return (*first, *map(_milliseconds, parts), *rate, *price)


def table(estimates: Sequence[Estimate], priced: bool) -> tuple[Row, list[Row]]:
    """Headings, and a row for each estimate."""
    return (*HEADINGS, *([PRICE] if priced else [])), [estimate.cells(priced) for estimate in estimates]


def notes(roofline: Roofline, estimates: Sequence[Estimate]) -> Iterator[str]:
    """The meaning and the assumptions of the estimates."""
    yield from (
        f"{estimate.row.task}: no time: {estimate.why}"
        for estimate in estimates
        if estimate.why and estimate.row.found is not None
    )
    for estimate in estimates:
        compute = estimate.row.task.policy.precision.compute_dtype or roofline.given
        wide = wide_share(estimate.time) if estimate.time and compute in ("bfloat16", "float16") else 0.0
        if wide > 0.5:
            yield (
                f"{estimate.row.task}: {wide:.0%} of the operations of products are in float32, though the "
                f"policy computes in {compute}: a layer of the model widens its input, as nnx.Embed without dtype= does"
            )
    used = roofline.efficiency
    yield (
        f"times are estimates from the compiled programs, not measurements: {used.products:.0%} of the peak of "
        f"products, {used.memory:.0%} of the memory's rate, {used.links:.0%} of the links' rate; only exposed "
        "transfers count"
    )


def wide_share(time: StepTime) -> float:
    """The share of products' operations with float32 factors."""
    total = sum(time.flops.values())
    wide = sum(count for dtype, count in time.flops.items() if dtype.startswith("f32"))
    return wide / total if total else 0.0


def parse_efficiency(text: str) -> Efficiency:
    """``"products=0.6,links=0.9"``; other parts keep their defaults. Raises ``PlanError`` otherwise."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            shares[name] = float(value)
        except ValueError:
            raise PlanError(
                f"--efficiency: expected products=0.75,memory=0.8,links=0.8, got {text!r}"
            ) from None
    try:
        return Efficiency(**shares)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"--efficiency: expected products, memory and links, each above 0 and up to 1: {error}"
        ) from None


def _sum(parts: Sequence[StepTime]) -> StepTime:
    flops = Counter[str]()
    for part in parts:
        flops.update(part.flops)
    kinds = ("products", "memory", "exposed", "communication", "product_peak")
    seconds = {kind: sum(getattr(part, kind) for part in parts) for kind in kinds}
    return StepTime(**seconds, flops=dict(flops))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
