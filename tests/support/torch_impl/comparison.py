"""Facts that a program notes under each engine, and what is said of the two."""

from __future__ import annotations

import math
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from tests.support.ranks import RankError, RankGroup
from tests.support.torch_impl.engines import ENGINES, Engine

WIDTH = 118
SAME, BY_DESIGN, FAILED, NOT_SHOWN = "SAME", "OURS DIFFERS BY DESIGN", "FAILED", "NOT SHOWN"


@dataclass(frozen=True)
class Raised:
    """In place of a value: the error's kind and the first line of its text."""

    text: str

    def __str__(self) -> str:
        return self.text


class Facts:
    """What one engine's run of a program notes, in order."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __call__(self, name: str, value: Any) -> Any:
        """Note a value, or what calling ``value`` returns or raises; returns the value, or None after an error."""
        if callable(value):
            try:
                value = value()
            except Exception as error:
                return self.raised(name, error)
        assert name not in self.found, name
        self.found[name] = _plain(value)
        return value

    def raised(self, name: str, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [""]
        self.found[name] = Raised(f"{type(error).__name__}: {lines[0]}")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().flatten().tolist() if value.ndim else value.item()
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


@dataclass(frozen=True)
class Design:
    """Why a fact differs, and what ours must look like all the same: a pattern of its text."""

    why: str
    ours: str


@dataclass(frozen=True)
class Item:
    """``number`` is that of the list of what programs need. ``program`` is called on each rank with each engine.

    ``torch``: the lowest version with which it can be run.
    """

    number: int
    title: str
    program: Callable[[Engine, Facts], None]
    by_design: Mapping[str, Design] = field(default_factory=dict)
    world: int = 2
    torch: str = "2.11"


@dataclass(frozen=True)
class Line:
    name: str
    stock: Any
    ours: Any
    status: str
    why: str = ""


@dataclass(frozen=True)
class Shown:
    item: Item
    lines: Sequence[Line]

    @property
    def status(self) -> str:
        found = {line.status for line in self.lines} or {NOT_SHOWN}
        return next(one for one in (FAILED, BY_DESIGN, SAME, NOT_SHOWN) if one in found)

    def __str__(self) -> str:
        head = f"{self.item.number:>2}  {self.item.title}"
        done = " ".join((self.item.program.__doc__ or "").split())
        rows = [f"{head:<{WIDTH - len(self.status) - 1}} {self.status}", *textwrap.wrap(done, WIDTH - 4)]
        for line in self.lines:
            rows += _rows(line)
        if not self.lines:
            rows.append(f"needs torch {self.item.torch}, this is {torch.__version__}")
        return "\n".join([rows[0], *(f"    {row}" for row in rows[1:])])


def show(ranks: RankGroup, item: Item) -> Shown:
    """Run the item's program with both engines; a line that failed if the ranks do not come to an end."""
    if TorchVersion(torch.__version__) < item.torch:
        return Shown(item, [])
    try:
        of_ranks = ranks.run(item.world, _on_both, item.program)
    except RankError as error:
        # Ranks that wait for one that raised, or that died, are a verdict too; other items go on.
        last = str(error).strip().splitlines()[-1]
        return Shown(item, [Line("the ranks", "not reached", Raised(last), FAILED)])
    return Shown(item, compared(item, of_ranks))


def _on_both(program: Callable[[Engine, Facts], None]) -> list[dict[str, Any]]:
    found = []
    for engine in ENGINES:
        facts = Facts()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                program(engine, facts)
            except Exception as error:
                facts.raised("the program", error)
        found.append(facts.found)
        dist.barrier()
    return found


def compared(item: Item, of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[Line]:
    """A line for each fact: the first rank's, or that of the first rank on which it failed."""
    lines: list[Line] = []
    for name in dict.fromkeys(name for pair in of_ranks for found in pair for name in found):
        of_fact = [
            _line(item, name, *(found.get(name, Raised("not reached")) for found in pair))
            for pair in of_ranks
        ]
        lines.append(next((line for line in of_fact if line.status == FAILED), of_fact[0]))
    return lines


def _line(item: Item, name: str, stock: Any, ours: Any) -> Line:
    if not isinstance(ours, Raised) and alike(stock, ours):
        return Line(name, stock, ours, SAME)
    design = item.by_design.get(name)
    if design is not None and re.search(design.ours, said(ours)):
        return Line(name, stock, ours, BY_DESIGN, design.why)
    return Line(name, stock, ours, FAILED, "" if design is None else f"expected of ours: {design.ours}")


def alike(stock: Any, ours: Any) -> bool:
    """Equal, but floats up to rounding."""
    if isinstance(stock, list) and isinstance(ours, list):
        return len(stock) == len(ours) and all(map(alike, stock, ours))
    if isinstance(stock, float) and isinstance(ours, float):
        return math.isclose(stock, ours, rel_tol=1e-5, abs_tol=1e-6)
    return type(stock) is type(ours) and bool(stock == ours)


def said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(said, value))
    return str(value)


def _rows(line: Line) -> list[str]:
    mark = {SAME: "=", BY_DESIGN: "~", FAILED: "!"}[line.status]
    stock, ours = said(line.stock), said(line.ours)
    row = f"{mark} {line.name:<56}  stock  {stock:<20}  ours  {ours}"
    if len(row) <= WIDTH - 4:
        rows = [row]
    else:
        rows = [f"{mark} {line.name}"]
        for who, text in (("stock", stock), ("ours ", ours)):
            rows += textwrap.wrap(
                f"{who}  {text}", WIDTH - 8, initial_indent="    ", subsequent_indent=" " * 11
            )
    if line.why:
        rows += textwrap.wrap(line.why, WIDTH - 10, initial_indent="    (", subsequent_indent="     ")
        rows[-1] += ")"
    return rows
