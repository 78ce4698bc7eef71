"""Update tensors that are stored in CPU memory on the device: transfers overlap with updates of other batches.

    in       | batch 0 | batch 1 | batch 2 |
    compute            |0|       |1|       |2|
    out                  | batch 0 | batch 1 | batch 2 |

Both directions of the bus are busy at the same time, and at most two batches are on the device. After the last batch,
all tensors are back in CPU memory, so a reader of the state need not wait.

On a machine without a device, the CPU plays both parts: the same loop copies batches to other memory and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bridge.core.sharding.policy.optimizer_state import OffloadShare


@dataclass
class Batch:
    """Tensors in CPU memory and their copies on the device. ``event``: the end of the transfer in progress."""

    homes: Sequence[torch.Tensor]
    copies: list[torch.Tensor]
    event: Any = None


class Transfers(ABC):
    """The order of transfers and waits; subclasses implement them for a device."""

    def stream(self, batches: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """Yield copies of each batch on the device; the caller's changes to them are sent back at the next batch."""
        if not batches:
            return
        leaving: Batch | None = None
        ahead = self.fetch(batches[0])
        try:
            for following in (*batches[1:], None):
                batch = ahead
                self.await_fetched(batch)
                yield batch.copies
                self.send_back(batch)
                if leaving is not None:
                    # The next batch will reuse its memory.
                    self.await_sent(leaving)
                leaving = batch
                if following is not None:
                    ahead = self.fetch(following)
        finally:
            if leaving is not None:
                self.await_sent(leaving)

    @abstractmethod
    def fetch(self, homes: Sequence[torch.Tensor]) -> Batch:
        """Start copying to the device."""

    @abstractmethod
    def await_fetched(self, batch: Batch) -> None:
        """Make the computation wait for the copies."""

    @abstractmethod
    def send_back(self, batch: Batch) -> None:
        """Start copying back, after the computation enqueued until now."""

    @abstractmethod
    def await_sent(self, batch: Batch) -> None:
        """Return when the batch is in CPU memory."""


def transfers_for(device: torch.device) -> Transfers:
    """Transfers between CPU memory and ``device``."""
    return CudaTransfers(device) if device.type == "cuda" else CpuTransfers()


class CpuTransfers(Transfers):
    """Copies within CPU memory, complete when the starting call returns."""

    def fetch(self, homes: Sequence[torch.Tensor]) -> Batch:
        return Batch(homes, [home.clone() for home in homes])

    def await_fetched(self, batch: Batch) -> None:
        pass

    def send_back(self, batch: Batch) -> None:
        for home, copy in zip(batch.homes, batch.copies, strict=True):
            home.copy_(copy)

    def await_sent(self, batch: Batch) -> None:
        pass


class CudaTransfers(Transfers):
    """A stream for each direction; CPU memory must be pinned for transfers to overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def fetch(self, homes: Sequence[torch.Tensor]) -> Batch:
        with torch.cuda.stream(self._in):
            # Allocated on this stream, so ``_hold`` must tell the allocator which other stream reads.
            copies = [home.to(self._device, non_blocking=True) for home in homes]
            return Batch(homes, copies, self._in.record_event())

    def await_fetched(self, batch: Batch) -> None:
        compute = torch.cuda.current_stream(self._device)
        # The update reads copies that another stream fills.
        compute.wait_event(batch.event)
        self._hold(batch, compute)

    def send_back(self, batch: Batch) -> None:
        # The copies hold the update only when the preceding computation is done.
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for home, copy in zip(batch.homes, batch.copies, strict=True):
                home.copy_(copy, non_blocking=True)
            batch.event = self._out.record_event()
        self._hold(batch, self._out)

    def await_sent(self, batch: Batch) -> None:
        # The program next reads this memory without a stream, to save it or for the next step.
        batch.event.synchronize()

    def _hold(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        # The allocator knows only the stream on which memory was allocated.
        for copy in batch.copies:
            copy.record_stream(stream)


class Share(OffloadShare):
    """Selects tensors one by one so that their elements are ``fraction`` of all elements, to within one tensor."""

    def __init__(self, fraction: float) -> None:
        """Raises ValueError for a fraction outside [0, 1], TypeError for anything but a number."""
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise TypeError(f"offload_fraction: expected a number from 0 to 1, got {fraction!r}")
        if not 0 <= fraction <= 1:
            raise ValueError(f"offload_fraction: expected 0 to 1, got {fraction}")
        super().__init__(fraction)
