"""Buffers: running statistics, counters, tables; what a forward makes of them, and why that may differ.

A running statistic moves towards that of the batch, r' = r + a (s - r). torch's ``momentum`` is a, flax's is 1 - a.
torch's running variance is the batch's unbiased one, s = n / (n - 1) times the mean square; flax's is the mean square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bridge.parity.partners.rows import BUFFER, Row, row_of
from bridge.parity.partners.runs import Runs
from bridge.parity.partners.weight_map import WeightMap
from bridge.parity.recorded.distance import fits, noise
from bridge.parity.recorded.recording import Leaves


def buffer_rows(runs: Runs, weights: WeightMap, start: tuple[Leaves, Leaves]) -> Iterator[Row]:
    """A row for each JAX buffer with partners: its values after the forward. ``start``: both sides' values before."""
    before, high, low = (
        weights.to_jax({**start[0], **buffers})
        for buffers in ({}, runs.torch_high.buffers, runs.torch_low.buffers)
    )
    for name, found in runs.jax_high.buffers.items():
        if name not in high:
            continue
        twin = high[name]
        floor = max(
            noise(low[name], twin, runs.dtype), noise(runs.jax_low.buffers.get(name), found, runs.dtype)
        )
        row = row_of(
            "buffers", (weights.owners(name), name), twin, found, floor, dtype=runs.dtype, kind=BUFFER
        )
        if row.counts and twin.dtype.kind == "f":
            cause = statistics_cause(before[name], start[1][name], twin, found, floor)
            row = replace(row, cause=cause)
        yield row


def changed_without_partner(runs: Runs, weights: WeightMap, start: tuple[Leaves, Leaves]) -> tuple[str, ...]:
    """Buffers without a partner that the forward changes, but torch's counters of batches, which no flax norm has."""
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


def statistics_cause(
    torch_before: np.ndarray, jax_before: np.ndarray, torch: np.ndarray, jax: np.ndarray, floor: float
) -> str:
    """Why two running statistics that began alike differ after a forward; empty where nothing known explains it."""
    if not fits(torch_before, jax_before, floor):
        return ""
    start = torch_before.astype(np.float64).ravel()
    ours, theirs = torch.astype(np.float64).ravel(), jax.astype(np.float64).ravel()
    moved, other = ours - start, theirs - start
    square = float(moved @ moved)
    factor = float(moved @ other) / square if square > 0 else 0.0
    if factor and abs(factor - 1) > 1e-6 and fits(factor * moved, other, floor):
        return f"JAX's moves {factor:.6g} times as far in a step as torch's: momentum a in torch is 1 - a in flax"
    # torch - r = a (n / (n - 1) v - r) and JAX - r = a (v - r), so (n - 1) (torch - JAX) = JAX - (1 - a) r.
    known = np.stack([theirs, -start], 1)
    (part, kept), _, rank, _ = np.linalg.lstsq(known, ours - theirs)
    if rank < 2 or start.size < 3 or not fits(known @ np.array([part, kept]), ours - theirs, floor):
        return ""
    count = 1 / part + 1 if part > 0 else 0.0
    if count < 1.5 or abs(count - round(count)) > 1e-3 * count or not 0 <= kept / part < 1:
        return ""
    return (
        f"torch keeps the unbiased variance, {round(count)} / {round(count) - 1} times the batch's, and flax the "
        "biased one; that is the libraries' convention and no fault of the port: compare in eval mode, or list this "
        "buffer under drop"
    )
