"""Main weights and gradients in the host's memory: FSDP2's ``CPUOffloadPolicy``.

    host     |main weights|                          |.grad|  the optimizer updates here
                  | fetch                               ^ send
    device   |shard| -gather-> forward, backward -reduce-> |shard|

A gather begins with a copy of this rank's shard to the device, where it is cast or quantized. A
reduction ends with a copy of its result to the host, where sums are divided. Between backwards
neither is on the device. So sums of earlier microbatches also wait on the host, whole if they are
not reduced, and are copied to the device and back. HFSDP's resident shards stay on the device.

On a mesh of CPUs the same copies are made within CPU memory. Both copies are steps of ``comm.streams``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from torch_impl.comm.streams import Step

HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostMemory:
    """The memory of main weights and gradients. ``pinned``: transfers overlap the computation."""

    pinned: bool

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=HOST, pin_memory=self.pinned)

    def copy_of(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of a flat buffer, complete on the host when this returns."""
        return self.empty(values.numel(), values.dtype).copy_(values)

    def send(self, values: torch.Tensor) -> tuple[Step, torch.Tensor]:
        """The step that copies ``values``, as they then are, to the host; and the copy."""
        # New memory each time: the program may still hold the gradient of the previous step.
        home = self.empty(values.numel(), values.dtype)
        return ("send", partial(_copy, home, values)), home


def fetch(main: torch.Tensor, dtype: torch.dtype, device: torch.device) -> tuple[list[Step], torch.Tensor]:
    """The steps that copy ``main`` from the host to ``device`` and cast it; and the result."""
    # Allocated before the transfer starts: see ``streams`` on memory that outlives a step.
    arrived = torch.empty_like(main, device=device)
    steps: list[Step] = [("fetch", partial(_copy, arrived, main))]
    if dtype == main.dtype:
        return steps, arrived
    cast = torch.empty_like(arrived, dtype=dtype)
    return [*steps, ("gather", partial(_copy, cast, arrived))], cast


def _copy(target: torch.Tensor, source: torch.Tensor, async_op: bool) -> None:
    # Casts would make a transfer wait, so there are none between host and device.
    target.copy_(source, non_blocking=True)
