"""The memory that units share, so that it is not allocated twice per step: see the package's note.

All decisions are local: they neither issue nor order collectives.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from torch_impl.runtime.memory.pool_plan import BufferPlan, Lifetime, Span, plan_buffers

# Programs that alternate between a few kinds of steps, such as microbatches, keep one plan.
_REMEMBERED = 4


class Pooled(Protocol):
    """A buffer that the pool records, and that may be stored in a slot."""

    purpose: str
    nbytes: int

    @property
    def name(self) -> str: ...

    @property
    def shares(self) -> bool: ...

    def lose_contents(self) -> None: ...


class Slot:
    """Memory for one buffer at a time; ``keeps``: by pass, see ``BufferPlan.keeps``."""

    def __init__(
        self, nbytes: int, device: torch.device, keeps: tuple[Sequence[bool], Sequence[bool]]
    ) -> None:
        self.storage = torch.UntypedStorage(0, device=device)
        self._nbytes, self._keeps = nbytes, keeps
        self._expected: Iterator[bool] = iter(())
        # Weak: a deleted model frees its memory at once, and its pool may live on in another model.
        self._user: weakref.ref[Pooled] | None = None
        self._contents: weakref.ref[Pooled] | None = None

    @property
    def user(self) -> Pooled | None:
        """The buffer that is in use in this slot."""
        return None if self._user is None else self._user()

    def take(self, user: Pooled) -> bool:
        """Use the slot, which then has memory; False if another buffer uses it."""
        if self.user is not None and self.user is not user:
            return False
        # The previous user may have views of the slot in a graph.
        before = None if self._contents is None else self._contents()
        if before is not None and before is not user:
            before.lose_contents()
        self._user = self._contents = weakref.ref(user)
        # resize_ allocates and copies, even if the size stays the same.
        if self.storage.nbytes() == 0:
            self.storage.resize_(self._nbytes)
        return True

    def leave(self, user: Pooled) -> None:
        """End a use; the memory stays if the plan says so."""
        if self.user is user:
            self._user = None
            # A use that is not in the plan leaves no memory behind.
            if not next(self._expected, False):
                # In place, so that every view of the slot remains a view of this storage.
                self.storage.resize_(0)

    def begin(self, backward: bool) -> None:
        """A pass begins."""
        self.rest()
        self._expected = iter(self._keeps[backward])

    def rest(self) -> None:
        """A pass ended: release memory that is not in use."""
        self._expected = iter(())
        if self.user is None:
            self.storage.resize_(0)

    def retire(self) -> None:
        """The plan is replaced: keep no memory for uses that are still to come."""
        self._keeps = (), ()
        self.rest()


class _Trace(NamedTuple):
    """The uses of one step, by buffer; backward began at event ``turn``."""

    uses: dict[weakref.ref[Pooled], tuple[Span, ...]]
    turn: int
    duration: int


class BufferPool:
    """Records steps of units below one root, and assigns slots once two steps were alike."""

    def __init__(self, device: torch.device) -> None:
        self.plan: BufferPlan | None = None
        self.enabled = True
        self._device = device
        self._planned: _Trace | None = None
        self._recent: deque[_Trace] = deque(maxlen=_REMEMBERED)
        # By weak reference: a record of a step must not keep buffers of a deleted model.
        self._slots: dict[weakref.ref[Pooled], Slot] = {}
        self._open: dict[weakref.ref[Pooled], int] = {}
        self._closed: dict[weakref.ref[Pooled], tuple[Span, ...]] = {}
        self._time = 0
        self._turn: int | None = None

    def enable(self, enabled: bool) -> None:
        """With False, buffers get separate memory from the next change of main weights on."""
        self.enabled = enabled
        self._recent.clear()
        self._replace_plan(None, None)

    def slot_of(self, buffer: Pooled) -> Slot | None:
        """The slot that the plan assigns to a buffer; None for separate memory."""
        return self._slots.get(weakref.ref(buffer))

    def begin_use(self, buffer: Pooled) -> None:
        """Record that a buffer is in use from now on."""
        # Weights that are gathered again while they are shown remain in one use.
        if self._open.setdefault(weakref.ref(buffer), self._time) == self._time:
            self._time += 1

    def end_use(self, buffer: Pooled) -> None:
        """Record that a buffer is no longer in use."""
        reference = weakref.ref(buffer)
        start = self._open.pop(reference, None)
        if start is not None:
            self._closed[reference] = (*self._closed.get(reference, ()), (start, self._time))
            self._time += 1

    def begin_forward(self) -> None:
        """An outermost forward begins, and a new record."""
        self._open, self._closed, self._time, self._turn = {}, {}, 0, None
        for slot in self._distinct_slots():
            slot.begin(backward=False)

    def begin_backward(self) -> None:
        """An outermost backward begins."""
        self._turn = self._time
        for slot in self._distinct_slots():
            slot.begin(backward=True)

    def end_backward(self) -> None:
        """The outermost backward and the record end: buffers that are still in use are not pooled."""
        if self._turn is not None and self.enabled:
            closed = {ref: spans for ref, spans in self._closed.items() if ref not in self._open}
            self._compare(_Trace(closed, self._turn, self._time))
        self._turn = None
        # Slots that were to be used again in this pass have no use before the next forward.
        self.rest()

    def rest(self) -> None:
        """Release all memory that is not in use."""
        for slot in self._distinct_slots():
            slot.rest()

    def _distinct_slots(self) -> list[Slot]:
        return list(dict.fromkeys(self._slots.values()))

    def _compare(self, trace: _Trace) -> None:
        known = [*self._recent, trace]
        self._recent.append(trace)
        # Equal to any earlier record, because a program may alternate between kinds of steps.
        repeated = [record for index, record in enumerate(known) if record in known[:index]]
        if self._planned not in known and repeated:
            self._plan_slots(max(repeated, key=lambda record: record.duration))

    def _plan_slots(self, trace: _Trace) -> None:
        users = {
            ref: (buffer, spans)
            for ref, spans in trace.uses.items()
            if (buffer := ref()) is not None and buffer.nbytes
        }
        lifetimes = [
            Lifetime(buffer.name, buffer.purpose, buffer.nbytes, spans, buffer.shares)
            for buffer, spans in users.values()
        ]
        plan = plan_buffers(lifetimes, trace.turn, trace.duration)
        self._replace_plan(trace, plan)
        slots = [
            Slot(nbytes, self._device, (plan.keeps(number, False), plan.keeps(number, True)))
            for number, nbytes in enumerate(plan.slot_bytes)
        ]
        pairs = zip(users, plan.slots, strict=True)
        self._slots = {ref: slots[number] for ref, number in pairs if number is not None}

    def _replace_plan(self, trace: _Trace | None, plan: BufferPlan | None) -> None:
        for slot in self._distinct_slots():
            slot.retire()
        self._slots, self._planned, self.plan = {}, trace, plan
