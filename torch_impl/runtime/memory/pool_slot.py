"""A slot of the pool: memory that buffers of one size use in turn, as ``pool_plan`` has planned it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class SlotUser(Protocol):
    """A buffer that may lie in a slot."""

    def lost(self) -> None:
        """Another user's contents replace those of this one."""
        ...


class Slot:
    """Memory of ``nbytes`` for one user at a time; ``keeps`` is by pass, see ``BufferPlan.keeps``."""

    def __init__(
        self, nbytes: int, device: torch.device, keeps: tuple[Sequence[bool], Sequence[bool]]
    ) -> None:
        self.storage = torch.UntypedStorage(0, device=device)
        self._nbytes, self._keeps = nbytes, keeps
        self._expected: Iterator[bool] = iter(())
        self._user: weakref.ref[SlotUser] | None = None
        self._contents: weakref.ref[SlotUser] | None = None

    @property
    def user(self) -> SlotUser | None:
        """Whose buffer is in use here."""
        return None if self._user is None else self._user()

    def take(self, user: SlotUser) -> bool:
        """Use the slot, which then has memory; False if another one does."""
        if self.user is not None and self.user is not user:
            return False
        # Whoever was here last may have views of the slot in a graph.
        before = None if self._contents is None else self._contents()
        if before is not None and before is not user:
            before.lost()
        self._user = self._contents = weakref.ref(user)
        if self.storage.nbytes() == 0:
            self.storage.resize_(self._nbytes)
        return True

    def leave(self, user: SlotUser) -> None:
        """End a use; the memory stays if the plan says so."""
        if self.user is user:
            self._user = None
            # A use that the plan does not know of leaves no memory behind.
            if not next(self._expected, False):
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
        """The plan is replaced: keep no memory for those that still come."""
        self._keeps = (), ()
        self.rest()
