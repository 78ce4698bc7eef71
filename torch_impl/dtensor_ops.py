"""Operators on ``RowDTensor``: those that are right on any cut of rows; everything else raises.

Element-wise operators act on the local rows when all their DTensors are cut alike; the other operands must be scalars.
Whole-tensor reductions (norms, sum, mean, extrema, any, all) combine the ranks' results and return a plain tensor that
is equal on all ranks; like every collective they must be reached by all ranks. ``copy_`` also takes a plain tensor of
the global shape, which every rank must hold, and keeps this rank's rows of it.

Operators run below autograd here, where torch does not count in-place changes of the local tensors, and fused
optimizers never do. Every write is counted explicitly, because compute weights are refreshed by that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_impl import collectives, dtensor

_aten = torch.ops.aten

_SAME_TENSOR = {_aten.detach.default, _aten.alias.default}
_LIKE = {
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.empty_like.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.copy_.default,
}
_RIGHT_ON_PARTIAL = {
    _aten.zero_.default,
    _aten._foreach_zero_.default,
    _aten.zeros_like.default,
    _aten.clone.default,
}
_HALF = (torch.float16, torch.bfloat16)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``RowDTensor.__torch_dispatch__`` does. Raises RuntimeError for operators that it cannot do right."""
    first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, dtensor.RowDTensor))
    if func in _SAME_TENSOR:
        return dtensor.wrap_like(first, dtensor.local_of(first))
    if any(t.placements[0].is_partial() for t in _dtensors((args, kwargs))) and func not in _RIGHT_ON_PARTIAL:
        raise RuntimeError(
            f"{func}: the gradient was accumulated without reducing it over the ranks (no_sync, "
            "set_is_last_backward(False) or set_requires_gradient_sync(False)); run the last backward of the step "
            "without them before reading the gradient"
        )
    if func in _REDUCTIONS:
        return _REDUCTIONS[func](func, *args, **kwargs)
    if func is _aten.copy_.default and not isinstance(args[1], DTensor) and args[1].ndim > 0:
        return _copy_rows(args[0], args[1])
    if _is_elementwise(func):
        return _elementwise(func, first, args, kwargs)
    if all(t.placements[0].is_replicate() for t in _dtensors((args, kwargs))):
        return _on_replicas(func, args, kwargs)
    raise RuntimeError(
        f"{func} is not supported on a tensor placed as {first.placements[0]}: only element-wise operators and "
        "reductions of the whole tensor are; use to_local() for this rank's rows or full_tensor() for all"
    )


def count_write(tensor: torch.Tensor) -> None:
    """Record an in-place change of the local rows that torch itself does not count."""
    torch.autograd.graph.increment_version(dtensor.local_of(tensor))


def _dtensors(tree: Any) -> Iterable[DTensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, DTensor))


def _local(value: Any) -> Any:
    return dtensor.local_of(value) if isinstance(value, torch.Tensor) else value


def _is_elementwise(func: Any) -> bool:
    # Random values would differ between the ranks that hold the same rows.
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name = func._schema.name
    return (
        torch.Tag.pointwise in func.tags
        or func in _LIKE
        or name.startswith(("aten::_foreach_", "aten::_fused_"))
    )


def _cut(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.placements[0], tuple(tensor.shape), tensor.device_mesh


def _check_alike(func: Any, operands: list[Any]) -> None:
    """Operands of one element-wise computation: DTensors cut alike, beside which only scalars may stand."""
    cuts = {_cut(t) for t in operands if isinstance(t, DTensor) and not _is_scalar(t)}
    plain = [t for t in operands if isinstance(t, torch.Tensor) and not isinstance(t, DTensor) and t.ndim > 0]
    if len(cuts) > 1 or (cuts and plain):
        found = [f"{shape} as {placement}" for placement, shape, _ in cuts]
        found += [f"plain {tuple(t.shape)}" for t in plain]
        raise RuntimeError(
            f"{func}: expected tensors of one shape and placement, got {', '.join(map(str, found))}"
        )


def _is_scalar(tensor: DTensor) -> bool:
    return tensor.ndim == 0 and tensor.placements[0].is_replicate()


def _elementwise(func: Any, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    lists = [value for value in lists if any(isinstance(item, torch.Tensor) for item in value)]
    if lists:
        for operands in zip(*lists, strict=False):
            _check_alike(func, list(operands))
    else:
        _check_alike(func, list(pytree.tree_leaves((args, kwargs))))
    result = func(*pytree.tree_map(_local, args), **pytree.tree_map(_local, kwargs))
    _count_writes(func, args, kwargs)
    if func._schema.is_mutable:
        return kwargs.get("out", args[0]) if func._schema.returns else None
    if isinstance(result, torch.Tensor):
        return dtensor.wrap_like(first, result)
    if isinstance(result, list | tuple):
        origins = lists[0] if lists else [first] * len(result)
        return [
            dtensor.wrap_like(origin, local) if isinstance(origin, dtensor.RowDTensor) else local
            for origin, local in zip(origins, result, strict=True)
        ]
    return result


def _count_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in _dtensors(value):
                count_write(tensor)


def _copy_rows(target: Any, source: torch.Tensor) -> Any:
    if source.shape != target.shape:
        raise RuntimeError(
            f"copy_: expected a tensor of shape {tuple(target.shape)}, got {tuple(source.shape)}"
        )
    local, (r0, r1) = dtensor.local_of(target), dtensor.row_range_of(target)
    if dtensor.row_bounds_of(target) is None:
        local.copy_(source)
    else:
        local.copy_(source.reshape(-1, *local.shape[1:])[r0:r1] if local.numel() else local)
    count_write(target)
    return target


def _on_replicas(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand an operator on whole tensors to DTensor itself, which may change shapes and placements."""

    def plain_dtensor(value: Any) -> Any:
        if not isinstance(value, dtensor.RowDTensor):
            return value
        return DTensor.from_local(
            dtensor.local_of(value), value.device_mesh, value.placements, run_check=False
        )

    return func(*pytree.tree_map(plain_dtensor, args), **pytree.tree_map(plain_dtensor, kwargs))


def _is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and not tensor.placements[0].is_replicate()


def _max_over_ranks(values: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Largest of the ranks' values, NaN where any rank's is: backends differ in what their MAX does with NaN."""
    nan = values.isnan()
    both = torch.stack([values.masked_fill(nan, float("-inf")), nan.to(values.dtype)])
    collectives.all_reduce(both, mesh.get_group(), dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, float("nan"))


def _norms(func: Any, tensors: list[Any], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Norms of whole tensors with one all-reduce for all that are sharded over the same mesh."""
    # The norm of no elements is not defined for every order; a zero leaves the result of all ranks unchanged.
    locals_ = [t if (t := _local(tensor)).numel() else t.new_zeros(1) for tensor in tensors]
    norms = [
        torch.linalg.vector_norm(
            local, order, dtype=_summed_in(local, dtype) if _is_sharded(tensor) else dtype
        )
        for tensor, local in zip(tensors, locals_, strict=True)
    ]
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if _is_sharded(t)}
    for mesh in meshes.values():
        where = [i for i, t in enumerate(tensors) if _is_sharded(t) and t.device_mesh is mesh]
        # Powers and roots in float64 leave one rounding, that of the result.
        values = torch.stack([norms[i].double() for i in where])
        if order == float("inf"):
            values = _max_over_ranks(values, mesh)
        elif order > 0:
            values = values**order
            collectives.all_reduce(values, mesh.get_group())
            values = values ** (1 / order)
        else:
            raise RuntimeError(f"{func}: expected a positive order on a sharded tensor, got {order}")
        for i, value in zip(where, values.unbind(), strict=True):
            norms[i] = value.to((dtype or locals_[i].dtype).to_real())
    return norms


def _summed_in(local: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """``dtype`` for a rank's part of a result, float32 for half precision: what is combined must not be rounded."""
    return torch.float32 if (dtype or local.dtype) in _HALF else dtype


def _vector_norm(
    func: Any, tensor: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    if keepdim or (dim is not None and len(dim) not in (0, tensor.ndim)):
        raise RuntimeError(f"{func}: expected a norm of the whole tensor, got dim={dim}, keepdim={keepdim}")
    return _norms(func, [tensor], ord, dtype)[0]


def _foreach_norm(func: Any, tensors: list[Any], ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    return _norms(func, tensors, ord, dtype)


def _total(tensor: Any, dtype: torch.dtype | None, count: int) -> torch.Tensor:
    local = _local(tensor)
    value = local.sum(dtype=_summed_in(local, dtype))
    if _is_sharded(tensor):
        collectives.all_reduce(value, tensor.device_mesh.get_group())
    value = value / count if count != 1 else value
    wanted = dtype or local.dtype
    return value.to(wanted) if wanted in _HALF else value


def _sum(func: Any, tensor: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _total(tensor, dtype, 1)


def _mean(func: Any, tensor: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    wanted = dtype or tensor.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        raise RuntimeError(f"{func}: expected a floating-point or complex dtype, got {wanted}")
    return _total(tensor, dtype, tensor.numel())


def _extremum(pick: Callable[[torch.Tensor], torch.Tensor], sign: int) -> Callable[..., torch.Tensor]:
    """``pick`` is the largest (``sign`` 1) or the smallest (-1) of a tensor."""

    def reduce(func: Any, tensor: Any) -> torch.Tensor:
        local = _local(tensor)
        if not local.dtype.is_floating_point:
            raise RuntimeError(f"{func}: expected a floating-point tensor, got {local.dtype}")
        if not tensor.numel():
            raise RuntimeError(f"{func}: expected a tensor with elements, got shape {tuple(tensor.shape)}")
        value = pick(local) if local.numel() else local.new_full((), -sign * float("inf"))
        return sign * _max_over_ranks(sign * value, tensor.device_mesh) if _is_sharded(tensor) else value

    return reduce


def _truth(op: Any, pick: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(func: Any, tensor: Any) -> torch.Tensor:
        value = pick(_local(tensor)).to(torch.int32)
        if _is_sharded(tensor):
            collectives.all_reduce(value, tensor.device_mesh.get_group(), op)
        return value.bool()

    return reduce


_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.sum.default: _sum,
    _aten.mean.default: _mean,
    _aten.max.default: _extremum(torch.max, 1),
    _aten.min.default: _extremum(torch.min, -1),
    _aten.any.default: _truth(dist.ReduceOp.MAX, torch.any),
    _aten.all.default: _truth(dist.ReduceOp.MIN, torch.all),
}
