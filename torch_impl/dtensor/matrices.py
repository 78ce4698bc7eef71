"""Transposes and products of matrices that are whole on one rank, as with ``granularity="tensor"``.

That rank computes as if it were alone, and the other ranks hold nothing of the results. So ``torch.optim.Muon``, which
orthogonalizes matrices, works without additional collectives::

    weight (4, 3), bounds (0, 0, 4)      weight.t() (3, 4), bounds (0, 0, 3)      weight @ weight.t()  (4, 4), (0, 0, 4)
    rank 0: nothing                      rank 0: nothing                          rank 0: nothing
    rank 1: all                          rank 1: all                              rank 1: all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_impl.dtensor.local import local_of, row_bounds_of
from torch_impl.dtensor.placement import is_tensor_parallel
from torch_impl.dtensor.tensor import wrap_rows
from torch_impl.dtensor.views import counted_view, meant

_aten = torch.ops.aten

_TRANSPOSES = {_aten.t.default, _aten.transpose.int, _aten.permute.default}
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
MATRIX_OPERATORS = _TRANSPOSES | _PRODUCTS


def on_whole_matrices(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of one of ``MATRIX_OPERATORS``; None unless one rank holds all its matrices whole."""
    matrices = [matrix for matrix in args if isinstance(matrix, torch.Tensor)]
    first, holder = matrices[0], _holder(matrices[0])
    if holder is None or any(_holder(matrix) != holder for matrix in matrices):
        return None
    shape = func(*map(meant, args), **kwargs).shape
    # A transpose of a vector changes nothing and returns no new view, and a vector is no matrix.
    if len(shape) != 2:
        return None
    _, shards, shard = holder
    rows = [0] * (shard + 1) + [shape[0]] * (shards - shard)
    holds = bool(local_of(first).numel())
    if func in _TRANSPOSES:
        local = counted_view(
            local_of(first),
            lambda t: func(t, *args[1:], **kwargs) if holds else t.as_strided((0, shape[1]), (shape[1], 1)),
        )
    elif holds:
        local = func(*map(local_of, args), **kwargs)
    else:
        local = local_of(first).new_empty(0, shape[1])
    return wrap_rows(first, local, shape, rows)


def _holder(matrix: torch.Tensor) -> tuple[Any, int, int] | None:
    """For a matrix with elements: its mesh, the number of shards, and the shard that is whole; None if none is."""
    if not isinstance(matrix, DTensor) or matrix.ndim != 2 or not matrix.numel():
        return None
    bounds = None if is_tensor_parallel(matrix.placements) else row_bounds_of(matrix)
    if bounds is None:
        return None
    # A whole matrix ends in the shard in which it begins.
    shard = sum(bound == 0 for bound in bounds) - 1
    return (matrix.device_mesh, len(bounds) - 1, shard) if bounds[shard + 1] == matrix.shape[0] else None
