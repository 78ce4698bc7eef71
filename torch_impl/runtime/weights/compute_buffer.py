"""The memory of whole weights: allocated before a gather and freed after use, or a pool's slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from bridge.core.sharding.layout.layout import Layout
from torch_impl.dtensor.local import plain_parts
from torch_impl.runtime.ground import autograd
from torch_impl.runtime.ground.buffer import FlatBuffer
from torch_impl.runtime.memory.pool import Slot
from torch_impl.runtime.weights.context import UnitContext


class ComputeBuffer(FlatBuffer):
    """The whole compute weights of a group, in a slot or in separate memory.

    All memory of whole weights is allocated and freed here: ``allocate`` before a gather, ``settle`` before weights are
    read, ``free``. ``finish_gather`` ends a gather in progress. ``suffix`` distinguishes the groups of the unit.
    """

    purpose = "weights"
    shares = True

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        finish_gather: Callable[[], None],
        context: UnitContext,
        suffix: str,
    ) -> None:
        super().__init__(layout, dtype, device, rank=None)
        self.allocated = True
        self._context, self._suffix, self._finish_gather = context, suffix, finish_gather
        # Kept separately from ``flat``, which is sometimes in a slot's storage.
        self._own = self._storage = self.flat.untyped_storage()
        self._params: Sequence[nn.Parameter] = ()
        self._counted: list[torch.Tensor] = []
        self._movable = True
        self._slot: Slot | None = None
        self._aside: torch.Tensor | None = None
        self._versions: tuple[int, ...] | None = None

    def set_views(self, params: Sequence[nn.Parameter]) -> None:
        """Register the parameters over this buffer, in the order of the layout."""
        self._params = list(params)
        # Parameters that wrap their views, such as tensor-parallel DTensors, cannot get new views.
        self._movable = all(type(param) is nn.Parameter for param in params)
        # Modules that are cut over a model axis compute with the local tensors of their DTensors.
        parts = [part for param in params for part in (param, *plain_parts(param))]
        self._counted = list({id(part): part for part in parts}.values())

    @property
    def name(self) -> str:
        return self._context.name + self._suffix

    @property
    def aside(self) -> bool:
        return self._aside is not None

    def allocate(self, changed: bool) -> torch.Tensor:
        """Memory to gather into. ``changed``: the values will differ from the last gather's."""
        # Weights that cannot move have separate memory, which the plan need not know.
        if self._movable:
            self._context.schedule.pool.begin_use(self)
        self._aside = None
        # Graphs of the older values are invalid anyway, so moving now breaks no others.
        if changed:
            self._void_graphs()
            self._choose_slot()
        if self._slot is None:
            # resize_ allocates new memory and copies, even to the same size.
            if not self.allocated:
                self._storage.resize_(self.nbytes)
        elif not self._slot.take(self):
            self._aside = torch.empty_like(self.flat)
        # For other code the weights are allocated, whether they are in the slot or aside.
        self.allocated = True
        return self.flat if self._aside is None else self._aside

    def settle(self) -> None:
        """Move the contents to the parameters' memory; to be called before they are read."""
        if self._aside is not None:
            self._move_in(self._aside)
            self._aside = None
        # The contents are those that graphs have saved, so their versions are restored, too.
        if self._versions is not None:
            autograd.set_versions(self._counted, self._versions)
            self._versions = None

    def _move_in(self, contents: torch.Tensor) -> None:
        assert self._slot is not None
        user = self._slot.user
        # A forward reads the slot, so these weights move, which invalidates graphs over the slot.
        if isinstance(user, ComputeBuffer) and user is not self and not user.step_aside():
            self._void_graphs()
            self._move(None)
        else:
            self._slot.take(self)
        self.flat.copy_(contents)

    def step_aside(self) -> bool:
        """Leave the slot to another unit, and wait; False if these weights are being read."""
        # Autograd compares versions in backward only; a forward would read another unit's weights.
        if self._context.reads_weights:
            return False
        # A gather in progress still writes to the slot.
        self._finish_gather()
        assert self._slot is not None
        # On the current stream, after the gather and all earlier readers.
        self._aside = self.flat.clone()
        self.lose_contents()
        self._slot.leave(self)
        return True

    def free(self) -> None:
        """Release the memory of the whole weights; views stay, and the next gather fills them.

        Between two uses a slot keeps its memory if the plan says so, for the unit that comes next.
        """
        # Otherwise the gather would write to memory that others use by then.
        self._finish_gather()
        self._context.schedule.pool.end_use(self)
        self.lose_contents()
        self._aside = None
        self.allocated = False
        if self._slot is None:
            # The storage, not the tensor: autograd has saved views, which must show the weights again
            # when the backward's gather has filled the storage.
            self._storage.resize_(0)
        else:
            self._slot.leave(self)

    def lose_contents(self) -> None:
        """The contents are gone, or become another unit's: saved views must not be read."""
        # A slot may change users several times before it returns: the first versions count.
        if self._versions is None:
            self._versions = tuple(tensor._version for tensor in self._counted)
            torch.autograd.graph.increment_version(self._counted)

    def _void_graphs(self) -> None:
        # By two, since an increase by one marks lost contents.
        self._versions = None
        for _ in range(2):
            torch.autograd.graph.increment_version(self._counted)

    def _choose_slot(self) -> None:
        """Move to the planned slot if it is free; otherwise leave any slot that is in use."""
        slot = self._context.schedule.pool.slot_of(self)
        # A program may have deviated from the plan: a slot in use is not taken.
        if slot is not None and not slot.take(self):
            slot = None
        if slot is not self._slot:
            self._move(slot)

    def _move(self, slot: Slot | None) -> None:
        if self._slot is not None:
            self._slot.leave(self)
        self._slot = slot
        self._storage = self._own if slot is None else slot.storage
        if self._storage.nbytes() < self.nbytes:
            self._storage.resize_(self.nbytes)
        self.allocated = True
        # In inference mode, as in a first evaluation, the tensor could not be trained later.
        with torch.inference_mode(False):
            flat = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
            self.flat = flat.set_(self._storage, 0, (self.flat.numel(),), (1,))
            for layout_slot, param in zip(self.layout.slots, self._params, strict=True):
                # .data: modules and the program hold this parameter object, whose hooks must stay.
                param.data = self.view(layout_slot.name)
