"""Locate a NaN or an infinity: the weight, gradient or output, the rows, the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from bridge.core.sharding.layout.rows import Box
from torch_impl.comm.agreement import rank
from torch_impl.diagnostics.tensors import named_main_parameters, process_groups, refuse_meta
from torch_impl.dtensor.local import (
    has_plain_values,
    is_partial,
    local_boxes,
    local_of,
    local_pieces,
    plain_parts,
)


@dataclass(frozen=True)
class NonFinite:
    """One tensor that contains elements which are not finite.

    kind: "weight", "gradient", "unreduced gradient" or "output".
    name: of the parameter, or of the module that returned the output.
    nan, inf: the number of such elements; for unreduced gradients, on the rank with the most.
    rows: indices of the first rows with such elements, over all dimensions but the last; elements of vectors.
    ranks: the ranks that hold such rows.
    """

    kind: str
    name: str
    nan: int
    inf: int
    rows: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        rows = ", ".join(str(list(row)) for row in self.rows)
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.kind} {self.name}: {self.nan} NaN, {self.inf} infinite, rows {rows} (ranks {ranks})"


@dataclass(frozen=True)
class _Finding:
    """The finding of one rank; ``replica`` differs between ranks that hold the same rows."""

    kind: str
    name: str
    replica: tuple[int, ...]
    nan: int
    inf: int
    rows: tuple[tuple[int, ...], ...]
    rank: int


def find_nonfinite(
    model: nn.Module, *, weights: bool = True, gradients: bool = True, max_rows: int = 8
) -> tuple[NonFinite, ...]:
    """The weights and gradients that are not finite on some rank, in model order; the same on every rank. Collective.

    Each is reported with at most ``max_rows`` of its rows. Unreduced gradients of earlier microbatches are checked on
    each rank separately, so the report tells which rank's data caused the problem.

    Raises RuntimeError for a parameter on the meta device.
    """
    tensors: list[tuple[str, str, torch.Tensor]] = []
    order: dict[tuple[str, str], None] = {}
    for name, param in named_main_parameters(model):
        refuse_meta(name, param)
        if weights:
            tensors.append(("weight", name, param))
        grad = param.grad
        if gradients and grad is not None:
            tensors.append(("unreduced gradient" if is_partial(grad) else "gradient", name, grad))
        order.update(dict.fromkeys((what, name) for what in ("weight", "gradient", "unreduced gradient")))
    findings = set(_findings(tensors, max_rows))
    for group in process_groups(model):
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, findings, group=group)
        findings = set().union(*everyone)
    by_tensor: dict[tuple[str, str], list[_Finding]] = {}
    for finding in findings:
        by_tensor.setdefault((finding.kind, finding.name), []).append(finding)
    return tuple(_merge(by_tensor[key], max_rows) for key in order if key in by_tensor)


@contextmanager
def watch_nonfinite_outputs(model: nn.Module, *, max_rows: int = 8) -> Iterator[list[NonFinite]]:
    """Check the outputs of all modules of ``model`` while the context is open; the returned list grows as they run.

    Not collective: each rank sees its own outputs. Modules are listed when their forward ends, so the first entry is
    the innermost module where the problem began.
    """
    results: list[NonFinite] = []
    hooks = [
        module.register_forward_hook(partial(_look_at_output, name, max_rows, results))
        for name, module in model.named_modules()
    ]
    try:
        yield results
    finally:
        for hook in hooks:
            hook.remove()


def _look_at_output(
    name: str, max_rows: int, results: list[NonFinite], _module: nn.Module, _args: Any, output: Any
) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    tensors = [("output", name, leaf.detach()) for leaf in leaves]
    results += [_merge([finding], max_rows) for finding in _findings(tensors, max_rows)]


def _findings(tensors: Iterable[tuple[str, str, torch.Tensor]], max_rows: int) -> list[_Finding]:
    listed = [entry for entry in tensors if entry[2].is_floating_point() or entry[2].is_complex()]
    if not listed:
        return []
    # One copy to the host for all tensors: one copy per tensor would wait for the device each time.
    finite = torch.stack([_is_finite(tensor) for _, _, tensor in listed]).tolist()
    return [_finding(*entry, max_rows) for entry, fine in zip(listed, finite, strict=True) if not fine]


def _floating_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = plain_parts(local_of(tensor).detach())
    return [part for part in parts if part.is_floating_point() or part.is_complex()]


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    finite_parts = [part.isfinite().all() for part in _floating_parts(tensor)]
    return (
        torch.stack(finite_parts).all()
        if finite_parts
        else torch.ones((), dtype=torch.bool, device=tensor.device)
    )


def _finding(what: str, name: str, tensor: torch.Tensor, max_rows: int) -> _Finding:
    parts = _floating_parts(tensor)
    rows: list[tuple[int, ...]] = []
    for offsets, piece in _pieces(tensor):
        bad = ~piece.isfinite()
        if piece.ndim >= 2:
            bad = bad.any(dim=-1)
        for index in bad.nonzero()[:max_rows].tolist():
            rows.append(tuple(at + start for at, start in zip(index, offsets, strict=False)))
    replica: tuple[int, ...] = (rank(),)
    if isinstance(tensor, DTensor):
        places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
        replica = tuple(at for at, placed in places if placed.is_replicate() or placed.is_partial())
    nan, inf = (sum(int(test(part).sum()) for part in parts) for test in (torch.isnan, torch.isinf))
    return _Finding(what, name, replica, nan, inf, tuple(sorted(rows)[:max_rows]), rank())


def _pieces(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The local values, each with its offset in the whole tensor."""
    if not isinstance(tensor, DTensor) or is_partial(tensor):
        return [((0,) * tensor.ndim, local_of(tensor).detach())]
    # Values that a class stores in another form have no rows to name.
    if not has_plain_values(tensor):
        return []
    boxes: tuple[Box, ...] = local_boxes(tensor)
    return [(box.offsets, piece.detach()) for box, piece in zip(boxes, local_pieces(tensor), strict=True)]


def _merge(findings: list[_Finding], max_rows: int) -> NonFinite:
    """Combine the findings of several ranks about one tensor; replicas hold the same elements, which count once."""
    counts: dict[tuple[int, ...], list[int]] = {}
    for finding in findings:
        total = counts.setdefault(finding.replica, [0, 0])
        total[0] += finding.nan
        total[1] += finding.inf
    nan, inf = max(tuple(total) for total in counts.values())
    rows = sorted({row for finding in findings for row in finding.rows})[:max_rows]
    ranks = sorted({finding.rank for finding in findings})
    return NonFinite(findings[0].kind, findings[0].name, nan, inf, tuple(rows), tuple(ranks))
