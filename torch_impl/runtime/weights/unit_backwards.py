"""The backwards that a unit takes part in, and when one has computed the gradients of all inputs of the unit.

Calls of the unit are counted for that, not gradients of its parameters, since ranks may use different parameters.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torch_impl.runtime.ground import autograd


class UnitBackwards:
    """Backwards that a unit has joined and that have not ended; true if there are any."""

    def __init__(self) -> None:
        # By number; a dead reference: it raised.
        self._ends: dict[int, weakref.ref[Any]] = {}
        # Those calls whose outputs have gradients and whose inputs lack some, or of whose inputs nothing is known.
        self._open_calls: set[int] = set()
        self._forwards = 0
        self._makes_graph = self.needed_later = False

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, task: int) -> bool:
        return task in self._ends

    @property
    def raised(self) -> bool:
        """Whether there are any, and all of them have raised."""
        return bool(self._ends) and all(end() is None for end in self._ends.values())

    def count_forward(self) -> None:
        """A forward has begun whose backward may come."""
        self._forwards += 1

    def join(self, task: int, end: weakref.ref[Any]) -> None:
        """Take part in backward ``task``; ``end`` dies if it raises."""
        self._ends[task] = end
        # With create_graph, or in torch.func: gradients are computed as a part of a graph.
        self._makes_graph |= torch.is_grad_enabled()

    def outputs_reached(self, number: int, inputs: autograd.WatchedInputs) -> None:
        """Gradients have reached an output of call ``number``, or a gradient of its inputs."""
        # A call has several outputs; the inputs that take part are counted at the first.
        if number not in self._open_calls:
            self._open_calls.add(number)
            # Of gradients that leave the unit unseen, no hook would gather the weights again.
            self.needed_later |= not inputs.expect() and torch.is_grad_enabled()

    def inputs_done(self, number: int, seen: bool) -> bool:
        """The inputs of call ``number`` have their gradients; whether nothing of the unit is to come any more.

        ``seen``: a backward through these gradients would be noticed.
        """
        self.needed_later |= not seen
        self._open_calls.discard(number)
        # Another call's backward may be still to come. Counted calls, unlike gradients, are the same on all ranks.
        return bool(self._ends) and not self._open_calls and self._forwards <= 1

    def end(self, task: int) -> None:
        """Backward ``task`` has ended, which the unit may have dropped before."""
        self._ends.pop(task, None)

    def forget_calls(self) -> None:
        """No backward of the calls made until now is expected any more, but of those whose graph was extended."""
        self._open_calls.clear()
        if not self._makes_graph:
            self._forwards = 0
        self._makes_graph = self.needed_later = False

    def drop(self) -> None:
        """Forget all, whether they raised or not."""
        self._ends.clear()
        self._makes_graph = False
        self.forget_calls()
