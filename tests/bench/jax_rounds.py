"""Run all contestants in turn, round by round, and compare their losses.

This is ``torch_rounds`` for one process with all devices. Each round starts with another contestant, so that no
contestant always runs after the same other one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tests.bench.costs import Cost


def interleaved(
    steps: Mapping[str, Callable[[], float]], rounds: int, repeat: int
) -> tuple[dict[str, list[Cost]], dict[str, list[float]]]:
    """Run ``repeat`` steps of each contestant in turn, ``rounds`` times: costs of one step by round, losses by step.

    A step returns its loss only after all its results exist.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            losses[name] += [steps[name]() for _ in range(repeat)]
            cpu = time.process_time() - cpu
            costs[name].append(Cost((time.perf_counter() - wall) / repeat, cpu / repeat))
    return costs, losses


def unequal_losses(losses: Mapping[str, Sequence[float]], limit: float, reference: str) -> list[str]:
    """One sentence for each contestant that trains differently.

    In each step a loss may differ from the loss of ``reference`` by ``limit``, relatively. The loss must fall.
    """
    sentences = []
    for name, steps in losses.items():
        off = [abs(a - b) / abs(b) for a, b in zip(steps, losses[reference], strict=True)]
        # `not <=` also finds NaN, which compares false.
        wrong = [k for k, difference in enumerate(off) if not difference <= limit]
        if wrong:
            k = wrong[0]
            sentences.append(
                f"{name}, step {k + 1}: expected the loss of {reference}, {losses[reference][k]:.7f}, "
                f"within {limit:g} of it, got {steps[k]:.7f}"
            )
        elif not steps[-1] < steps[0]:
            sentences.append(
                f"{name}: expected a falling loss, got {steps[0]:.7f} first and {steps[-1]:.7f} last"
            )
    return sentences
