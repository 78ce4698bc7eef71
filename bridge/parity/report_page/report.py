"""The result of a comparison: rows by stage, the first difference, what was not compared; as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.core.text import first_lines, first_of, plain_json
from bridge.core.views import Viewed
from bridge.parity.partners.rows import BUFFER, STAGES, Row, Stage
from bridge.parity.recorded.align import DOUBTS
from bridge.parity.recorded.distance import FACTOR
from bridge.parity.report_page.depth import shown

VERSION = 1
"""Version of the report's JSON; see `JSON_VERSION` of the commands."""
_SHOWN = 8


@dataclass(frozen=True)
class Revealed:
    """A fault that the self-test planted in the torch side, and whether this batch showed it."""

    fault: str
    module: str
    shown: bool
    ratio: float


@dataclass(frozen=True, repr=False)
class ParityReport(Viewed):
    """The result of ``parity``.

    ``rows``: by stage, in the order in which the models compute. ``torch_only``, ``jax_only``: modules that were called
    and have no partner; ``torch_parameters``, ``jax_parameters``: parameters without a partner; ``torch_buffers``,
    ``jax_buffers``: buffers without a partner, and ``changed_buffers``: buffers of both that the forward changes;
    ``dropped_buffers``: buffers that the mapping drops; ``left_out``: state that cannot be compared, one phrase each.

    ``dtype``: the compute dtype under test. ``losses``: torch's and JAX's, float64 then compute dtype. ``revealed``:
    results of the self-test. ``order``: why the run with reordered rows says nothing about rounding, "" if it does.
    ``notes``: facts about all rows, such as samples.
    """

    rows: tuple[Row, ...]
    dtype: str
    losses: tuple[float | None, float | None, float | None, float | None]
    torch_only: tuple[str, ...] = ()
    jax_only: tuple[str, ...] = ()
    torch_parameters: tuple[str, ...] = ()
    jax_parameters: tuple[str, ...] = ()
    revealed: tuple[Revealed, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    order: str = ""
    notes: tuple[str, ...] = ()
    torch_buffers: tuple[str, ...] = ()
    jax_buffers: tuple[str, ...] = ()
    changed_buffers: tuple[str, ...] = ()
    dropped_buffers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether no row is beyond rounding. The report's truth value is the same."""
        return not any(row.counts for row in self.rows)

    def __bool__(self) -> bool:
        return self.same

    @property
    def not_compared(self) -> tuple[str, ...]:
        """Things that should have been compared and were not, one phrase each: see ``--strict``. Modules without
        parameters, and buffers that the forward does not change, may lack a partner: their values show in outputs."""
        unknown = sorted({row.name or "(model)" for row in self.rows if row.verdict == "unknown"})
        possible = (
            (self.torch_parameters, f"{len(self.torch_parameters)} torch parameters without a partner"),
            (self.jax_parameters, f"{len(self.jax_parameters)} JAX parameters without a partner"),
            (self.changed_buffers, f"buffers that the forward changes: {first_of(self.changed_buffers)}"),
            (unknown, f"the outputs of {first_of(unknown)}"),
            (not self.stage("forward"), "modules, because no two are partners"),
            (not self.stage("loss"), "losses"),
            (not self.stage("gradients"), "gradients"),
        )
        return tuple(text for applies, text in possible if applies)

    @property
    def complete(self) -> bool:
        """Whether everything was compared that should have been."""
        return not self.not_compared

    def conclusion(self) -> str:
        """One sentence that says what was not compared; empty if everything was compared."""
        found = self.not_compared
        return f"not compared ({len(found)}): {'; '.join(found)}" if found else ""

    def stage(self, name: Stage) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.stage == name)

    @property
    def introduced(self) -> tuple[Row, ...]:
        """The places where a difference begins: weights that differ, then modules, in the order of computation."""
        weights = [row for row in self.stage("weights") if row.counts]
        return (*weights, *(row for row in self.rows if row.verdict == "introduced"))

    @property
    def first_divergence(self) -> Row | None:
        """The first place where the two models diverge; None if they are the same."""
        if self.introduced:
            return self.introduced[0]
        return next((row for row in self.rows if row.counts), None)

    def summary(self) -> str:
        """One or two sentences for a person."""
        first = self.first_divergence
        compared = ", ".join(f"{len(self.stage(stage))} {stage}" for stage in STAGES if self.stage(stage))
        if first is None:
            worst = max((row.ratio for row in self.rows), default=0.0)
            return (
                f"The two models are the same: {compared} compared, no difference above {FACTOR:g} times what "
                f"rounding to {self.dtype} explains (the largest is {worst:.2g} times).{self._state_left_out()}"
            )
        where = shown(first.name) or "(model)"
        of = "buffers" if first.kind == BUFFER else "weights"
        words = {
            "weights": f"The {of} differ: {where}",
            "forward": f"The models first diverge in {where} ({first.kind}), in forward",
            "backward": f"The models first diverge in {where} ({first.kind}), in backward",
            "precision": f"The models diverge in {where} ({first.kind}), in the precision of {self.dtype}",
            "buffers": f"The buffers after the forward differ: {where}",
            "loss": "The models' outputs are the same, the losses differ",
            "gradients": f"The gradients differ: {where}",
            "update": f"The {of} after the first training step differ: {where}"
            if first.kind
            else f"The optimizers' first update differs: {where}",
            "steps": f"The buffers differ in training: {where}, {first.note}"
            if first.kind == BUFFER
            else f"The trainings differ: {where}",
        }[first.stage]
        ratio = first.local if not math.isnan(first.local) else first.ratio
        cause = f": {_why(first)}" if _why(first) else ""
        others = len({(row.stage, row.name) for row in self.introduced}) - 1
        more = f" Further places: {others}." if others > 0 else ""
        return f"{words}, {ratio:.3g} times what rounding explains{cause}.{more}{self._state_left_out()}"

    def _state_left_out(self) -> str:
        """A sentence about state that was neither copied nor compared; empty if there is none."""
        found = [
            f"{what}{first_of(names)}"
            for what, names in (
                ("torch buffers without a partner: ", self.torch_buffers),
                ("JAX buffers without a partner: ", self.jax_buffers),
                ("buffers that the mapping drops: ", self.dropped_buffers),
                ("", self.left_out),
            )
            if names
        ]
        return f" Neither copied nor compared: {'; '.join(found)}." if found else ""

    def remarks(self) -> Iterator[str]:
        """What was not compared, and which faults this batch would hide: one line each, none if all is well."""
        yield from self.notes
        for what, names in (
            ("torch modules without a partner", self.torch_only),
            ("JAX modules without a partner", self.jax_only),
            ("torch parameters without a partner", self.torch_parameters),
            ("JAX parameters without a partner", self.jax_parameters),
        ):
            if names:
                yield f"{what}: {first_of(names)}"
        if self.order:
            yield self.order
        layouts = {
            row.name: row.note for row in self.stage("forward") if any(one in row.note for one in DOUBTS)
        }
        yield from first_lines([f"{name or '(model)'}: {note}" for name, note in layouts.items()], _SHOWN)
        unknown = [row for row in self.rows if row.verdict == "unknown"]
        yield from first_lines([f"{row.name or '(model)'}: {row.note}" for row in unknown], _SHOWN)
        hidden = [one for one in self.revealed if not one.shown]
        if self.revealed:
            yield (
                f"self-test: this batch shows {len(self.revealed) - len(hidden)} of {len(self.revealed)} planted "
                "faults" + ("; larger weights (scale) or other inputs may show more" if hidden else "")
            )
        faults = [f"{one.module or '(model)'}, {one.fault} (ratio {one.ratio:.2g})" for one in hidden]
        yield from (f"  not shown: {line}" for line in first_lines(faults, _SHOWN, "; the report lists all"))

    def table(self, most: int = 20) -> list[tuple[str, ...]]:
        """A heading and the rows that matter: where differences begin, then the largest others, in order."""
        heading = (
            *("verdict", "stage", "torch", "jax", "ratio", "alone"),
            *("error", "floor", "max ULP", "cosine", "cause"),
        )
        begin = list(self.introduced)
        others = sorted(
            (row for row in self.rows if row.counts and row not in begin), key=_size, reverse=True
        )
        chosen = [*begin, *others] or sorted(self.rows, key=_size, reverse=True)[:5]
        cells = [
            (
                row.verdict,
                row.stage,
                (shown(row.name) or "(model)") + (f"#{row.call}" if row.call else ""),
                row.partner or "(model)",
                _number(row.ratio),
                "" if math.isnan(row.local) else _number(row.local),
                f"{row.error:.1e}",
                f"{row.floor:.1e}",
                str(row.max_ulp),
                f"{row.cosine:.6f}",
                _why(row),
            )
            for row in chosen[:most]
        ]
        return [heading, *cells]

    def as_dict(self) -> dict[str, Any]:
        first = self.first_divergence
        return {
            "version": VERSION,
            **dataclasses.asdict(self),
            "same": self.same,
            "not_compared": list(self.not_compared),
            "factor": FACTOR,
            "summary": self.summary(),
            "first_divergence": None if first is None else dataclasses.asdict(first),
        }

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(plain_json(self.as_dict()), indent=1) + "\n", encoding="utf-8")


def _why(row: Row) -> str:
    """The cause; where none is known, what may be the cause of a difference that begins in a module."""
    hint = row.note if (row.stage, row.verdict) == ("forward", "introduced") else ""
    return row.cause or hint


def _size(row: Row) -> float:
    return row.ratio if math.isnan(row.local) else max(row.ratio, row.local)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1e}"


def by_stage(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows in the order of the stages, otherwise in the given order."""
    return tuple(sorted(rows, key=lambda row: STAGES.index(row.stage)))
