"""The most bytes that a device holds in a step, as a sum of named terms at the worst moment.

The walk goes through a step's last microbatch segment by segment (see ``activations``), forward and back. At each
segment it adds up the terms below; the moment of the largest sum is the peak. A unit is gathered while one of its
segments runs, and so are the units around it. With prefetch 1, so are the units of the segment that comes next, and the
gradients of the last unit are being reduced; with 0 nothing is there ahead of its use or after it. S_a, R_a, m, c, r, g
are those of ``at_rest`` and ``traffic``::

    term                 while segment i runs
    main weights         m S_o                                          always
    moments              those of ``at_rest``                           always
    compute weights      those of ``at_rest``: kept between steps       always (JAX: p = 0 whole c S_0, 0 < p < o c S_p)
    gathered weights     c S_0 of each unit that runs; prefetch: and    p > 0
                         of each that runs next
    gradients            of units that backward has finished, g S_o;
                         of others those of earlier microbatches:
                         g S_(g) if K > 1
    gradient buffers     gradients that are not reduced yet:
                         raw c P of the unit's parameters so far,
                         from half of them on in its buffer, r S_0;
                         prefetch: and the buffer of the unit
                         before it
    activations          saved of segments before i, or their inputs    recompute
    segment              forward or backward of segment i

After backward comes the update: main weights, moments, all gradients, and kept compute weights. The update is the peak
where activations are small.

JAX differs in these points:

* Gradients are of level g until the last microbatch. With K > 1 a microbatch's gradients lie beside the sums of the
  earlier ones. Where a reduction is left for the end of the step (g < all axes), units then hold their reduced
  gradients, g S_o, beside the unreduced ones: a moment of its own.
* Unreduced gradients have no buffer before they are reduced. Those that are reduced at the end of the step only, g = 0,
  are not in a buffer of the unit before.
* With K = 1 backward frees whole compute weights unit by unit.
* The update is a program of its own. It makes the new main weights unit by unit and holds no compute weights.
* Scanned layers (``stacks``) hold the gradients of all layers from the loop's start, and the activations and whole
  weights of all layers until its end. A layer also holds a slice of its whole weights, and ``no_shard`` a copy of all.

Without prefetch the peak of the decoder was within 8 % of XLA's, and up to 12 % above XLA's for scanned layers with
recomputation (``twinshard plan --compile``). What prefetch adds is what the runtimes permit: two units' weights and two
units' gradients at once. XLA's scheduler may use less of that. On accelerators ``jax_impl`` makes anew in backward what
elementwise operations make of the rest of what a unit saves; the sum counts all of it, and is an upper bound there.

The sum leaves out the allocator's fragmentation, the framework's and the communication library's own buffers, and
constants such as rotary tables. A measurement includes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bridge.planning.activations import Segment, SegmentBytes
from bridge.planning.at_rest import AtRest, keeps_weights
from bridge.planning.buffers import GroupBuffers
from bridge.planning.model import Model
from bridge.planning.units import outward

TERMS = (
    "main_weights",
    "moments",
    "compute_weights",
    "gathered_weights",
    "gradients",
    "gradient_buffers",
    "activations",
    "segment",
)
ACTIVATIONS = ("activations", "segment")
"""The terms that are of activations."""


@dataclass(frozen=True)
class Peak:
    """``moment``: when it is, in words. ``terms``: bytes by name, see above.

    ``complete``: everything is known; else the sum is a lower bound.
    """

    moment: str
    terms: Mapping[str, int]
    complete: bool

    @property
    def total(self) -> int:
        return sum(self.terms.values())


@dataclass(frozen=True)
class StepUnit:
    """One unit as the walk needs it. ``stack``: the stack of scanned layers in JAX that contains the unit."""

    path: str
    groups: tuple[GroupBuffers, ...]
    recompute: bool
    stack: str | None = None


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one unit's buffers on a device.

    gathered: compute weights, if they are gathered for each use. ahead: those, if that happens before the unit runs.
    raw: unsharded gradients. buffer: the buffer of these. beside: what is reduced while the next unit's backward runs.
    done: reduced gradients. before: sums of earlier microbatches, which the reduced gradients replace. sums: sums of
    earlier microbatches that stay beside the reduced gradients. updated: new main weights beside the old ones. reduced:
    results of the reduction at the end of a step, beside its inputs. freed: whole compute weights that backward frees.
    sliced, copied: slices and copies of whole weights in a loop, see above.
    """

    gathered: int
    ahead: int
    raw: int
    buffer: int
    beside: int
    done: int
    before: int
    sums: int = 0
    updated: int = 0
    reduced: int = 0
    freed: int = 0
    sliced: int = 0
    copied: int = 0

    @staticmethod
    def of(unit: StepUnit, microbatches: int, runtime: str, prefetch: int) -> _Sizes:
        groups = unit.groups
        trained = [group for group in groups if group.shape.trainable]
        gathered = sum(g.size(0) * g.compute_bytes for g in groups if g.strategy.parameters)
        if runtime == "jax":
            collected = sum(g.size(g.strategy.gradients) * g.grad_bytes for g in trained)
            late = [g for g in trained if g.strategy.gradients < g.mesh.ndim]
            whole = [g for g in groups if keeps_weights(g) and not g.strategy.parameters]
            return _Sizes(
                gathered=gathered,
                ahead=gathered if prefetch else 0,
                raw=sum(g.numel * g.compute_bytes for g in trained),
                buffer=0,
                beside=sum(g.size(0) * g.reduce_bytes for g in trained if g.strategy.gradients)
                if prefetch
                else 0,
                done=collected,
                before=0,
                sums=collected if microbatches > 1 else 0,
                updated=sum(g.size(g.strategy.optimizer) * g.main_bytes for g in trained),
                reduced=sum(g.size(g.strategy.optimizer) * g.grad_bytes for g in late),
                freed=sum(g.size(0) * g.compute_bytes for g in whole) if microbatches == 1 else 0,
                sliced=sum(g.size(0) * g.compute_bytes for g in groups if not g.strategy.parameters)
                if unit.stack
                else 0,
                copied=sum(g.size(0) * g.main_bytes for g in groups if not g.strategy.optimizer)
                if unit.stack
                else 0,
            )
        buffer = sum(g.size(0) * g.reduce_bytes for g in trained)
        return _Sizes(
            gathered=gathered,
            ahead=gathered if prefetch else 0,
            raw=sum(g.numel * g.compute_bytes for g in trained),
            buffer=buffer,
            beside=buffer if prefetch else 0,
            done=sum(g.size(g.strategy.optimizer) * g.grad_bytes for g in trained),
            before=sum(_left_before(g) for g in trained) if microbatches > 1 else 0,
        )


def _left_before(group: GroupBuffers) -> int:
    strategy = group.strategy
    # Without a reduction at the end of the step, each microbatch's sums are final.
    level = strategy.optimizer if strategy.gradients == group.mesh.ndim else strategy.gradients
    return group.size(level) * group.grad_bytes


@dataclass(frozen=True)
class _Step:
    """A segment: the units that run with it, innermost first, and the raw gradients that its backward makes of each."""

    path: str
    stack: str | None
    running: tuple[str, ...]
    kept: int
    forward: int
    backward: int
    raw: Mapping[str, int]


def step_peak(
    model: Model,
    units: Sequence[StepUnit],
    rest: AtRest,
    runtime: str,
    batch: int,
    length: int,
    microbatches: int,
    prefetch: int,
    staged: int = 0,
) -> Peak:
    """The worst moment of a step of ``microbatches`` of ``batch`` sequences; ``units`` with the root last.

    staged: bytes of moments that the update has on the device beside those at rest, see ``Optimizer.staged``.
    """
    sizes = {unit.path: _Sizes.of(unit, microbatches, runtime, prefetch) for unit in units}
    steps = list(_steps(model, units, batch, length))
    kept = rest.compute_weights.allocated
    if runtime == "jax":
        groups = [group for unit in units for group in unit.groups if keeps_weights(group)]
        kept = sum(group.size(group.strategy.parameters) * group.compute_bytes for group in groups)
    always = {
        "main_weights": rest.main_weights.allocated,
        "moments": rest.moments.allocated,
        "compute_weights": kept,
    }
    moments = (
        *_forward(steps, sizes),
        *_backward(steps, sizes, kept),
        *([_reduction(sizes)] if runtime == "jax" else []),
        _update(sizes, units, runtime, staged),
    )
    moment, terms = max(moments, key=lambda one: sum({**always, **one[1]}.values()))
    named = {name: {**always, **terms}.get(name, 0) for name in TERMS}
    return Peak(moment, named, bool(model.activations))


Moment = tuple[str, dict[str, int]]


def _forward(steps: Sequence[_Step], sizes: Mapping[str, _Sizes]) -> Iterator[Moment]:
    before = sum(one.before + one.sums for one in sizes.values())
    for place, step in enumerate(steps):
        following = steps[place + 1].running if place + 1 < len(steps) else ()
        yield (
            f"forward of {_title(step)}",
            {
                "gathered_weights": _gathered(step, following, sizes),
                "gradients": before,
                "activations": _saved(steps, place),
                "segment": step.forward,
            },
        )


def _backward(steps: Sequence[_Step], sizes: Mapping[str, _Sizes], kept: int) -> Iterator[Moment]:
    made: Counter[str] = Counter()
    reducing = 0
    for place in reversed(range(len(steps))):
        step = steps[place]
        following = steps[place - 1].running if place else ()
        done = [path for path, one in sizes.items() if one.raw and made[path] >= one.raw]
        # A loop's results are allocated from its start, and its inputs until its end.
        looping = [path for path in sizes if _is_inside(path, step.stack)]
        gradients = sum(
            one.sums + (one.done if path in done or path in looping else one.before)
            for path, one in sizes.items()
        )
        made.update(step.raw)
        open_units = [path for path in sizes if made[path] and path not in done]
        yield (
            f"backward of {_title(step)}",
            {
                "gathered_weights": _gathered(step, following, sizes),
                "gradients": gradients,
                "gradient_buffers": reducing
                + sum(_collecting(made[path], sizes[path]) for path in open_units),
                "activations": _saved(steps, place),
                "segment": step.backward - (step.kept if step.stack else 0),
                "compute_weights": kept - sum(sizes[path].freed for path in done if path not in looping),
            },
        )
        finished = [sizes[path] for path in open_units if made[path] >= sizes[path].raw]
        if finished:
            reducing = finished[-1].beside


def _reduction(sizes: Mapping[str, _Sizes]) -> Moment:
    """The moment after the last backward in JAX: no activations are left, and the remaining gradients are reduced."""
    held = sum(one.sums or one.done for one in sizes.values())
    reduced = sum(one.reduced for one in sizes.values())
    return "reduction", {"compute_weights": 0, "gradients": held + reduced}


def _update(sizes: Mapping[str, _Sizes], units: Sequence[StepUnit], runtime: str, staged: int) -> Moment:
    if runtime == "torch":
        return "update", {"gradients": sum(one.done for one in sizes.values()), "segment": staged}
    # A program of its own, which holds no compute weights.
    trained = [group for unit in units for group in unit.groups if group.shape.trainable]
    gradients = sum(group.size(group.strategy.optimizer) * group.grad_bytes for group in trained)
    largest = max((one.updated for one in sizes.values()), default=0)
    return "update", {"compute_weights": 0, "gradients": gradients, "segment": largest + staged}


def _collecting(made: int, unit: _Sizes) -> int:
    """Bytes of unreduced gradients: single tensors up to half of the unit, then the unit's buffer as well (PyTorch)."""
    return made if 2 * made <= unit.raw or not unit.buffer else unit.raw // 2 + unit.buffer


def _saved(steps: Sequence[_Step], place: int) -> int:
    """Activations of the segments before, and of all layers of the loop that runs."""
    stack = steps[place].stack
    return sum(
        step.kept for other, step in enumerate(steps) if other < place or (stack and step.stack == stack)
    )


def _gathered(step: _Step, following: Sequence[str], sizes: Mapping[str, _Sizes]) -> int:
    own = sum(sizes[path].sliced for path in step.running)
    looped = sum(one.copied for one in sizes.values()) if step.stack else 0
    ahead = sum(sizes[path].ahead for path in {*following} - {*step.running})
    return own + looped + ahead + sum(sizes[path].gathered for path in {*step.running})


def _is_inside(path: str, stack: str | None) -> bool:
    return stack is not None and path.startswith(f"{stack}.")


def _title(step: _Step) -> str:
    return step.path or "the root"


def _steps(model: Model, units: Sequence[StepUnit], batch: int, length: int) -> Iterator[_Step]:
    by_path = {unit.path: unit for unit in units}
    places = dict(_places(model, by_path)) or {path: _Place() for path in by_path}
    raw = _raw_gradients(units, places)
    for path, place in places.items():
        around = [outer for outer in outward(path) if outer in by_path]
        apart = [part.path for part in place.apart]
        inside = [
            inner
            for inner in by_path
            if path and inner != path and path in outward(inner) and not set(apart) & set(outward(inner))
        ]
        owner = by_path[around[0]]
        needed = SegmentBytes()
        if place.segment is not None:
            dtypes = [group.shape.dtypes.compute for group in owner.groups] or ["float32"]
            needed = place.segment.bytes_for(batch, length, dtypes[0])
            others = sum(part.bytes_for(batch, length, dtypes[0]).saved for part in place.apart)
            needed = replace(
                needed,
                saved=max(0, needed.saved - others),
                forward=max(0, needed.forward - others),
                backward=max(0, needed.backward - others),
            )
        if owner.recompute:
            needed = replace(needed, saved=needed.input, backward=needed.again)
        stack = next((unit.stack for unit in units if _is_inside(path, unit.stack)), None)
        yield _Step(path, stack, (*inside, *around), needed.saved, needed.forward, needed.backward, raw[path])


@dataclass(frozen=True)
class _Place:
    """A segment, and the parts of it that are places of their own."""

    segment: Segment | None = None
    apart: tuple[Segment, ...] = ()


def _places(model: Model, by_path: Mapping[str, StepUnit]) -> Iterator[tuple[str, _Place]]:
    """Segments in the order of forward; parts that are units follow the rest of theirs."""
    for segment in model.activations:
        owner = by_path[next(path for path in outward(segment.path) if path in by_path)]
        # A segment that is recomputed as a whole saves nothing of its parts.
        apart = () if owner.recompute else tuple(part for part in segment.parts if part.path in by_path)
        yield segment.path, _Place(segment, apart)
        for part in apart:
            yield part.path, _Place(part)


def _raw_gradients(units: Sequence[StepUnit], segments: Mapping[str, _Place]) -> dict[str, Counter[str]]:
    """For each segment, bytes of unreduced gradients by unit; parameters outside of all segments go with the last."""
    last = list(segments)[-1]
    found: dict[str, Counter[str]] = {path: Counter() for path in segments}
    for unit in units:
        for group in unit.groups:
            if group.shape.trainable:
                for slot in group.layout.slots:
                    full = f"{unit.path}.{slot.name}".lstrip(".")
                    holders = [path for path in outward(full) if path in segments and path]
                    found[holders[0] if holders else last][unit.path] += slot.numel * group.compute_bytes
    return found
