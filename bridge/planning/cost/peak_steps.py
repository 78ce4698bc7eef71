"""The segments of a forward, in order, with the units that run with each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bridge.planning.cost.buffers import GroupBuffers
from bridge.planning.cost.units import outward
from bridge.planning.models.activations import Segment, SegmentBytes
from bridge.planning.models.model import Model

# A name, and bytes by term.
Moment = tuple[str, dict[str, int]]


@dataclass(frozen=True)
class StepUnit:
    """One unit for the walk. ``stack``: the stack of scanned layers in JAX that contains the unit."""

    path: str
    groups: tuple[GroupBuffers, ...]
    recompute: bool
    stack: str | None = None


@dataclass(frozen=True)
class Step:
    """One segment for the walk.

    running: units that run with it: the units inside, then its owner and the enclosing units.
    inner: how many of these do not enclose the owner. reads: whether backward reads weights; for a table of vectors it
    does not, because no gradient goes to its input. needed: bytes of its activations, or of their recomputation. raw:
    unreduced gradients that its backward makes, by unit.
    """

    path: str
    stack: str | None
    running: tuple[str, ...]
    inner: int
    reads: bool
    needed: SegmentBytes
    raw: Mapping[str, int]

    @property
    def owner(self) -> str:
        """The unit that the segment belongs to."""
        return self.running[self.inner - 1]

    @property
    def title(self) -> str:
        return self.path or "the root"


def is_inside(path: str, stack: str | None) -> bool:
    return stack is not None and path.startswith(f"{stack}.")


def saved_before(steps: Sequence[Step], index: int) -> int:
    """Activations of the earlier segments, and of all layers of the running loop."""
    stack = steps[index].stack
    return sum(
        step.needed.saved
        for other, step in enumerate(steps)
        if other < index or (stack and step.stack == stack)
    )


def steps_of(model: Model, units: Sequence[StepUnit], batch: int, length: int) -> Iterator[Step]:
    by_path = {unit.path: unit for unit in units}
    stages = dict(_stages(model, by_path)) or {path: _Stage() for path in by_path}
    raw = _raw_gradients(units, stages)
    for path, stage in stages.items():
        around = [outer for outer in outward(path) if outer in by_path]
        apart = [part.path for part in stage.apart]
        inside = [
            inner
            for inner in by_path
            if path and inner != path and path in outward(inner) and not set(apart) & set(outward(inner))
        ]
        owner = by_path[around[0]]
        needed = SegmentBytes()
        if stage.segment is not None:
            dtypes = [group.shape.dtypes.compute for group in owner.groups] or ["float32"]
            needed = stage.segment.bytes_for(batch, length, dtypes[0])
            others = sum(part.bytes_for(batch, length, dtypes[0]).saved for part in stage.apart)
            needed = replace(
                needed,
                saved=max(0, needed.saved - others),
                forward=max(0, needed.forward - others),
                backward=max(0, needed.backward - others),
            )
        if owner.recompute:
            needed = replace(
                needed, saved=needed.input, forward=needed.once, backward=needed.again, fixed_saved=0
            )
        stack = next((unit.stack for unit in units if is_inside(path, unit.stack)), None)
        reads = stage.segment is None or needed.input > 0
        yield Step(path, stack, (*inside, *around), len(inside) + 1, reads, needed, raw[path])


@dataclass(frozen=True)
class _Stage:
    """A segment, and its parts that are separate stages."""

    segment: Segment | None = None
    apart: tuple[Segment, ...] = ()


def _stages(model: Model, by_path: Mapping[str, StepUnit]) -> Iterator[tuple[str, _Stage]]:
    """Segments in the order of forward; parts that are units follow the rest of their segment."""
    for segment in model.activations:
        owner = by_path[next(path for path in outward(segment.path) if path in by_path)]
        # A segment that is recomputed as a whole saves nothing from its parts.
        apart = () if owner.recompute else tuple(part for part in segment.parts if part.path in by_path)
        yield segment.path, _Stage(segment, apart)
        for part in apart:
            yield part.path, _Stage(part)


def _raw_gradients(units: Sequence[StepUnit], segments: Mapping[str, _Stage]) -> dict[str, Counter[str]]:
    """For each segment, bytes of unreduced gradients by unit; parameters outside all segments go with the last one."""
    last = list(segments)[-1]
    raw: dict[str, Counter[str]] = {path: Counter() for path in segments}
    for unit in units:
        for group in unit.groups:
            if group.shape.trainable:
                for slot in group.layout.slots:
                    full = f"{unit.path}.{slot.name}".lstrip(".")
                    holders = [path for path in outward(full) if path in segments and path]
                    raw[holders[0] if holders else last][unit.path] += slot.numel * group.compute_bytes
    return raw
