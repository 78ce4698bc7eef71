"""Memory that units of one size use in turn, instead of each allocating its own twice a step.

The pool records when buffers are in use. When the record of a step comes again, the pool plans slots (see
``pool_plan``). From the next change of the main weights on, compute weights lie in their slots. A program may depart
from the plan at any time:

* A slot that is in use is not taken. Weights that are gathered ahead wait *aside*, in memory of their own. When their
  unit runs, the weights in the slot are moved aside instead, unless a forward is reading those.
* Weights move to another place only with changed values, or where a forward is reading their slot. Both void the graphs
  that saved the old ones.

Autograd keeps views of compute weights, which have no memory between forward and backward, or show another unit's
weights. That no backward computes with these does not rest on the plan. When weights are freed or lose their slot,
their versions advance, and come back with the contents. Until then autograd refuses the saved views. Every known entry
into a unit, forward or backward, brings the unit's contents back before it computes.

The decisions are local: they neither issue nor order collectives.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from torch_impl.comm.streams import Streams
from torch_impl.dtensor.local import plain_parts
from torch_impl.runtime.ground import autograd
from torch_impl.runtime.ground.buffer import FlatBuffer
from torch_impl.runtime.memory.pool_plan import BufferPlan, Lifetime, Span, plan_buffers
from torch_impl.runtime.memory.pool_slot import Slot

# Programs that alternate between some kinds of steps, such as microbatches, keep one plan.
_REMEMBERED = 4


class Pooled(Protocol):
    """A buffer that the pool records."""

    kind: str

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def shares(self) -> bool:
        """Whether the buffer may be in a slot."""
        ...


class Host(Protocol):
    """What a pooled buffer asks of its unit, at each use, since its root may change."""

    name: str

    @property
    def pool(self) -> BufferPool: ...

    @property
    def streams(self) -> Streams: ...

    @property
    def reads_weights(self) -> bool:
        """Whether the unit's compute weights may be read without another call of the runtime."""
        ...


class _Trace(NamedTuple):
    """The uses of one step, by buffer; backward began at ``turn``."""

    uses: dict[weakref.ref[Pooled], tuple[Span, ...]]
    turn: int
    duration: int


class BufferPool:
    """Records the steps of units below one root, and gives out slots; ``plan`` is None until two steps were alike."""

    def __init__(self, device: torch.device) -> None:
        self.plan: BufferPlan | None = None
        self._device = device
        self._enabled = True
        self._planned: _Trace | None = None
        self._recent: deque[_Trace] = deque(maxlen=_REMEMBERED)
        self._slots: dict[weakref.ref[Pooled], Slot] = {}
        self._open: dict[weakref.ref[Pooled], int] = {}
        self._closed: dict[weakref.ref[Pooled], tuple[Span, ...]] = {}
        self._time = 0
        self._turn: int | None = None

    @property
    def enabled(self) -> bool:
        return self._enabled

    def enable(self, enabled: bool) -> None:
        """With False, buffers get memory of their own, from the next change of the main weights on."""
        self._enabled = enabled
        self._recent.clear()
        self._replace(None, None)

    def slot_of(self, buffer: Pooled) -> Slot | None:
        """Where the plan puts a buffer; None for memory of its own."""
        return self._slots.get(weakref.ref(buffer))

    def began(self, buffer: Pooled) -> None:
        """Note that a buffer is in use from now on."""
        # Weights that are gathered again while they are shown stay in one use.
        if self._open.setdefault(weakref.ref(buffer), self._time) == self._time:
            self._time += 1

    def ended(self, buffer: Pooled) -> None:
        """Note that a buffer is in use no more."""
        reference = weakref.ref(buffer)
        start = self._open.pop(reference, None)
        if start is not None:
            self._closed[reference] = (*self._closed.get(reference, ()), (start, self._time))
            self._time += 1

    def forward_begins(self) -> None:
        """An outermost forward begins, and a new record."""
        self._open, self._closed, self._time, self._turn = {}, {}, 0, None
        self._begin(backward=False)

    def backward_begins(self) -> None:
        self._turn = self._time
        self._begin(backward=True)

    def backward_ended(self) -> None:
        """The outermost backward ended, and the record: buffers that are in use still are not pooled."""
        if self._turn is not None and self._enabled:
            closed = {ref: spans for ref, spans in self._closed.items() if ref not in self._open}
            self._compare(_Trace(closed, self._turn, self._time))
        self._turn = None
        self.rest()

    def rest(self) -> None:
        """Release all memory that is not in use."""
        for slot in self._distinct():
            slot.rest()

    def _begin(self, backward: bool) -> None:
        for slot in self._distinct():
            slot.begin(backward)

    def _distinct(self) -> list[Slot]:
        return list(dict.fromkeys(self._slots.values()))

    def _compare(self, trace: _Trace) -> None:
        known = [*self._recent, trace]
        self._recent.append(trace)
        # Equal to another record, not to the last one: a program may alternate between several kinds of steps.
        again = [one for index, one in enumerate(known) if one in known[:index]]
        if self._planned not in known and again:
            trace = max(again, key=lambda one: one.duration)
            users = {ref: (one, spans) for ref, spans in trace.uses.items() if (one := ref()) and one.nbytes}
            lifetimes = [
                Lifetime(one.name, one.kind, one.nbytes, spans, one.shares) for one, spans in users.values()
            ]
            plan = plan_buffers(lifetimes, trace.turn, trace.duration)
            self._replace(trace, plan)
            made = [
                Slot(nbytes, self._device, (plan.keeps(slot, False), plan.keeps(slot, True)))
                for slot, nbytes in enumerate(plan.slot_bytes)
            ]
            pairs = zip(users, plan.slots, strict=True)
            self._slots = {ref: made[slot] for ref, slot in pairs if slot is not None}

    def _replace(self, trace: _Trace | None, plan: BufferPlan | None) -> None:
        for slot in self._distinct():
            slot.retire()
        self._slots, self._planned, self.plan = {}, trace, plan


class PooledWeights:
    """The compute weights of a group, ``buffer``, in a slot or in memory of their own; ``params`` are its views.

    ``finish`` ends a gather that is under way. ``suffix`` tells the groups of ``host`` apart.
    """

    kind = "weights"
    shares = True

    def __init__(
        self,
        names: Sequence[str],
        buffer: FlatBuffer,
        params: Sequence[nn.Parameter],
        finish: Callable[[], None],
        host: Host,
        suffix: str,
    ) -> None:
        self._host, self._suffix = host, suffix
        self._names, self._params = list(names), list(params)
        self._buffer, self._finish = buffer, finish
        self._own = buffer.flat.untyped_storage()
        # Those that wrap their views, as DTensors of tensor parallelism do, cannot be given others.
        self._movable = all(type(param) is nn.Parameter for param in params)
        # Modules that are cut over a model axis compute with the local tensors of their DTensors.
        self._counted = list(
            {id(part): part for param in params for part in (param, *plain_parts(param))}.values()
        )
        self._slot: Slot | None = None
        self._aside: torch.Tensor | None = None
        self._versions: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self._host.name + self._suffix

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def aside(self) -> bool:
        """Whether the contents wait for their slot."""
        return self._aside is not None

    def prepare(self, changed: bool) -> torch.Tensor:
        """Memory to gather the weights into. ``changed``: their values will be others than at the last time."""
        # Weights that cannot move have memory of their own: the plan need not know of them.
        if self._movable:
            self._host.pool.began(self)
        self._aside = None
        # Graphs of the older values are void anyway, so this is the time to move without breaking any.
        if changed:
            self._void_graphs()
            self._choose()
        if self._slot is None:
            self._buffer.allocate()
            return self._buffer.flat
        # As far as others ask: the contents are in the slot or aside.
        self._buffer.allocated = True
        if self._slot.take(self):
            return self._buffer.flat
        self._aside = torch.empty_like(self._buffer.flat)
        return self._aside

    def settle(self) -> None:
        """Bring the contents to where the parameters are; to be called before they are read."""
        if self._aside is not None:
            self._move_in(self._aside)
            self._aside = None
        self._regained()

    def _move_in(self, contents: torch.Tensor) -> None:
        assert self._slot is not None
        user = self._slot.user
        # A forward reads the weights that are there, so these move, and graphs with views of the slot are void.
        if isinstance(user, PooledWeights) and user is not self and not user.step_aside():
            self._void_graphs()
            self._move(None)
        else:
            self._slot.take(self)
        self._buffer.flat.copy_(contents)

    def step_aside(self) -> bool:
        """Leave the slot to another unit, and wait; False if these weights are being read."""
        # Autograd compares versions in backward only; a forward would compute with the other unit's weights.
        if self._host.reads_weights:
            return False
        # A gather under way still writes to the slot.
        self._finish()
        assert self._slot is not None
        self._aside = self._buffer.flat.clone()
        self.lost()
        self._slot.leave(self)
        return True

    def release(self) -> None:
        """Forget the contents and free the memory."""
        self._host.pool.ended(self)
        self.lost()
        self._aside = None
        self._buffer.allocated = False
        if self._slot is None:
            self._buffer.free()
        else:
            self._slot.leave(self)

    def lost(self) -> None:
        """The contents are gone, or will be another unit's weights: saved views of them must not be read."""
        # A slot may pass through several hands before its first user comes back: the first versions count.
        if self._versions is None:
            self._versions = tuple(tensor._version for tensor in self._counted)
            torch.autograd.graph.increment_version(self._counted)

    def _regained(self) -> None:
        if self._versions is not None:
            autograd.set_versions(self._counted, self._versions)
            self._versions = None

    def _void_graphs(self) -> None:
        # By two, since one more is the mark of lost contents.
        self._versions = None
        for _ in range(2):
            torch.autograd.graph.increment_version(self._counted)

    def _choose(self) -> None:
        """Move to the slot of the plan, if it is free, else out of any that is in use."""
        slot = self._host.pool.slot_of(self)
        # A program may have departed from the plan: a slot in use is not taken.
        if slot is not None and not slot.take(self):
            slot = None
        if slot is not self._slot:
            self._move(slot)

    def _move(self, slot: Slot | None) -> None:
        if self._slot is not None:
            self._slot.leave(self)
        self._slot = slot
        self._buffer.move(self._own if slot is None else slot.storage)
        # As in FlatBuffer.move: a first evaluation may run in inference mode.
        with torch.inference_mode(False):
            for name, param in zip(self._names, self._params, strict=True):
                param.data = self._buffer.view(name)


class PooledGradient:
    """The buffer in which gradients of a group are collected and reduced: ``size`` elements."""

    kind = "gradients"

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, host: Host, suffix: str) -> None:
        self.nbytes, self.device = size * dtype.itemsize, device
        self._host, self._suffix = host, suffix
        self._size, self._dtype = size, dtype
        self._slot: Slot | None = None

    @property
    def name(self) -> str:
        return self._host.name + self._suffix

    @property
    def shares(self) -> bool:
        # Of what a backend reduces in a copy, memory of its own is free when the reduction has begun.
        return not self._host.streams.copies

    @property
    def pooled(self) -> bool:
        """Whether the buffer that was taken is the pool's, for others to use after its release."""
        return self._slot is not None

    def take(self) -> torch.Tensor:
        """The buffer, with arbitrary contents."""
        self._host.pool.began(self)
        flat = torch.empty(0, dtype=self._dtype, device=self.device)
        slot = self._host.pool.slot_of(self)
        # A program that departs from the plan may find the slot in use.
        if slot is not None and slot.take(self):
            self._slot = slot
            return flat.set_(slot.storage, 0, (self._size,), (1,))
        return flat.new_empty(self._size)

    def release(self) -> None:
        """The buffer is not needed any more; nothing if it was not taken."""
        self._host.pool.ended(self)
        if self._slot is not None:
            slot, self._slot = self._slot, None
            slot.leave(self)

    def lost(self) -> None:
        """Nobody reads a gradient buffer after its release."""
