"""Main weights and gradients in the host's memory: FSDP2's ``CPUOffloadPolicy``.

    host     |main weights|                          |.grad|  the optimizer updates here
                  | fetch                               ^ send
    device   |shard| -gather-> forward, backward -reduce-> |shard|

A gather begins with a copy of the own shard to the device, where it is cast or quantized. A
reduction ends with a copy of what it left to the host, where sums are divided. Between backwards
nothing of either is on the device, so sums of earlier microbatches wait on the host too, whole
where they were not reduced, and travel there and back. What HFSDP keeps of the parameters stays on
the device.

On a mesh of CPUs the same copies are made within its memory. Both are steps of ``comm.streams``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from torch_impl.comm.streams import Step

HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostMemory:
    """Where main weights and gradients lie. ``pinned``: transfers overlap the computation."""

    pinned: bool

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=HOST, pin_memory=self.pinned)

    def copy_of(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of a flat buffer, on the host when this returns."""
        return self.empty(values.numel(), values.dtype).copy_(values)

    def send(self, values: torch.Tensor) -> tuple[Step, torch.Tensor]:
        """What copies ``values``, as they are then, to the host; and where they will be."""
        # New memory each time: the gradient of the step before may still be the program's.
        home = self.empty(values.numel(), values.dtype)
        return ("send", partial(_copy, home, values)), home


def fetch(main: torch.Tensor, dtype: torch.dtype, device: torch.device) -> tuple[list[Step], torch.Tensor]:
    """What copies ``main`` from the host to ``device`` and casts it there; and where it will be."""
    # Made before the transfer starts: see ``streams`` on memory that outlives a step.
    arrived = torch.empty_like(main, device=device)
    steps: list[Step] = [("fetch", partial(_copy, arrived, main))]
    if dtype == main.dtype:
        return steps, arrived
    cast = torch.empty_like(arrived, dtype=dtype)
    return [*steps, ("gather", partial(_copy, cast, arrived))], cast


def _copy(target: torch.Tensor, source: torch.Tensor, async_op: bool) -> None:
    # Casts would make a transfer wait; there are none between host and device.
    target.copy_(source, non_blocking=True)
