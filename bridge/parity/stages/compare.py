"""All stages of the comparison of two sides: weights, forward, buffers, loss, backward, gradients, update, steps.

Each side also runs once in the compute dtype with the rows of the batch in another order, so that sums over the batch
round differently. The distance of the two runs' gradients is a second estimate of rounding, in addition to the
distance from float64. The floor is the larger of the two. A loss that is a sum or a mean over rows has the same
gradients in any order. If they change by more than rounding can explain, some code depends on the position of a row,
and the run is no estimate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bridge.parity.causes.causes import statistics_cause, weight_cause
from bridge.parity.partners.modules import pair_modules
from bridge.parity.partners.rows import BUFFER, Row, Stage, row_of
from bridge.parity.partners.runs import Runs
from bridge.parity.partners.weight_map import WeightMap
from bridge.parity.recorded.distance import epsilon, gap, noise, norm
from bridge.parity.recorded.recording import Leaves, Side
from bridge.parity.recorded.store import Store, trim_heap
from bridge.parity.report_page.report import ParityReport, by_stage
from bridge.parity.stages.backward import activation_rows, gradient_rows, with_blame, without_shifted
from bridge.parity.stages.forward import compare_forward
from bridge.parity.stages.rerun_module import with_right_inputs

Progress = Callable[[str], None]


def compare_sides(
    torch: Side,
    jax: Side,
    batch: Any,
    weights: WeightMap,
    *,
    dtype: str = "float32",
    module_pairs: Mapping[str, str] | None = None,
    steps: int = 3,
    progress: Progress | None = None,
) -> ParityReport:
    """Compare everything. ``steps``: of training, 0 for none; ``module_pairs``: known partners, JAX by torch path."""
    say = progress or (lambda _: None)
    begun = time.monotonic()
    say("weights")
    start = {**torch.weights(), **torch.buffers()}, {**jax.weights(), **jax.buffers()}
    rows = list(weight_rows(*start, weights))
    report = _one_run(torch, jax, batch, weights, dtype, module_pairs, say, start)
    rows += report.rows
    # Training needs the memory of reruns' copies and calls. The heap keeps memory that is freed in small pieces.
    for side in (torch, jax):
        side.forget()
    trim_heap()
    if steps:
        say(f"{steps} steps of training")
        rows += update_rows(torch, jax, batch, weights, dtype, steps)
    return replace(report, rows=by_stage(rows), seconds=time.monotonic() - begun)


def _one_run(
    torch: Side,
    jax: Side,
    batch: Any,
    weights: WeightMap,
    dtype: str,
    module_pairs: Mapping[str, str] | None,
    say: Progress,
    start: tuple[Leaves, Leaves],
) -> ParityReport:
    """Forward, buffers, loss and gradients. The recorded runs are large, and are freed at the end of this call.

    ``start``: torch's and JAX's weights and buffers.
    """
    say(f"forward and backward of both models, in float64 and in {dtype}")
    runs = Runs(torch, jax, batch, dtype)
    modules = pair_modules(weights, runs.torch_high, runs.jax_high, module_pairs)
    pairs = with_right_inputs(runs, runs.pairs(modules, weights))
    say(f"{len(pairs)} modules, each alone")
    forward = compare_forward(runs, pairs)
    say("batch rows in another order")
    order = rerun_reordered(runs, batch, weights)
    rows = [*forward.rows, *buffer_rows(runs, weights, start), *loss_rows(runs, order.loss)]
    gradients = list(gradient_rows(runs, weights, order.gradients))
    backward = without_shifted(activation_rows(runs, pairs), pairs, forward)
    if any(row.counts for row in (*gradients, *backward)):
        say("backward of each module alone")
        backward = with_blame(backward, gradients, pairs, runs, weights, forward)
    rows += (*backward, *gradients)
    return ParityReport(
        tuple(rows),
        dtype,
        (runs.torch_high.loss, runs.jax_high.loss, runs.torch_low.loss, runs.jax_low.loss),
        modules.torch_only,
        modules.jax_only,
        weights.torch_only,
        weights.jax_only,
        torch_buffers=weights.buffers_only[0],
        jax_buffers=weights.buffers_only[1],
        changed_buffers=changed_without_partner(runs, weights, start),
        dropped_buffers=weights.dropped,
        left_out=(*torch.left_out, *jax.left_out),
        order=order.remark,
    )


def weight_rows(torch: Leaves, jax: Leaves, weights: WeightMap) -> Iterator[Row]:
    """A row for each JAX parameter or buffer; a difference above one rounding of its dtype counts."""
    translated = weights.to_jax(torch)
    for name, jax_values in jax.items():
        if name not in translated:
            continue
        twin = translated[name]
        whole = {twin.dtype.kind, jax_values.dtype.kind} & set("iub")
        # The coarser of the two dtypes: a float32 copy of bfloat16 weights holds the same values, and the reverse copy
        # is rounded once.
        coarse = 0.0 if whole else max(epsilon(side.dtype.name) for side in (twin, jax_values))
        # A quarter of a rounding, as in ``noise``; never 0, so that a difference from zeros has a finite ratio.
        floor = max(0.25 * coarse * norm(jax_values), np.finfo(np.float64).tiny)
        names = weights.owners(name), name
        row = row_of("weights", names, twin, jax_values, floor, kind=weights.kind_of(name))
        if row.counts and not whole:
            high, jax_high = twin.astype(np.float64), jax_values.astype(np.float64)
            row = replace(row, cause=weight_cause(name, high, jax_high, floor))
        yield row


def loss_rows(runs: Runs, least: float) -> Iterator[Row]:
    """One row, unless the models have no loss. ``least``: the known effect of rounding on the loss."""
    values = [run.loss for run in (runs.torch_high, runs.jax_high, runs.torch_low, runs.jax_low)]
    if any(value is None for value in values):
        return
    high, jax_high, low, jax_low = (np.asarray(value, np.float64) for value in values)
    floor = max(noise(low, high, runs.dtype), noise(jax_low, jax_high, runs.dtype), least)
    yield row_of("loss", ("loss", "loss"), high, jax_high, floor, dtype=runs.dtype)


def buffer_rows(runs: Runs, weights: WeightMap, start: tuple[Leaves, Leaves]) -> Iterator[Row]:
    """A row for each JAX buffer with partners: its values after the forward. ``start``: both sides' values before."""
    before, high, low = (
        weights.to_jax({**start[0], **buffers})
        for buffers in ({}, runs.torch_high.buffers, runs.torch_low.buffers)
    )
    for name, jax_high in runs.jax_high.buffers.items():
        if name not in high:
            continue
        twin = high[name]
        jax_low = runs.jax_low.buffers.get(name)
        floor = max(noise(low[name], twin, runs.dtype), noise(jax_low, jax_high, runs.dtype))
        names = weights.owners(name), name
        row = row_of("buffers", names, twin, jax_high, floor, dtype=runs.dtype, kind=BUFFER)
        if row.counts and twin.dtype.kind == "f":
            both = before[name], start[1][name], twin, jax_high
            row = replace(row, cause=statistics_cause(names[0], *both, floor))
        yield row


def changed_without_partner(runs: Runs, weights: WeightMap, start: tuple[Leaves, Leaves]) -> tuple[str, ...]:
    """Buffers without a partner that the forward changes, except torch's batch counters, which no flax norm has."""
    return tuple(
        name
        for names, before, run in zip(
            weights.buffers_only, start, (runs.torch_high, runs.jax_high), strict=True
        )
        for name in names
        if name.rpartition(".")[2] != "num_batches_tracked"
        and name in run.buffers
        and not np.array_equal(before[name], run.buffers[name].astype(before[name].dtype), equal_nan=True)
    )


def update_rows(
    torch: Side, jax: Side, batch: Any, weights: WeightMap, dtype: str, steps: int
) -> Iterator[Row]:
    """The change in the optimizers' first step, losses and weights after all steps, and buffers after each step."""
    batches = [batch] * steps
    torch_start, jax_start = ({**side.weights(), **side.buffers()} for side in (torch, jax))
    start = weights.to_jax(Store().leaves(torch_start))
    losses: dict[tuple[str, str], tuple[float, ...]] = {}
    ends: dict[tuple[str, str], list[Leaves]] = {}
    for side, model in (("torch", torch), ("jax", jax)):
        for run_dtype in ("float64", dtype):
            run = model.train(batches, run_dtype)
            trim_heap()
            losses[side, run_dtype] = run.losses
            reached = [run.first, *run.between, run.last] if steps > 1 else [run.first]
            if side == "torch":
                reached = [weights.to_jax(leaves) for leaves in reached]
            ends[side, run_dtype] = reached

    def row(step: int, name: str) -> Row:
        before = {"torch": start[name].astype(np.float64), "jax": jax_start[name].astype(np.float64)}
        high, low, jax_high, jax_low = (
            # In float32 the effect of rounding is known well enough, at half of the memory.
            (ends[side, run_dtype][step][name] - before[side]).astype(
                np.float64 if run_dtype == "float64" else np.float32
            )
            for side in ("torch", "jax")
            for run_dtype in ("float64", dtype)
        )
        # A change is a difference of weights, so its error is at least a rounding of the weights.
        least = noise(None, before["jax"], dtype)
        floor = max(noise(low, high, dtype), noise(jax_low, jax_high, dtype), least)
        names = weights.owners(name), name
        stage: Stage = "update" if step == 0 else "steps"
        return row_of(stage, names, high, jax_high, floor, dtype=dtype, kind=weights.kind_of(name))

    compared = [name for name in ends["jax", "float64"][0] if name in start and name in jax_start]
    count = len(ends["jax", "float64"])
    for name in compared:
        # Between the first and the last step only buffers are recorded.
        held = (step for step in range(count) if all(name in reached[step] for reached in ends.values()))
        rows = {step: row(step, name) for step in held}
        yield rows[0]
        if count > 1:
            largest = max((later for step, later in rows.items() if step), key=lambda later: later.ratio)
            differs = [step + 1 for step, later in rows.items() if later.counts]
            note = f"first differs after step {differs[0]}" if largest.kind and differs else ""
            yield replace(largest, note=note)
    yield from _training_losses(losses, dtype)


def _training_losses(losses: Mapping[tuple[str, str], Sequence[float]], dtype: str) -> Iterator[Row]:
    high, low, jax_high, jax_low = (
        np.asarray(losses[side, run_dtype]) for side in ("torch", "jax") for run_dtype in ("float64", dtype)
    )
    if len(high):
        floor = max(noise(low, high, dtype), noise(jax_low, jax_high, dtype))
        yield row_of("steps", ("losses", "losses"), high, jax_high, floor, dtype=dtype)


_FAR = 64.0
"""Times the rounding from float64: two samples of rounding never differ by that much."""


@dataclass(frozen=True)
class OrderNoise:
    """The distance of the runs with two orders of rows, the larger one of both sides.

    ``loss``: absolute; ``gradients``: Euclidean norms by JAX parameter. Zero and empty if the run gives no estimate;
    ``remark`` says why, if a reader should know.
    """

    loss: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict)
    remark: str = ""


def rerun_reordered(runs: Runs, batch: Any, weights: WeightMap) -> OrderNoise:
    """Run both sides once more. Nothing runs for a batch of one row, or for the batch of a trace (None)."""
    rows = _count_rows(batch)
    if rows < 2:
        return OrderNoise()
    order = _order(rows)
    reordered = _map_batch(batch, lambda array: array[order] if _leading(array) == rows else array)
    loss, gradients, far = 0.0, dict[str, float](), dict[str, str]()
    for name, side, low, high in (
        ("torch", runs.torch, runs.torch_low, runs.torch_high),
        ("JAX", runs.jax, runs.jax_low, runs.jax_high),
    ):
        try:
            other = side.in_order(reordered, order.tolist(), runs.dtype)
            trim_heap()
        except Exception as error:
            return OrderNoise(
                remark=f"rows in another order: not run: {type(error).__name__}: {error!s:.200}"
            )
        three = other, low, high
        own: list[Leaves] = [
            run.gradients if name == "JAX" else weights.to_jax(run.gradients, gradients=True) for run in three
        ]
        worst = 0.0
        # One gradient at a time: all gradients together are as large as the model.
        for key in (None, *own[2]):
            other_values, low_values, high_values = (
                [np.asarray(run.loss, np.float64) for run in three]
                if key is None
                else [leaves[key] for leaves in own]
            )
            apart, size = gap(other_values, low_values), float(np.linalg.norm(high_values))
            # An overflow in one order says nothing about rounding.
            if not math.isfinite(apart):
                continue
            if key is None:
                loss = max(loss, apart)
            else:
                gradients[key] = max(gradients.get(key, 0.0), apart)
            # Also above the root of the dtype's epsilon: gradients that nearly cancel consist of rounding.
            rounded = _FAR * noise(low_values, high_values, runs.dtype)
            least = max(rounded, math.sqrt(epsilon(runs.dtype)) * size)
            if apart > least and apart / size > worst:
                worst = apart / size
                what = "the loss" if key is None else f"the gradient of {key}"
                far[name] = f"{what} changes by {worst:.2g}"
    if not far:
        return OrderNoise(loss, gradients)
    changes = "; ".join(f"in {name} {text} of its size" for name, text in far.items())
    if len(far) == 2:
        return OrderNoise(remark=f"both models depend on the order of the batch's rows: {changes}")
    (name,) = far
    return OrderNoise(
        remark=f"the {name} model depends on the order of the batch's rows, the other one does not: {changes}; does it "
        "use another axis as the batch axis?"
    )


def _order(rows: int) -> np.ndarray:
    """The same order in every run, so that reports are reproducible; never the batch's own order."""
    order = np.random.default_rng(0).permutation(rows)
    return order[::-1] if np.array_equal(order, np.arange(rows)) else order


def _count_rows(batch: Any) -> int:
    """The length of the first array's leading axis; 0 without an array."""
    lengths: list[int] = []
    _map_batch(batch, lambda array: lengths.append(_leading(array)))
    return next((length for length in lengths if length), 0)


def _leading(array: Any) -> int:
    shape = getattr(array, "shape", ())
    return int(shape[0]) if shape else 0


def _map_batch(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with ``change`` applied to everything except mappings, tuples and lists."""
    if isinstance(tree, Mapping):
        return {key: _map_batch(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        items = [_map_batch(value, change) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return change(tree)
