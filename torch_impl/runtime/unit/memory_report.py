"""Bytes that a sharded module holds on this rank, by kind, measured from the live storages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from bridge.core.text import human_bytes
from bridge.core.views import Viewed
from torch_impl.dtensor.local import local_of, plain_parts
from torch_impl.runtime.unit.group import ParameterGroup


@dataclass(frozen=True)
class HostMemory:
    """This rank's bytes in the host's memory, by the kinds of ``MemoryReport``."""

    main_weights: int = 0
    gradients: int = 0
    moments: int = 0
    padding: int = 0

    @property
    def total(self) -> int:
        return self.main_weights + self.gradients + self.moments


@dataclass(frozen=True, repr=False)
class MemoryReport(Viewed):
    """Bytes on this rank's device. ``padding``: the part of ``main_weights`` without parameters.

    With ``store_param_remainders=True`` ``main_weights`` are the remainders; the rest is in ``compute_weights``.

    ``on_host``: bytes in the host's memory instead, by ``CPUOffloadPolicy`` or
    ``offload_fraction``, and ``host`` their total; neither is in ``total``. On a mesh of CPUs both
    are the same kind of memory, but are still counted separately.
    """

    main_weights: int
    compute_weights: int
    gradients: int
    moments: int
    padding: int
    on_host: HostMemory = HostMemory()

    @property
    def total(self) -> int:
        return self.main_weights + self.compute_weights + self.gradients + self.moments

    @property
    def host(self) -> int:
        return self.on_host.total

    def summary(self) -> str:
        """One line."""
        host = f", and {human_bytes(self.host)} in host memory" if self.host else ""
        return f"{human_bytes(self.total)} on this rank's device{host}"

    def __str__(self) -> str:
        rows = {
            "main weights": self.main_weights,
            "  of which padding": self.padding,
            "compute weights": self.compute_weights,
            "gradients": self.gradients,
            "moments": self.moments,
            "total": self.total,
        }
        if self.host:
            rows |= {
                "in host memory": self.host,
                "  main weights": self.on_host.main_weights,
                "  gradients": self.on_host.gradients,
                "  moments": self.on_host.moments,
            }
        return "\n".join(f"{label:20}{value:>16,} B" for label, value in rows.items())


def memory_report(groups: Iterable[ParameterGroup], optimizer: torch.optim.Optimizer | None) -> MemoryReport:
    """Measure ``groups``; moments are all their optimizer state in the shape of a parameter.

    TypeError for anything but an optimizer.
    """
    if optimizer is not None and not hasattr(optimizer, "state"):
        raise TypeError(f"memory_report: expected an optimizer or None, got {type(optimizer).__name__}")
    weights: list[torch.Tensor] = []
    device, host = Counter[str](), Counter[str]()
    # Tells which parameters' state an optimizer keeps on the host, if it can.
    offloads: Callable[[torch.Tensor], bool] = getattr(optimizer, "offloads", lambda param: False)
    for group in groups:
        # Shapes only: storages of meta tensors report bytes that do not exist.
        if group.weights.on_meta:
            continue
        own = device if group.host is None else host
        main = _storage_bytes(group.weights.main_tensors)
        own["main_weights"] += main
        own["padding"] += main - group.weights.real_bytes
        if group.weights.separate:
            weights += group.weights.compute_tensors
        if group.weights.resident is not None:
            weights.append(group.weights.resident)
        held = [local_of(p.grad) for p in group.params if p.grad is not None]
        if group.host is None:
            device["gradients"] += _storage_bytes(held + group.gradient.collecting)
        else:
            device["gradients"] += _storage_bytes(group.gradient.collecting)
            host["gradients"] += _storage_bytes(held)
        if optimizer is not None:
            away = [param for param in group.params if group.host is not None or offloads(param)]
            here = set(group.params).difference(away)
            device["moments"] += _storage_bytes(_moments(optimizer, here))
            host["moments"] += _storage_bytes(_moments(optimizer, away))
    return MemoryReport(
        device["main_weights"],
        _storage_bytes(weights),
        device["gradients"],
        device["moments"],
        device["padding"],
        HostMemory(**host),
    )


def _moments(
    optimizer: torch.optim.Optimizer, params: Iterable[torch.nn.Parameter]
) -> Iterator[torch.Tensor]:
    for param in params:
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and name != "step":
                yield from plain_parts(local_of(value))


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {id(s): s for s in (t.untyped_storage() for t in tensors)}
    return sum({s.data_ptr(): s.nbytes() for s in storages.values()}.values())
