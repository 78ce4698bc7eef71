"""Bytes that a sharded module holds on this rank, by kind, read from the live storages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torch_impl.dtensor.local import local_of
from torch_impl.runtime.group import ParameterGroup


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank. ``padding`` is the part of ``main_weights`` that belongs to no parameter."""

    main_weights: int
    compute_weights: int
    gradients: int
    moments: int
    padding: int

    @property
    def total(self) -> int:
        return self.main_weights + self.compute_weights + self.gradients + self.moments

    def __str__(self) -> str:
        kinds = {
            "main weights": self.main_weights,
            "  of which padding": self.padding,
            "compute weights": self.compute_weights,
            "gradients": self.gradients,
            "moments": self.moments,
            "total": self.total,
        }
        return "\n".join(f"{kind:20}{value:>16,} B" for kind, value in kinds.items())


def memory_report(groups: Iterable[ParameterGroup], optimizer: torch.optim.Optimizer | None) -> MemoryReport:
    """Measure ``groups``; moments are all optimizer state of theirs in the shape of a parameter."""
    weights: list[torch.Tensor] = []
    main = gradients = moments = padding = 0
    for group in groups:
        # Shapes only: storages of meta tensors report bytes that nobody has.
        if group.on_meta:
            continue
        main += group.main.flat.untyped_storage().nbytes()
        real = sum(local_of(param).numel() for param in group.params)
        padding += (group.main.flat.numel() - real) * group.main.flat.element_size()
        if group.compute is not group.main:
            weights.append(group.compute.flat)
        if group.gather.resident is not None:
            weights.append(group.gather.resident)
        held = [local_of(p.grad) for p in group.params if p.grad is not None]
        gradients += _storage_bytes(held + group.gradient.collecting)
        if optimizer is not None:
            moments += _storage_bytes(
                local_of(value)
                for param in group.params
                for name, value in optimizer.state.get(param, {}).items()
                if isinstance(value, torch.Tensor) and name != "step"
            )
    return MemoryReport(main, _storage_bytes(weights), gradients, moments, padding)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {id(s): s for s in (t.untyped_storage() for t in tensors)}
    return sum({s.data_ptr(): s.nbytes() for s in storages.values()}.values())
