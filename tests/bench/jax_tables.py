"""Print the JAX benchmark's answers as tables, and find broken promises. This file imports no JAX."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tests.bench.costs import Ratio, ratio
from tests.bench.jax_rounds import unequal_losses
from tests.bench.jax_setting import BASELINE, NAMES, PJIT, SHARD_MAP, Setting

Answer = dict[str, Any]

LOSS_LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of a loss from the baseline's. The engines round weights to bfloat16 at other places."""
TIME_LIMITS = {SHARD_MAP: 1.1, PJIT: 1.05}
"""Largest median ratio to the baseline's wall seconds on 4 devices."""
MB_LIMITS = {
    ("no_shard", False): 664,
    ("optim", False): 493,
    ("optim_grads", False): 313,
    ("optim_grads_params", False): 108,
    ("optim_grads_params", True): 94,
}
"""MB by strategy and recompute that a prototype of the shard_map engine needed: 26 M parameters, 8 devices, scanned."""
MARK = " **above**"


def over_baseline(answer: Answer, name: str, field: str) -> Ratio:
    return ratio(*([cost[field] for cost in answer["costs"][who]] for who in (name, BASELINE)))


def broken_promises(answers: Sequence[Answer]) -> list[str]:
    """One sentence for each contestant that trains differently from the baseline."""
    sentences = []
    for answer in answers:
        setting = Setting(**answer["setting"])
        wrong = unequal_losses(answer["losses"], LOSS_LIMITS[setting.dtype], BASELINE)
        sentences += [f"{setting.where}: {sentence}" for sentence in wrong]
    return sentences


def times_table(answers: Sequence[Answer]) -> Iterator[str]:
    yield "One step: medians; ratios to the baseline of the same round, median (least-most)\n"
    yield "| devices | dtype | layers | step | wall s | wall ratio | CPU s | CPU ratio | losses: first, last |"
    yield "|---:|---|---|---|---:|---:|---:|---:|---|"
    for answer in answers:
        setting = Setting(**answer["setting"])
        for name, costs in answer["costs"].items():
            wall, cpu = (statistics.median(cost[field] for cost in costs) for field in ("wall", "cpu"))
            ratios = {field: over_baseline(answer, name, field) for field in ("wall", "cpu")}
            mark = MARK if ratios["wall"].median > TIME_LIMITS.get(name, float("inf")) else ""
            shown = ("1", "1") if name == BASELINE else (f"{ratios['wall']}{mark}", str(ratios["cpu"]))
            losses = answer["losses"][name]
            yield (
                f"| {setting.devices} | {setting.dtype} | {_layers(setting)} | {NAMES[name]} | {wall:.3f} | "
                f"{shown[0]} | {cpu:.3f} | {shown[1]} | {losses[0]:.5f}, {losses[-1]:.5f} |"
            )
    limits = ", ".join(f"{NAMES[name]} {limit}" for name, limit in TIME_LIMITS.items())
    yield f"\nLimits of the median wall ratio on 4 devices: {limits}."


def bytes_table(answers: Sequence[Answer]) -> Iterator[str]:
    yield "\nCompiled bytes of a whole step on one device, MB; collectives in the compiled step (full arrays, MB)\n"
    yield (
        "| layers | step | strategy | state | gradients | temporary | peak | limit | all-gather | reduce-scatter | "
        "all-reduce | other |"
    )
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for answer in answers:
        setting = Setting(**answer["setting"])
        for row in answer["found"]:
            limit = limit_of(setting, row)
            over = MARK if limit is not None and row["peak"] > 1e6 * limit else ""
            sizes = [f"{row[field] / 1e6:.1f}" for field in ("state", "gradients", "temporary", "peak")]
            yield (
                f"| {_layers(setting)} | {NAMES[row['contestant']]} | {row['strategy']} | {' | '.join(sizes)}{over} | "
                f"{'' if limit is None else limit} | {' | '.join(_collectives(row))} |"
            )
    yield "\nThe shard_map engine as traced, before XLA merges or drops anything\n"
    yield "| layers | strategy | all-gather | reduce-scatter | all-reduce | other |"
    yield "|---|---|---:|---:|---:|---:|"
    for answer in answers:
        for row in answer["found"]:
            if row["traced"]:
                shown = " | ".join(_collectives({"compiled": row["traced"]}))
                yield f"| {_layers(Setting(**answer['setting']))} | {row['strategy']} | {shown} |"


def limit_of(setting: Setting, row: Answer) -> int | None:
    """The limit in MB; None if there is no limit."""
    agreed = Setting(8, recompute=setting.recompute, size="26M", rows=setting.rows, length=setting.length)
    if row["contestant"] not in (SHARD_MAP, PJIT) or setting != agreed:
        return None
    return MB_LIMITS.get((row["strategy"], setting.recompute), MB_LIMITS[row["strategy"], False])


def _layers(setting: Setting) -> str:
    return ("scan" if setting.stacked else "unrolled") + (", recompute" if setting.recompute else "")


def _collectives(row: Answer) -> list[str]:
    collectives = ("all_gather", "reduce_scatter", "psum")
    counted = {collective: row["compiled"].get(collective, (0, 0)) for collective in collectives}
    rest = [pair for collective, pair in row["compiled"].items() if collective not in collectives]
    pairs = [*counted.values(), (sum(pair[0] for pair in rest), sum(pair[1] for pair in rest))]
    return [f"{calls} ({size / 1e6:.1f})" if calls else "0" for calls, size in pairs]
