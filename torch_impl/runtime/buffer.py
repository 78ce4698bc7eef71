"""The flat buffers of a group in one contiguous 1-D tensor, whole or one rank's shards of them.

    buffer 0, 4 shards of 4       buffer 1, 4 of 2
    |w w w w w w|b b|u u u u|. . . .|v v v v v v|. .|    whole
            |w w|b b|                    |v v|           what rank 1 holds, one after the other

Views are taken once and stay valid while the storage behind them is freed and allocated again, which is what lets
tensors saved by autograd survive a reshard.
"""

from __future__ import annotations

import torch

from bridge.sharding.layout import Layout
from bridge.sharding.rows import local_shape


class FlatBuffer:
    """``layout.padded_size`` zeros when ``rank`` is None, else ``layout.shard_size`` zeros: the shards of ``rank``."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, rank: int | None) -> None:
        size = layout.padded_size if rank is None else layout.shard_size
        self.layout, self.rank = layout, rank
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        self.allocated = True
        self.nbytes = size * self.flat.element_size()
        self._storage = self.flat.untyped_storage()

    def view(self, name: str) -> torch.Tensor:
        """The parameter in its own shape, or this rank's rows of it in their local shape."""
        slot = self.layout.slot(name)
        if self.rank is None:
            start = self.layout.start(name)
            return self.flat[start : start + slot.numel].view(slot.shape)
        r0, r1 = self.layout.row_range(name, self.rank)
        shape = local_shape(slot.shape, r1 - r0)
        if r0 == r1:
            return self.flat[:0].view(shape)
        start = self.layout.shard_start(name, self.rank)
        return self.flat[start : start + (r1 - r0) * slot.row_size].view(shape)

    def allocate(self) -> None:
        """Give the buffer its memory; the contents are arbitrary."""
        # resize_ takes new memory and copies, also to the same size.
        if not self.allocated:
            self._storage.resize_(self.nbytes)
            self.allocated = True

    def free(self) -> None:
        """Release the memory; views stay, and must not be read until ``allocate`` and a refill."""
        self._storage.resize_(0)
        self.allocated = False

    def move(self, storage: torch.UntypedStorage) -> None:
        """Lie in other memory, which is allocated if it is not; views must be taken anew."""
        if storage.nbytes() < self.nbytes:
            storage.resize_(self.nbytes)
        self.allocated = True
        # Later steps could not write to what is made in inference mode.
        with torch.inference_mode(False):
            flat = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
            self.flat, self._storage = flat.set_(storage, 0, (self.flat.numel(),), (1,)), storage
