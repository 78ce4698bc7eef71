"""Do tensors of different parameters share memory that they should not?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from torch_impl.diagnostics.model_tensors import named_main_parameters, named_units
from torch_impl.dtensor.tensor import local_of


class Overlap(NamedTuple):
    """Two tensors, such as "weight a" and "exp_avg of b", and how many bytes they share on this rank."""

    first: str
    second: str
    nbytes: int


class _Range(NamedTuple):
    start: int
    end: int
    label: str


def memory_overlaps(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple[Overlap, ...]:
    """Pairs of live weights, gradients and optimizer states that share memory on this rank; there should be none.

    Looks at main weights, compute weights that have memory, gradients, gradients that a backward is collecting, and the
    optimizer's tensors. Tensors that are not contiguous count with the gaps between their elements.
    """
    ranges = sorted(found for label, tensor in _tensors(model, optimizer) for found in _range(label, tensor))
    overlaps = []
    open_ranges: list[_Range] = []
    for one in ranges:
        open_ranges = [earlier for earlier in open_ranges if earlier.end > one.start]
        overlaps += [
            Overlap(earlier.label, one.label, min(earlier.end, one.end) - one.start)
            for earlier in open_ranges
        ]
        open_ranges.append(one)
    return tuple(overlaps)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in named_main_parameters(model):
        yield f"weight {name}", param
        if param.grad is not None:
            yield f"gradient {name}", param.grad
        if optimizer is not None:
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", value
    for unit, unit_name in named_units(model).items():
        for group in unit.groups:
            for name, whole in zip(group.names, group.unsharded, strict=True):
                # Under no_shard in the main dtype the compute weights are the main weights.
                if group.compute is not group.main and group.compute.allocated:
                    yield f"compute weight {unit_name}.{name}", whole
            kept = {local_of(p.grad).untyped_storage().data_ptr() for p in group.params if p.grad is not None}
            for flat in group.gradient.collecting:
                # A backward adds to the sums of earlier microbatches in place.
                if flat.untyped_storage().data_ptr() not in kept:
                    yield f"gradients collected of {unit_name}", flat


def _range(label: str, tensor: torch.Tensor) -> Iterator[_Range]:
    local = local_of(tensor)
    if local.numel() == 0 or local.layout != torch.strided or local.is_meta:
        return
    span = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    start = local.data_ptr()
    yield _Range(start, start + span * local.element_size(), label)
