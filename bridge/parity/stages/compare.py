"""All stages of the comparison of two sides: weights, forward, loss, backward, gradients, update, further steps."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.parity.causes.causes import weight_cause
from bridge.parity.partners.modules import Modules, pair_modules
from bridge.parity.partners.rows import Row, Stage, row_of
from bridge.parity.partners.runs import CallPair, Runs
from bridge.parity.partners.weight_map import WeightMap
from bridge.parity.recorded.distance import FACTOR, epsilon, noise, norm
from bridge.parity.recorded.recording import Leaves, Side
from bridge.parity.recorded.store import Store, trim_heap
from bridge.parity.report_page.report import ParityReport, by_stage
from bridge.parity.stages.backward import (
    activation_rows,
    backward_alone,
    blamed,
    gradient_rows,
    suspects_without_running,
)
from bridge.parity.stages.buffers import buffer_rows, changed_without_partner
from bridge.parity.stages.forward import Forward, compare_forward
from bridge.parity.stages.order import Reordered, reordered
from bridge.parity.stages.rerun_module import with_right_inputs

Progress = Callable[[str], None]


def compare_sides(
    torch: Side,
    jax: Side,
    batch: Any,
    weights: WeightMap,
    *,
    dtype: str = "float32",
    given: Mapping[str, str] | None = None,
    steps: int = 3,
    progress: Progress | None = None,
) -> ParityReport:
    """Compare everything. ``steps``: of training, 0 for none; ``given``: partners among modules, JAX by torch."""
    say = progress or (lambda _: None)
    begun = time.monotonic()
    say("weights")
    start = {**torch.weights(), **torch.buffers()}, {**jax.weights(), **jax.buffers()}
    rows = list(weight_rows(*start, weights))
    compared, modules, losses, order, changed = _one_run(torch, jax, batch, weights, dtype, given, say, start)
    rows += compared
    for side in (torch, jax):
        side.forget()
    trim_heap()
    if steps:
        say(f"{steps} steps of training")
        rows += update_rows(torch, jax, batch, weights, dtype, steps)
    return ParityReport(
        by_stage(rows),
        dtype,
        losses,
        modules.torch_only,
        modules.jax_only,
        weights.torch_only,
        weights.jax_only,
        torch_buffers=weights.buffers_only[0],
        jax_buffers=weights.buffers_only[1],
        changed_buffers=changed,
        dropped_buffers=weights.dropped,
        left_out=(*torch.left_out, *jax.left_out),
        order=order.remark,
        seconds=time.monotonic() - begun,
    )


def _one_run(
    torch: Side,
    jax: Side,
    batch: Any,
    weights: WeightMap,
    dtype: str,
    given: Mapping[str, str] | None,
    say: Progress,
    start: tuple[Leaves, Leaves],
) -> tuple[
    list[Row],
    Modules,
    tuple[float | None, float | None, float | None, float | None],
    Reordered,
    tuple[str, ...],
]:
    """Forward, buffers, loss and gradients: rows, partners, losses, buffers that change and have no partner.

    ``start``: torch's and JAX's weights and buffers. The recorded runs, which are large, end with it.
    """
    say(f"forward and backward of both models, in float64 and in {dtype}")
    runs = Runs(torch, jax, batch, dtype)
    modules = pair_modules(weights, runs.torch_high, runs.jax_high, given)
    pairs = with_right_inputs(runs, runs.pairs(modules, weights))
    say(f"{len(pairs)} modules, each alone")
    forward = compare_forward(runs, pairs)
    say("rows in another order")
    order = reordered(runs, batch, weights)
    rows = [*forward.rows, *buffer_rows(runs, weights, start), *loss_rows(runs, order.loss)]
    gradients = list(gradient_rows(runs, weights, order.gradients))
    backward = _without_shifted(activation_rows(runs, pairs), pairs, forward)
    if any(row.counts for row in (*gradients, *backward)):
        say("backward of each module alone")
        backward = _with_blame(backward, gradients, pairs, runs, weights, forward)
    rows += (*backward, *gradients)
    return (
        rows,
        modules,
        (runs.torch_high.loss, runs.jax_high.loss, runs.torch_low.loss, runs.jax_low.loss),
        order,
        changed_without_partner(runs, weights, start),
    )


def weight_rows(torch: Leaves, jax: Leaves, weights: WeightMap) -> Iterator[Row]:
    """A row for each JAX parameter or buffer; more than a rounding of its dtype counts."""
    translated = weights.to_jax(torch)
    for name, found in jax.items():
        if name not in translated:
            continue
        twin = translated[name]
        whole = {twin.dtype.kind, found.dtype.kind} & set("iub")
        coarse = 0.0 if whole else max(epsilon(one.dtype.name) for one in (twin, found))
        floor = max(0.25 * coarse * norm(found), np.finfo(np.float64).tiny)
        names = weights.owners(name), name
        row = row_of("weights", names, twin, found, floor, kind=weights.kind_of(name))
        if row.counts and not whole:
            high, low = twin.astype(np.float64), found.astype(np.float64)
            row = dataclasses.replace(row, cause=weight_cause(high, low, floor))
        yield row


def loss_rows(runs: Runs, least: float) -> Iterator[Row]:
    """One row, unless the models have no loss. ``least``: what rounding is known to do to it."""
    values = [run.loss for run in (runs.torch_high, runs.jax_high, runs.torch_low, runs.jax_low)]
    if any(value is None for value in values):
        return
    high, found, low, found_low = (np.asarray(value, np.float64) for value in values)
    floor = max(noise(low, high, runs.dtype), noise(found_low, found, runs.dtype), least)
    yield row_of("loss", ("loss", "loss"), high, found, floor, dtype=runs.dtype)


def update_rows(
    torch: Side, jax: Side, batch: Any, weights: WeightMap, dtype: str, steps: int
) -> Iterator[Row]:
    """What the first step of the optimizers changes, losses and weights after all steps, and buffers after each."""
    batches = [batch] * steps
    ours, begin = ({**side.weights(), **side.buffers()} for side in (torch, jax))
    start = weights.to_jax(Store().leaves(ours))
    losses: dict[tuple[str, str], tuple[float, ...]] = {}
    ends: dict[tuple[str, str], list[Leaves]] = {}
    for side, model in (("torch", torch), ("jax", jax)):
        for one in ("float64", dtype):
            run = model.train(batches, one)
            trim_heap()
            losses[side, one] = run.losses
            reached = [run.first, *run.between, run.last] if steps > 1 else [run.first]
            ends[side, one] = [weights.to_jax(leaves) for leaves in reached] if side == "torch" else reached

    def row(step: int, name: str) -> Row:
        before = {"torch": start[name].astype(np.float64), "jax": begin[name].astype(np.float64)}
        high, low, change, change_low = (
            # What rounding does is known well enough in float32.
            (ends[side, one][step][name] - before[side]).astype(
                np.float64 if one == "float64" else np.float32
            )
            for side in ("torch", "jax")
            for one in ("float64", dtype)
        )
        # A change is a difference of weights, so a rounding of the weights is the least that it can be off.
        least = noise(None, before["jax"], dtype)
        floor = max(noise(low, high, dtype), noise(change_low, change, dtype), least)
        names = weights.owners(name), name
        stage: Stage = "update" if step == 0 else "steps"
        return row_of(stage, names, high, change, floor, dtype=dtype, kind=weights.kind_of(name))

    known = [name for name in ends["jax", "float64"][0] if name in start and name in begin]
    count = len(ends["jax", "float64"])
    for name in known:
        held = (step for step in range(count) if all(name in reached[step] for reached in ends.values()))
        rows = {step: row(step, name) for step in held}
        yield rows[0]
        if count > 1:
            largest = max((one for step, one in rows.items() if step), key=lambda one: one.ratio)
            differs = [step + 1 for step, one in rows.items() if one.counts]
            note = f"first differs after step {differs[0]}" if largest.kind and differs else ""
            yield dataclasses.replace(largest, note=note)
    yield from _training_losses(losses, dtype)


def _training_losses(losses: Mapping[tuple[str, str], Sequence[float]], dtype: str) -> Iterator[Row]:
    high, low = (np.asarray(losses["torch", one]) for one in ("float64", dtype))
    found, found_low = (np.asarray(losses["jax", one]) for one in ("float64", dtype))
    if len(high):
        floor = max(noise(low, high, dtype), noise(found_low, found, dtype))
        yield row_of("steps", ("losses", "losses"), high, found, floor, dtype=dtype)


def _without_shifted(rows: Iterable[Row], pairs: Sequence[CallPair], forward: Forward) -> list[Row]:
    """Gradients of modules whose share another one has are no twins of each other."""
    names = {(pairs[n].modules.torch, pairs[n].number): where for n, where in forward.shifted.items()}
    return [
        dataclasses.replace(row, verdict="same", note=f"made up for in {names[row.name, row.call]}")
        if (row.name, row.call) in names
        else row
        for row in rows
    ]


def _with_blame(
    rows: Sequence[Row],
    gradients: Sequence[Row],
    pairs: Sequence[CallPair],
    runs: Runs,
    weights: WeightMap,
    forward: Forward,
) -> list[Row]:
    place = {(pair.modules.torch, pair.number): number for number, pair in enumerate(pairs)}
    # Also of modules that were acquitted because what they were given without a twin was wrong.
    faulty = {
        place[row.name, row.call]
        for row in forward.rows
        if row.stage == "forward" and row.local > FACTOR and place[row.name, row.call] not in forward.shifted
    }
    alone = {
        number: (math.nan, "") if number in forward.shifted else backward_alone(runs, pair, weights)
        for number, pair in enumerate(pairs)
    }
    local = {number: ratio for number, (ratio, _) in alone.items()}
    suspects = {number for number, ratio in local.items() if ratio > FACTOR}
    if not any(row.counts for row in forward.rows):
        suspects |= suspects_without_running(rows, gradients, pairs, local)
    guilty = blamed(suspects, pairs, runs, faulty)
    found = []
    for row in rows:
        number = place[row.name, row.call]
        ratio, note = alone[number]
        if number in guilty:
            row = dataclasses.replace(row, verdict="introduced", local=ratio, note=note)
        elif row.counts:
            row = dataclasses.replace(row, verdict="inherited", local=ratio)
        found.append(row)
    return found
