"""The moments of a step in JAX, and what each holds in addition to what is always in memory: see ``peak``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bridge.planning.cost.at_rest import keeps_weights
from bridge.planning.cost.buffers import GroupBuffers
from bridge.planning.cost.peak_steps import Moment, Step, StepUnit, is_inside, saved_before


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one unit's buffers on a device.

    gathered: compute weights, if they are gathered for each use. ahead: the same, if the gather happens before the unit
    runs. raw: unreduced gradients by parameter. buffer: these in one array, to be reduced. reducing: buffer, while the
    next unit's backward runs. output: the step's gradients. late: a microbatch's gradients that are reduced only at the
    end of the step. micro: a microbatch's gradients next to the outputs. sums: those of earlier microbatches next to
    the outputs. updated: new main weights next to the old ones. freed: whole compute weights that backward frees.
    sliced, copied: slices and copies of whole weights in a loop. whole: whether all weights are whole.
    """

    gathered: int
    ahead: int
    raw: int
    buffer: int
    reducing: int
    output: int
    late: int
    micro: int
    sums: int
    updated: int
    freed: int
    sliced: int
    copied: int
    whole: bool

    @staticmethod
    def of(unit: StepUnit, microbatches: int, prefetch: int) -> _Sizes:
        groups = unit.groups
        trained = [group for group in groups if group.shape.trainable]
        late = [g for g in trained if g.strategy.gradients < g.mesh.ndim]
        early = [g for g in trained if g not in late]
        ahead = sum(g.gather_bytes(0) for g in groups if g.strategy.parameters)
        # The parameters made from gathered float8 bytes, next to these bytes.
        narrow = [g for g in groups if g.shape.dtypes.gather is not None]
        gathered = ahead + sum(g.numel * g.compute_bytes for g in narrow)
        buffer = sum(g.size(0) * g.reduce_bytes for g in trained if g.strategy.gradients)
        left = sum(g.size(g.strategy.gradients) * g.grad_bytes for g in late)
        reduced = sum(g.size(g.strategy.gradients) * g.grad_bytes for g in early)
        # What is all-reduced at the end of the step is summed in the place of the output, which is as large.
        scattered = [g for g in late if g.strategy.gradients != g.strategy.optimizer]
        apart = sum(g.size(g.strategy.gradients) * g.grad_bytes for g in scattered)
        kept = [g for g in groups if holds_apart(g) and not g.strategy.parameters]
        stacked = unit.stack is not None
        return _Sizes(
            gathered=gathered,
            ahead=ahead if prefetch else 0,
            raw=sum(g.numel * g.compute_bytes for g in trained),
            buffer=buffer,
            reducing=buffer if prefetch else 0,
            output=sum(g.size(g.strategy.optimizer) * g.grad_bytes for g in trained),
            late=left,
            micro=left + (reduced if microbatches > 1 else 0),
            sums=apart if microbatches > 1 else 0,
            updated=sum(g.size(g.strategy.optimizer) * g.main_bytes for g in trained),
            freed=sum(g.gather_bytes(0) for g in kept) if microbatches == 1 else 0,
            sliced=sum(g.gather_bytes(0) for g in groups if not g.strategy.parameters) if stacked else 0,
            copied=sum(g.size(0) * g.main_bytes for g in groups if not g.strategy.optimizer)
            if stacked
            else 0,
            whole=not any(g.strategy.parameters for g in groups),
        )


def holds_apart(group: GroupBuffers) -> bool:
    """Whether a step holds compute weights of this group in addition to the main weights, whole, coarser or float8."""
    return keeps_weights(group) or group.shape.dtypes.gather is not None


def moments(
    steps: Sequence[Step],
    units: Sequence[StepUnit],
    microbatches: int,
    prefetch: int,
    kept: int,
    staged: int = 0,
) -> Iterator[Moment]:
    """``kept``: bytes of compute weights that exist during the whole step. ``staged``: see ``step_peak``."""
    sizes = {unit.path: _Sizes.of(unit, microbatches, prefetch) for unit in units}
    outputs = _outputs(units, sizes)
    held = outputs + sum(unit.sums for unit in sizes.values())
    yield from _forward(steps, sizes, held)
    yield from _backward(steps, sizes, held, kept)
    every = sizes.values()
    if microbatches > 1:
        # Sums are not made in place, but unit by unit.
        summed = max((unit.late or unit.output for unit in every), default=0)
        yield "sum", {"gradients": held + sum(unit.micro for unit in every) + summed}
    reduced = sum(unit.output for unit in every)
    yield "reduction", {"compute_weights": 0, "gradients": reduced + sum(unit.late for unit in every)}
    # A separate program, which holds no compute weights.
    updated = max((unit.updated for unit in every), default=0)
    yield "update", {"compute_weights": 0, "gradients": reduced, "segment": updated + staged}


def _outputs(units: Sequence[StepUnit], sizes: Mapping[str, _Sizes]) -> int:
    """The program's outputs, less the memory that holds other arrays before they are written.

    A stack's gradients are one array. If it is written at the end of the step, a layer's array of at most that size
    takes its memory before.
    """
    total = sum(unit.output for unit in sizes.values())
    for stack in {unit.stack for unit in units if unit.stack}:
        inside = [sizes[unit.path] for unit in units if unit.stack == stack]
        array = sum(unit.output for unit in inside)
        fitting = [unit.late for unit in inside if unit.late <= array]
        total -= max(fitting, default=0)
    return total


def _forward(steps: Sequence[Step], sizes: Mapping[str, _Sizes], held: int) -> Iterator[Moment]:
    for index, step in enumerate(steps):
        following = steps[index + 1].running if index + 1 < len(steps) else ()
        yield (
            f"forward of {step.title}",
            {
                "gathered_weights": _gathered(step, step.running, following, sizes),
                "gradients": held,
                "activations": saved_before(steps, index),
                "segment": step.needed.forward + (step.needed.fixed if step.stack else 0),
            },
        )


def _backward(steps: Sequence[Step], sizes: Mapping[str, _Sizes], held: int, kept: int) -> Iterator[Moment]:
    made: Counter[str] = Counter()
    reducing = waiting = 0
    for index in reversed(range(len(steps))):
        step = steps[index]
        # Of the enclosing units, only those that backward still reads would be gathered: none.
        running = step.running[: step.inner] if step.reads else ()
        after = steps[index - 1] if index else None
        following = after.running[: after.inner] if after and after.reads else ()
        loops = {step.stack, after.stack if after else None}
        looping = [path for path in sizes if any(is_inside(path, stack) for stack in loops)]
        done = [path for path, unit in sizes.items() if unit.raw and made[path] >= unit.raw]
        read = {earlier.owner for earlier in steps[: index + 1] if earlier.reads}
        unread = [path for path in sizes if path not in read and path not in looping]
        weights = kept - sum(sizes[path].freed for path in unread if made[path])
        # A loop's results are allocated before its start, and its inputs are kept until its end.
        there = held + sum(unit.micro for path, unit in sizes.items() if path in done or path in looping)
        saved = saved_before(steps, index)
        whole = all(sizes[path].whole for path in running)
        # Without a barrier between forward and backward, XLA makes constants, and what the loss scatters, too early.
        early = step.needed.fixed_saved if step.stack else 0
        early = step.needed.largest if index == len(steps) - 1 else early
        yield (
            f"backward of {step.title}",
            {
                "gathered_weights": _gathered(step, running, following, sizes),
                "gradients": there,
                # Gradients of this segment take the place of what it saved.
                "gradient_buffers": reducing + sum(made[path] for path in sizes if path not in done),
                "activations": saved + (0 if step.stack else waiting),
                "segment": step.needed.backward + (early if whole else 0),
                "compute_weights": weights,
            },
        )
        made.update(step.raw)
        finished = [path for path in step.raw if path not in done and made[path] >= sizes[path].raw]
        unfinished = [path for path in sizes if path not in done and path not in finished]
        if index == len(steps) - 1 and not finished:
            # The gradient of the output projection is made when its unit is reduced. Until then its product's operands
            # wait: the cotangent of the logits, and the logits if weights are whole and no barrier is in between.
            waiting = step.needed.largest * (1 + whole)
        if finished:
            yield (
                f"reduction of {step.title}",
                {
                    "gathered_weights": sum(sizes[path].ahead for path in following),
                    "gradients": there + sum(sizes[path].micro for path in finished if path not in looping),
                    "gradient_buffers": reducing
                    + sum(made[path] for path in unfinished)
                    + sum(sizes[path].raw + sizes[path].buffer for path in finished),
                    "activations": saved,
                    "segment": step.needed.input,
                    "compute_weights": weights
                    - sum(sizes[path].freed for path in finished if path not in [*looping, *unread]),
                },
            )
            reducing = sizes[finished[-1]].reducing


def _gathered(
    step: Step, running: Sequence[str], following: Sequence[str], sizes: Mapping[str, _Sizes]
) -> int:
    own = sum(sizes[path].sliced for path in running)
    looped = sum(unit.copied for unit in sizes.values()) if step.stack else 0
    ahead = sum(sizes[path].ahead for path in {*following} - {*running})
    return own + looped + ahead + sum(sizes[path].gathered for path in {*running})
