"""Reports made by hand, of models that nobody has to run."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from bridge.parity.partners.rows import Row, Stage, Verdict, row_of
from bridge.parity.report_page.report import ParityReport, Revealed

HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=http://evil.example/x onerror=alert(1)>",
    "a.b&amp;</details></table></svg>",
    "-->]]>.{{x}}.$\\frac{1$",
    "\x1b[31m\x00.\ud800\u202e",
    "deep" + ".x" * 1000,
    "..",
)


def row(
    stage: Stage,
    name: str,
    error: float = 1e-9,
    *,
    floor: float = 1e-8,
    local: float = math.nan,
    partner: str = "jax/x",
    **other: str,
) -> Row:
    """A row whose error is ``error`` times the norm; ``floor``: over the norm as well."""
    values = np.arange(1.0, 9.0).reshape(2, 4)
    perturbed = values * (1 + error)
    relative = floor * float(np.linalg.norm(values))
    made = row_of(stage, (name, partner), values, perturbed, relative, local=local)
    return dataclasses.replace(made, **other)  # type: ignore[arg-type]


def llama(layers: int, faults: tuple[int, ...] = ()) -> ParityReport:
    """A decoder of ``layers`` layers whose query projections are wrong in the layers ``faults``."""
    rows, error, names = [], 1e-9, []
    for layer in range(layers):
        for part in ("norm", "attn.q", "attn.k", "attn.v", "attn.o", "attn", "mlp.up", "mlp.down", "mlp", ""):
            name = f"model.layers.{layer}.{part}".rstrip(".")
            wrong = layer in faults and part == "attn.q"
            error = 1e-3 * (layer + 1) if wrong else error
            names.append(name)
            rows.append(row("forward", name, error, local=2e4 if wrong else 0.3, kind="Linear"))
    rows += [row("backward", name, error * 2, floor=1e-7) for name in names]
    rows += [row("gradients", f"{name}.weight", error * 3, floor=1e-7) for name in names[::10]]
    rows += [row("weights", f"{name}.weight", 0.0) for name in names[::10]]
    return ParityReport(
        tuple(rows),
        "float32",
        (2.0, 2.0, 2.0, 2.0),
        ("model.rotary",),
        ("rope",),
        ("lm_head.weight",),
        ("step",),
        (Revealed("frequencies times 1.01", "model.layers.0.attn", True, 1e4),),
        {"torch": "2.11.0", "jax": "0.10.1"},
        12.5,
    )


@np.errstate(over="ignore")
def odd() -> ParityReport:
    """NaN, inf, zero, hostile names and verdicts of every kind."""
    ones = np.ones((2, 2))
    rows = [
        row_of("forward", ("nan", "n"), ones * math.nan, ones, 1e-8, local=math.inf),
        row_of("forward", ("inf", "i"), ones * math.inf, -ones, 1e-8, local=math.nan),
        row_of("forward", ("zero", "z"), ones * 0, ones * 0, 0.0, local=0.0),
        row_of("forward", ("empty", "e"), ones[:0], ones[:0], 0.0),
        row_of("backward", ("tiny", "t"), ones, ones * (1 + 1e-15), 1e-300),
        row_of("backward", ("huge", "h"), ones * 1e-320, ones * 1e300, 1e-320, local=1e30),
        row_of("loss", ("loss", "loss"), np.asarray(math.nan), np.asarray(1.0), 0.0),
        row_of("steps", ("losses", "losses"), np.asarray([1.0]), np.asarray([2.0]), 0.0),
        row("gradients", ", ".join(f"model.layers.{layer}.w" for layer in range(80)), 0.1),
    ]
    unknown = dict.fromkeys(("error", "floor", "ratio", "local", "cosine"), math.nan)
    for number, name in enumerate(HOSTILE):
        verdict: Verdict = ("same", "introduced", "inherited", "differs")[number % 4]  # type: ignore[assignment]
        hostile = row("forward", name, 0.1, kind=name, layout=name, note=name, partner=name, leaf=name)
        rows.append(_with(hostile, verdict=verdict, cause=name))
        rows.append(_with(hostile, verdict=verdict, **unknown))
        rows.append(row("update", f"{name}.weight", 0.1, partner=name))
    return ParityReport(
        tuple(rows),
        "float32",
        (math.nan, math.inf, 1.0, None),
        HOSTILE,
        HOSTILE,
        HOSTILE,
        HOSTILE,
        tuple(Revealed(name, name, False, math.nan) for name in HOSTILE),
        {name: name for name in HOSTILE},
        math.nan,
    )


def _with(row: Row, **changed: object) -> Row:
    return dataclasses.replace(row, **changed)  # type: ignore[arg-type]
