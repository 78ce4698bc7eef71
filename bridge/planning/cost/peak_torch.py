"""The moments of a step in PyTorch, and what each holds in addition to what is always in memory: see ``peak``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bridge.planning.cost.buffers import GroupBuffers
from bridge.planning.cost.peak_steps import Moment, Step, StepUnit, saved_before


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one unit's buffers on a device.

    gathered: compute weights, if they are gathered for each use. ahead: the same, if the gather happens before the unit
    runs. raw: unsharded gradients. half: half of these with padding, above which they get a buffer if weights are kept.
    buffer: this buffer. reducing: what is reduced while the next unit's backward runs. done: reduced gradients. before:
    sums of earlier microbatches, which the reduced gradients replace.
    """

    gathered: int
    ahead: int
    raw: int
    half: int
    buffer: int
    reducing: int
    done: int
    before: int

    @staticmethod
    def of(unit: StepUnit, microbatches: int, prefetch: int) -> _Sizes:
        trained = [group for group in unit.groups if group.shape.trainable]
        # Payload exists next to the weights that are made from it.
        payload = sum(
            g.gather_bytes(0) for g in unit.groups if g.shape.dtypes.gather and g.strategy.parameters
        )
        gathered = payload + sum(g.size(0) * g.compute_bytes for g in unit.groups if g.strategy.parameters)
        buffer = sum(g.gradient_size(0, "torch") * g.reduce_bytes for g in trained)
        return _Sizes(
            gathered=gathered,
            ahead=gathered if prefetch else 0,
            raw=sum(g.numel * g.compute_bytes for g in trained),
            half=sum(g.size(0) * g.compute_bytes for g in trained) // 2,
            buffer=buffer,
            reducing=buffer if prefetch else 0,
            done=sum(g.gradient_size(g.strategy.optimizer, "torch") * g.grad_bytes for g in trained),
            before=sum(_left_before(g) for g in trained) if microbatches > 1 else 0,
        )


def _left_before(group: GroupBuffers) -> int:
    strategy = group.strategy
    # Without a reduction at the end of the step, each microbatch's sums are final.
    level = strategy.optimizer if strategy.gradients == group.mesh.ndim else strategy.gradients
    return group.gradient_size(level, "torch") * group.grad_bytes


def moments(
    steps: Sequence[Step], units: Sequence[StepUnit], microbatches: int, prefetch: int, staged: int = 0
) -> Iterator[Moment]:
    """``staged``: see ``step_peak``."""
    sizes = {unit.path: _Sizes.of(unit, microbatches, prefetch) for unit in units}
    yield from _forward(steps, sizes)
    yield from _backward(steps, sizes)
    yield "update", {"gradients": sum(unit.done for unit in sizes.values()), "segment": staged}


def _forward(steps: Sequence[Step], sizes: Mapping[str, _Sizes]) -> Iterator[Moment]:
    before = sum(unit.before for unit in sizes.values())
    for index, step in enumerate(steps):
        following = steps[index + 1].running if index + 1 < len(steps) else ()
        held = {
            "gathered_weights": _gathered(step, following, sizes),
            "gradients": before,
            "activations": saved_before(steps, index),
            "segment": step.needed.forward,
        }
        yield f"forward of {step.title}", held


def _backward(steps: Sequence[Step], sizes: Mapping[str, _Sizes]) -> Iterator[Moment]:
    made: Counter[str] = Counter()
    reducing = 0
    for index in reversed(range(len(steps))):
        step = steps[index]
        following = steps[index - 1].running if index else ()
        done = [path for path, unit in sizes.items() if unit.raw and made[path] >= unit.raw]
        before = Counter(made)
        around = {
            "gathered_weights": _gathered(step, following, sizes),
            "gradients": sum(unit.done if path in done else unit.before for path, unit in sizes.items()),
            "activations": saved_before(steps, index),
        }
        if step.needed.early:
            # The loss comes before the products that make gradients of parameters.
            buffers = reducing + sum(made[path] for path in sizes if path not in done)
            held = {**around, "gradient_buffers": buffers, "segment": step.needed.early}
            yield f"loss of {step.title}", held
        made.update(step.raw)
        open_units = [path for path in sizes if made[path] and path not in done]
        buffers = reducing + sum(_collecting(before[path], made[path], sizes[path]) for path in open_units)
        held = {**around, "gradient_buffers": buffers, "segment": step.needed.backward}
        yield f"backward of {step.title}", held
        finished = [sizes[path] for path in open_units if made[path] >= sizes[path].raw]
        if finished:
            reducing = finished[-1].reducing


def _collecting(before: int, made: int, unit: _Sizes) -> int:
    """Bytes of unreduced gradients: single tensors, and also the unit's buffer from half of the unit on.

    The buffer takes the place of the unit's weights if these are freed. If they are not, and the last segment brings
    the rest, as the embedding does at the root, the buffer is made then.
    """
    if made <= unit.half or (unit.gathered and made < unit.raw):
        return made
    if unit.gathered or (made >= unit.raw and 0 < before <= unit.half):
        return unit.raw + max(0, unit.buffer - unit.gathered)
    return unit.raw // 2 + unit.buffer


def _gathered(step: Step, following: Sequence[str], sizes: Mapping[str, _Sizes]) -> int:
    ahead = sum(sizes[path].ahead for path in {*following} - {*step.running})
    return ahead + sum(sizes[path].gathered for path in {*step.running})
