"""The time of a compiled step: a roofline, evaluated in the order in which the program issues its operations.

::

    program = read_program(compiled.as_text())
    machine = Machine(HARDWARE["h100"], (64,))
    time = step_time(program, machine)
    print(time.total, time.exposed, throughput(time, machine, tokens=64 * 4096, parameters=8e9).mfu)

Every operation takes as long as its products at their peak, or as its memory traffic, whichever is longer. A transfer
runs during the operations between its start and its done; the device waits for the rest, which is exposed. Transfers
share the links: one runs after the other. The result is an estimate, not a measurement: latencies, the host, and slower
products during transfers are ignored, and ``Efficiency`` covers everything that keeps a device below its peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.compiling.machines.hardware import Machine, seconds_on_links
from bridge.compiling.timing.program import Done, Loop, Program, Start, Step, Work
from bridge.compiling.timing.timeline import DEVICE, LINKS, Recorder, Span
from bridge.core.hlo.collectives import COPY, Transfer


@dataclass(frozen=True)
class Efficiency:
    """The fractions of the peaks that are reached.

    ``products``: large bfloat16 products of cuBLAS reach 0.7 to 0.8 of an H100's peak, at which the card lowers its
    clock; TPUs reach more. ``memory``: copies reach 0.8 to 0.9 of HBM's nominal rate, and fusions with
    reductions are slower. ``links``: large collectives of NCCL reach about 0.8 of NVLink's nominal rate.
    """

    products: float = 0.75
    memory: float = 0.8
    links: float = 0.8

    def __post_init__(self) -> None:
        for name in ("products", "memory", "links"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"efficiency of {name}: expected above 0 and up to 1, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, which add up to ``total``.

    ``products``: operations whose matrix products take longest. ``memory``: operations whose memory traffic does.
    ``exposed``: waiting for transfers. ``communication``: all transfers between devices, exposed or not; not a part of
    the total. ``flops``: of matrix products on one device, by class; ``product_peak``: seconds of these at their peaks.
    """

    products: float
    memory: float
    exposed: float
    communication: float
    flops: Mapping[str, int] = field(default_factory=dict)
    product_peak: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.memory + self.exposed


@dataclass(frozen=True)
class Throughput:
    """``mfu``: the model's operations, 6 per parameter and token, as a fraction of all devices' peak. ``hfu``: the
    program's own operations, each class at its own peak, so including recomputation and attention. ``dollars``: per
    million tokens; None without a price."""

    tokens_per_second: float
    mfu: float
    hfu: float
    dollars: float | None


def step_time(program: Program, machine: Machine, efficiency: Efficiency | None = None) -> StepTime:
    """Raises ``ValueError`` for a dtype without a peak, and for a program for more devices than the machine has."""
    clock = _Clock(machine, efficiency or Efficiency())
    clock.run(program.steps)
    clock.finish()
    peak = sum(count / machine.hardware.peak(dtype) for dtype, count in program.flops.items())
    return StepTime(**clock.spent, flops=dict(program.flops), product_peak=peak)


def timeline(program: Program, machine: Machine, efficiency: Efficiency | None = None) -> tuple[Span, ...]:
    """The walk of ``step_time`` as spans from 0 on; copies inside a device are left out. Raises as ``step_time``."""
    recorder = Recorder()
    clock = _Clock(machine, efficiency or Efficiency(), recorder)
    clock.run(program.steps)
    clock.finish()
    return recorder.spans


def throughput(
    time: StepTime,
    machine: Machine,
    *,
    tokens: float,
    parameters: float,
    dtype: str = "bf16",
    price: float | None = None,
) -> Throughput:
    """``tokens``: per step on all devices. ``dtype``: its peak is the base of ``mfu``. ``price``: per device-hour."""
    rate = tokens / time.total
    peak = machine.devices * machine.hardware.peak(dtype)
    dollars = None if price is None else price * machine.devices / 3600 / rate * 1e6
    return Throughput(rate, 6 * parameters * rate / peak, time.product_peak / time.total, dollars)


class _Clock:
    def __init__(self, machine: Machine, efficiency: Efficiency, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self._machine = machine
        self._efficiency = efficiency
        self._peaks = machine.hardware
        self.now = 0.0
        self.spent = dict.fromkeys(("products", "memory", "exposed", "communication"), 0.0)
        # The times at which the links, and the copies inside the device, are free again.
        self._free = {False: 0.0, True: 0.0}
        self._due: dict[str, tuple[float, bool]] = {}

    def run(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Work):
                self._work(step)
            elif isinstance(step, Start):
                self._start(step)
            elif isinstance(step, Done):
                self._wait(step.key)
            else:
                self._loop(step)

    def finish(self) -> None:
        for key in list(self._due):
            self._wait(key)

    def _work(self, work: Work) -> None:
        products = sum(count / self._peaks.peak(dtype) for dtype, count in work.flops.items())
        products /= self._efficiency.products
        memory = work.bytes / self._peaks.bandwidth / self._efficiency.memory
        self._pass(max(products, memory), "products" if products >= memory else "memory")

    def _start(self, start: Start) -> None:
        copy = start.transfer.kind == COPY
        seconds = self._seconds(start.transfer)
        begin = max(self.now, self._free[copy])
        self._free[copy] = begin + seconds
        self._due[start.key] = begin + seconds, copy
        if not copy:
            self.spent["communication"] += seconds
            self._record(LINKS, start.transfer.kind, begin, seconds)

    def _seconds(self, transfer: Transfer) -> float:
        if transfer.kind == COPY:
            return transfer.bytes / self._peaks.bandwidth / self._efficiency.memory
        return seconds_on_links(transfer, self._machine) / self._efficiency.links

    def _wait(self, key: str) -> None:
        # In the first iteration of a loop, a done may come before its start.
        if key in self._due:
            over, copy = self._due.pop(key)
            self._pass(max(0.0, over - self.now), "memory" if copy else "exposed")

    def _pass(self, seconds: float, part: str) -> None:
        self._record(DEVICE, "waiting" if part == "exposed" else part, self.now, seconds)
        self.now += seconds
        self.spent[part] += seconds

    def _loop(self, loop: Loop) -> None:
        """Run iterations until one ends like the one before; all further iterations are then the same."""
        ahead = self._ahead()
        for turn in range(1, loop.times + 1):
            began, spent = self.now, dict(self.spent)
            recorded = self.recorder.begin_turn() if self.recorder else 0
            self.run(loop.steps)
            before, ahead = ahead, self._ahead()
            if before.keys() == ahead.keys() and all(abs(before[key] - ahead[key]) < 1e-12 for key in ahead):
                left = loop.times - turn
                shift = left * (self.now - began)
                if self.recorder:
                    self.recorder.repeat(recorded, left, self.now - began)
                self.now += shift
                self._free = {copy: free + shift for copy, free in self._free.items()}
                self._due = {key: (over + shift, copy) for key, (over, copy) in self._due.items()}
                for part, seconds in self.spent.items():
                    self.spent[part] += left * (seconds - spent[part])
                return

    def _record(self, lane: str, kind: str, start: float, seconds: float) -> None:
        if self.recorder:
            self.recorder.add(Span(lane, kind, start, seconds))

    def _ahead(self) -> dict[str, float]:
        """How long, from now, links and transfers stay busy."""
        busy = {f"copies {copy}": max(0.0, free - self.now) for copy, free in self._free.items()}
        return busy | {key: max(0.0, over - self.now) for key, (over, _) in self._due.items()}
