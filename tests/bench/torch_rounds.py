"""Run all engines in turn, round by round, and compare them.

A shared machine is slow for seconds at a time. Within one round all engines meet about the same machine, so a ratio of
two engines means more than either number. The median over the rounds drops disturbed rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.costs import Cost


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, repeat: int, device: str
) -> dict[str, list[Cost]]:
    """Call each function ``repeat`` times in turn, for ``rounds`` rounds. Returns the cost of one call. Collective."""
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            _settle(device)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            cpu = time.process_time() - cpu
            costs[name].append(Cost((time.perf_counter() - wall) / repeat, cpu / repeat))
    return costs


def _settle(device: str) -> None:
    """Let all ranks start together, after the work of the previous call."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def over_ranks(ranks: Sequence[Mapping[str, Sequence[Cost]]]) -> dict[str, list[Cost]]:
    """One cost for each engine and round: wall seconds of the slowest rank, mean CPU seconds."""
    return {
        name: [
            Cost(max(cost.wall for cost in costs), statistics.fmean(cost.cpu for cost in costs))
            for costs in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def unequal_losses(
    losses: Mapping[str, Sequence[Sequence[float]]], limits: Mapping[str, float], reference: str
) -> list[str]:
    """One sentence for each engine that trains differently. ``losses`` holds a list of steps for every rank.

    In each step on each rank, an engine may differ from ``reference`` by its limit, relatively.
    """
    sentences = []
    for name, limit in limits.items():
        for rank, (steps, expected) in enumerate(zip(losses[name], losses[reference], strict=True)):
            off = [abs(a - b) / abs(b) for a, b in zip(steps, expected, strict=True)]
            # `not <=` also finds NaN, which compares false.
            wrong = [k for k, difference in enumerate(off) if not difference <= limit]
            if wrong:
                k = wrong[0]
                sentences.append(
                    f"{name}, rank {rank}, step {k + 1}: expected the loss of {reference}, {expected[k]:.7f}, "
                    f"within {limit:g} of it, got {steps[k]:.7f}"
                )
    return sentences
