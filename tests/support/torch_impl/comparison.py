"""A table of programs. Each program runs with torch's FSDP2 and with this package, and the facts are compared.

A program is a function of an ``Engine``. The program checks what it can against one process with the data of all ranks.
It returns facts, such as losses, dtypes, counts of collectives or an error's first line, by name or as one value.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from tests.support.ranks import RankError, RankGroup
from tests.support.torch_impl.engines import ENGINES

WIDTH = 118
SAME, BY_DESIGN, FAILED, NOT_SHOWN = "SAME", "OURS DIFFERS BY DESIGN", "FAILED", "NOT SHOWN"
RETURNED = "returned"


@dataclass(frozen=True)
class Raised:
    """Stands for the value of a call that raised: type of the error and first line of its text."""

    text: str

    def __str__(self) -> str:
        return self.text


class Facts(dict[str, Any]):
    """What a program notes, in order."""

    def __call__(self, name: str, value: Any) -> Any:
        """Note a value, or what calling ``value`` returns or raises; returns the value, or None after an error."""
        if callable(value):
            try:
                value = value()
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                self[name] = Raised(f"{type(error).__name__}: {lines[0]}")
                return None
        assert name not in self, name
        self[name] = value
        return value


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().flatten().tolist() if value.ndim else value.item()
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {name: _plain(element) for name, element in value.items()}
    return value


@dataclass(frozen=True)
class Design:
    """Why a fact differs, and the patterns that our fact and FSDP2's fact must still match."""

    why: str
    ours: str
    stock: str = ""


@dataclass(frozen=True)
class Program:
    """A row of the table: ``run(engine, *args)`` on ``world`` ranks.

    by_design: the facts that differ.
    within: relative tolerances of facts whose floats must agree better than up to rounding, or may agree worse.
    torch, below: the lowest version of torch with whose FSDP2 it can be run, and the lowest with which it cannot.
    item: its number in the list of what programs need, with a ``title`` there.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...] = ()
    world: int = 2
    slow: bool = False
    by_design: Mapping[str, Design] = field(default_factory=dict)
    within: Mapping[str, float] = field(default_factory=dict)
    torch: str = "2.11"
    below: str = "3"
    item: int | None = None
    title: str = ""

    @property
    def aspect(self) -> str:
        return self.run.__module__.rpartition(".")[2]

    @property
    def name(self) -> str:
        return "-".join([self.aspect, self.run.__name__, *map(str, self.args), str(self.world)])


@dataclass(frozen=True)
class Line:
    name: str
    stock: Any
    ours: Any
    status: str
    why: str = ""


@dataclass(frozen=True)
class Shown:
    program: Program
    lines: Sequence[Line]

    @property
    def status(self) -> str:
        statuses = {line.status for line in self.lines} or {NOT_SHOWN}
        return next(status for status in (FAILED, BY_DESIGN, SAME, NOT_SHOWN) if status in statuses)

    def __str__(self) -> str:
        program = self.program
        head = program.name if program.item is None else f"{program.item:>2}  {program.title}"
        done = " ".join((program.run.__doc__ or "").split())
        rows = [f"{head:<{WIDTH - len(self.status) - 1}} {self.status}", *textwrap.wrap(done, WIDTH - 4)]
        for line in self.lines:
            rows += _rows(line)
        if not self.lines:
            rows.append(
                f"needs torch from {program.torch} to below {program.below}, this is {torch.__version__}"
            )
        return "\n".join([rows[0], *(f"    {row}" for row in rows[1:])])


def show(ranks: RankGroup, program: Program) -> Shown:
    """Run the program with both engines; a line that failed if the ranks do not come to an end."""
    if not program.torch <= TorchVersion(torch.__version__) < program.below:
        return Shown(program, [])
    try:
        of_ranks = ranks.run(program.world, _on_both, program.run, program.args)
    except RankError as error:
        # If a rank raised or died, the other ranks wait. This is a verdict, too, and other programs continue.
        return Shown(program, [Line("the ranks", "not reached", Raised(str(error)), FAILED)])
    return Shown(program, compared(program, of_ranks))


def _on_both(run: Callable[..., Any], args: tuple[Any, ...]) -> list[dict[str, Any]]:
    of_engines = []
    for engine in ENGINES:
        torch.manual_seed(0)
        try:
            facts = run(engine, *args)
        except BaseException as error:
            error.add_note(f"by {engine.package.__name__}")
            raise
        of_engines.append(_plain(facts if isinstance(facts, dict) else {RETURNED: facts}))
        # The ranks wait for each other before the other engine runs. gloo's barrier would also wait for earlier
        # collectives that are still listed as running, and raise the error of a collective that a program saw fail.
        dist.all_reduce(torch.zeros(1))
    return of_engines


def compared(program: Program, of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[Line]:
    """A line for each fact: the first rank's, or that of the first rank on which it failed."""
    lines: list[Line] = []
    for name in dict.fromkeys(name for pair in of_ranks for facts in pair for name in facts):
        of_fact = [
            _line(program, name, *(facts.get(name, Raised("not reached")) for facts in pair))
            for pair in of_ranks
        ]
        lines.append(next((line for line in of_fact if line.status == FAILED), of_fact[0]))
    return lines


def _line(program: Program, name: str, stock: Any, ours: Any) -> Line:
    if not isinstance(ours, Raised) and alike(stock, ours, program.within.get(name)):
        return Line(name, stock, ours, SAME)
    design = program.by_design.get(name)
    if design is None:
        return Line(name, stock, ours, FAILED)
    if re.search(design.ours, said(ours)) and re.search(design.stock, said(stock)):
        return Line(name, stock, ours, BY_DESIGN, design.why)
    return Line(name, stock, ours, FAILED, f"expected of ours: {design.ours}, of stock: {design.stock}")


def alike(stock: Any, ours: Any, within: float | None = None) -> bool:
    """Whether two facts are equal, with floats up to rounding or to the relative tolerance."""
    if type(stock) is not type(ours):
        return False
    if isinstance(stock, dict):
        return list(stock) == list(ours) and all(alike(stock[name], ours[name], within) for name in stock)
    if isinstance(stock, list):
        return len(stock) == len(ours) and all(alike(*pair, within) for pair in zip(stock, ours, strict=True))
    if isinstance(stock, float):
        rounding = {"rel_tol": 1e-5, "abs_tol": 1e-6} if within is None else {"rel_tol": within}
        return math.isclose(stock, ours, **rounding)
    return bool(stock == ours)


def said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(said, value))
    return str(value)


def _rows(line: Line) -> Iterator[str]:
    mark = {SAME: "=", BY_DESIGN: "~", FAILED: "!"}[line.status]
    stock, ours = said(line.stock), said(line.ours)
    row = f"{mark} {line.name:<56}  stock  {stock:<20}  ours  {ours}"
    if "\n" in ours:
        yield from (f"{mark} {line.name}", *ours.splitlines())
    elif len(row) <= WIDTH - 4:
        yield row
    else:
        yield f"{mark} {line.name}"
        for who, text in (("stock", stock), ("ours ", ours)):
            yield from textwrap.wrap(
                f"{who}  {text}", WIDTH - 8, initial_indent="    ", subsequent_indent=" " * 11
            )
    if line.why:
        yield from textwrap.wrap(
            f"({line.why})", WIDTH - 10, initial_indent="    ", subsequent_indent="     "
        )
