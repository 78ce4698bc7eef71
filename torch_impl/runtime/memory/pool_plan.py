"""Plans which buffers of a training step share memory, from the times when each is in use.

Compute weights and gradient buffers of equal size share a *slot* if they are never in use at the same time. Weights are
used twice per step, in the same slot, because autograd keeps views of it. Time counts the beginnings and ends of uses::

    weights a   |####....####|      slot 0   |aaa-ccc..ccc-aaa|      a, b, c  in use by
    weights b   |..########..|      slot 1   |..bbbb....bbbb..|      -        kept for the next use
    weights c   |....####....|                                       .        no memory

A slot keeps its memory between two uses in one pass (forward or backward), unless this would raise
the pass's peak of allocated bytes above its peak of used bytes. So planned buffers never need more
memory than buffers that are allocated for each use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bridge.core.text import first_lines

Span = tuple[int, int]
_MAX_LISTED = 40
_COLUMNS = 96


@dataclass(frozen=True)
class Lifetime:
    """When a buffer is in use in a step: for each span, from event ``start`` to before ``end``.

    ``shares``: it may share memory; otherwise it only counts in the peaks that no slot may raise.
    """

    name: str
    purpose: str
    nbytes: int
    spans: tuple[Span, ...]
    shares: bool = True


@dataclass(frozen=True)
class BufferPlan:
    """Slots for the buffers of a step; ``str()`` draws it.

    ``slots``: for each of ``lifetimes`` the number of its slot, None for separate memory. ``memory``: for each slot,
    the spans in which it has memory. Backward begins at event ``turn``; the step has ``duration`` events.
    """

    lifetimes: tuple[Lifetime, ...]
    slots: tuple[int | None, ...]
    memory: tuple[tuple[Span, ...], ...]
    turn: int
    duration: int

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Size of each slot."""
        sizes = {slot: lifetime.nbytes for lifetime, slot in zip(self.lifetimes, self.slots, strict=True)}
        return tuple(sizes[slot] for slot in range(len(self.memory)))

    @property
    def allocations(self) -> int:
        """The number of allocations in a step."""
        own = [lifetime for lifetime, slot in zip(self.lifetimes, self.slots, strict=True) if slot is None]
        return sum(len(spans) for spans in self.memory) + sum(len(lifetime.spans) for lifetime in own)

    @property
    def peak(self) -> int:
        """The most bytes of these buffers and slots that are allocated at the same time."""
        return max(self._allocated(), default=0)

    def keeps(self, slot: int, backward: bool) -> tuple[bool, ...]:
        """For each use of a slot in a pass, in order: whether the slot keeps its memory after it."""
        ends = [end for _, end in self.memory[slot]]
        return tuple(end not in ends for _, end in self._uses(slot) if (end > self.turn) == backward)

    def __str__(self) -> str:
        return _draw(self)

    def _uses(self, slot: int) -> list[Span]:
        pairs = zip(self.lifetimes, self.slots, strict=True)
        return sorted(span for lifetime, its in pairs if its == slot for span in lifetime.spans)

    def _allocated(self) -> list[int]:
        """Bytes allocated at each time."""
        own = [lifetime for lifetime, slot in zip(self.lifetimes, self.slots, strict=True) if slot is None]
        spans = [(span, lifetime.nbytes) for lifetime in own for span in lifetime.spans]
        for held, nbytes in zip(self.memory, self.slot_bytes, strict=True):
            spans += [(span, nbytes) for span in held]
        return _sum(spans, self.duration)


def colour(objects: Sequence[Sequence[Span]]) -> list[int]:
    """A number from 0 on for each object, different for objects with overlapping spans.

    Uses the fewest numbers if every object has one span. Spans ``(start, end)`` do not include their end.
    """
    numbers = [0] * len(objects)
    taken: list[list[Span]] = []
    # In the order of first uses, a greedy choice is optimal for objects of one span each.
    for index in sorted(range(len(objects)), key=lambda index: min(objects[index])):
        number = 0
        while number < len(taken) and any(
            a < d and c < b for a, b in taken[number] for c, d in objects[index]
        ):
            number += 1
        if number == len(taken):
            taken.append([])
        taken[number] += objects[index]
        numbers[index] = number
    return numbers


def plan_buffers(lifetimes: Sequence[Lifetime], turn: int, duration: int) -> BufferPlan:
    """Let buffers of one purpose and size share slots; others have separate memory."""
    classes: dict[tuple[str, int], list[int]] = {}
    for index, lifetime in enumerate(lifetimes):
        if lifetime.shares:
            classes.setdefault((lifetime.purpose, lifetime.nbytes), []).append(index)
    slots: list[int | None] = [None] * len(lifetimes)
    uses: list[list[Span]] = []
    for members in classes.values():
        numbers = colour([lifetimes[index].spans for index in members])
        for number in sorted(set(numbers)):
            sharing = [index for index, its in zip(members, numbers, strict=True) if its == number]
            if len(sharing) > 1:
                for index in sharing:
                    slots[index] = len(uses)
                uses.append(sorted(span for index in sharing for span in lifetimes[index].spans))
    memory = _bridge(lifetimes, slots, uses, turn, duration)
    return BufferPlan(tuple(lifetimes), tuple(slots), memory, turn, duration)


def _bridge(
    lifetimes: Sequence[Lifetime],
    slots: Sequence[int | None],
    uses: Sequence[Sequence[Span]],
    turn: int,
    duration: int,
) -> tuple[tuple[Span, ...], ...]:
    """When each slot has memory: during uses, and between them if this raises no peak."""
    allocated = _sum([(span, lifetime.nbytes) for lifetime in lifetimes for span in lifetime.spans], duration)
    peaks = max(allocated[:turn], default=0), max(allocated[turn:], default=0)
    sizes = {
        slot: lifetime.nbytes for lifetime, slot in zip(lifetimes, slots, strict=True) if slot is not None
    }
    # Not over the turn: a pool releases unused memory when a pass ends.
    gaps = [
        (start - end, slot, end, start)
        for slot, spans in enumerate(uses)
        for (_, end), (start, _) in pairwise(spans)
        if (end > turn) == (start >= turn)
    ]
    kept: set[tuple[int, int]] = set()
    # The shortest first: each bridged gap saves one allocation, and short gaps block the least.
    for _, slot, end, start in sorted(gaps):
        limit = peaks[start >= turn] - sizes[slot]
        if all(allocated[time] <= limit for time in range(end, start)):
            kept.add((slot, end))
            for time in range(end, start):
                allocated[time] += sizes[slot]
    memory = []
    for slot, spans in enumerate(uses):
        held: list[Span] = []
        for start, end in spans:
            if held and (slot, held[-1][1]) in kept:
                start = held.pop()[0]
            held.append((start, end))
        memory.append(tuple(held))
    return tuple(memory)


def _sum(spans: Sequence[tuple[Span, int]], duration: int) -> list[int]:
    """Sum of the weights of the spans that contain each time."""
    changes = [0] * (duration + 1)
    for (start, end), weight in spans:
        changes[start] += weight
        changes[end] -= weight
    return list(accumulate(changes[:duration]))


def _draw(plan: BufferPlan) -> str:
    """Slots as rows, time as columns, one letter for each unit."""
    names = list(dict.fromkeys(lifetime.name for lifetime in plan.lifetimes))
    letters = {name: chr(ord("a") + index % 26) for index, name in enumerate(names)}
    members: list[tuple[str, int, list[Lifetime], tuple[Span, ...]]] = []
    for slot, held in enumerate(plan.memory):
        sharing = [lifetime for lifetime, its in zip(plan.lifetimes, plan.slots, strict=True) if its == slot]
        members.append((f"{sharing[0].purpose} {slot}", sharing[0].nbytes, sharing, held))
    for lifetime, its in zip(plan.lifetimes, plan.slots, strict=True):
        if its is None:
            members.append((f"{lifetime.purpose} own", lifetime.nbytes, [lifetime], lifetime.spans))
    each = sum(len(lifetime.spans) for lifetime in plan.lifetimes)
    shared = sum(slot is not None for slot in plan.slots)
    lines = [
        f"{len(plan.memory)} slots for {shared} of {len(plan.lifetimes)} buffers, "
        f"{plan.allocations} instead of {each} allocations a step, at most {plan.peak:,} B at once"
    ]
    columns = min(_COLUMNS, plan.duration)
    turn = plan.turn * columns // max(plan.duration, 1)
    label = max((len(name) for name, *_ in members), default=0)
    lines.append(f"{'':{label}}  {'forward':{max(turn, 8)}}backward")
    for name, nbytes, sharing, held in members:
        line = ["."] * columns
        for spans, sign in [(held, "-")] + [(lifetime.spans, letters[lifetime.name]) for lifetime in sharing]:
            for start, end in spans:
                first, last = (time * columns // plan.duration for time in (start, end - 1))
                line[first : last + 1] = sign * (last + 1 - first)
        lines.append(f"{name:{label}} |{''.join(line)}| {nbytes:,} B")
    lines += first_lines([f"{letters[name]}  {name}" for name in names], _MAX_LISTED)
    return "\n".join(lines)
