"""Operators on ``RowDTensor`` that are correct for any cut of rows; all other operators raise.

Element-wise operators act on the local rows when all their DTensors are cut alike; the other operands must be scalars.
``copy_`` also takes a plain tensor of the global shape, which every rank must hold, and keeps this rank's rows of it.
Reductions are in ``reductions``, random values in ``random``, and views in ``views``.

Operators that read tensors with remainders (``remainders``) see bfloat16. Operators that change such a tensor work on
its float32 values, and also take other operands with remainders in float32.

Operators run below autograd here, where torch does not count in-place changes of the local tensors. Fused optimizers
never count theirs. This count decides whether compute weights are refreshed, so every write is counted explicitly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_impl.dtensor.local import is_partial, local_of, own_part, row_bounds_of
from torch_impl.dtensor.operands import align
from torch_impl.dtensor.placement import is_fused, is_tensor_parallel, row_placement
from torch_impl.dtensor.random import RANDOM, fill_randomly
from torch_impl.dtensor.reductions import REDUCTIONS
from torch_impl.dtensor.refusals import described
from torch_impl.dtensor.remainders import main_values, remainder_of, set_main_values
from torch_impl.dtensor.tensor import RowDTensor, count_write, wrap_like, wrap_rows
from torch_impl.dtensor.views import VIEWS, counted_view, meant, row_view

_aten = torch.ops.aten

_TRANSPOSES = {_aten.t.default, _aten.transpose.int, _aten.permute.default}
_OF_MATRICES = {*_TRANSPOSES, _aten.mm.default, _aten.addmm.default}


def on_whole_matrices(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of one of ``_OF_MATRICES``; None unless one rank holds all its matrices whole.

    That rank computes as if it were alone, and the other ranks hold nothing of the results. So ``torch.optim.Muon``,
    which orthogonalizes matrices, works without additional collectives if ``granularity="tensor"``::

        weight (4, 3), bounds (0, 0, 4)   weight.t() (3, 4), bounds (0, 0, 3)   weight @ weight.t()  (4, 4), (0, 0, 4)
        rank 0: nothing                   rank 0: nothing                       rank 0: nothing
        rank 1: all                       rank 1: all                           rank 1: all
    """
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


_SAME_TENSOR = {_aten.detach.default, _aten.alias.default}
# Element-wise, but torch does not tag them so.
_LIKE = {
    _aten.clone.default, _aten._to_copy.default, _aten.zeros_like.default, _aten.ones_like.default,
    _aten.full_like.default, _aten.empty_like.default, _aten.zero_.default, _aten.fill_.Scalar,
    _aten.fill_.Tensor, _aten.copy_.default, _aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor,
    _aten.floor_divide.default, _aten.floor_divide_.Tensor, _aten.hardswish.default,
}  # fmt: skip
# These commute with the sum, so they are correct on its terms.
_RIGHT_ON_PARTIAL = {
    _aten.zero_.default,
    _aten._foreach_zero_.default,
    _aten.zeros_like.default,
    _aten.clone.default,
}
_NEW = {_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default, _aten.new_empty.default}
# Adafactor computes second moments as the product of a column and a row.
_PRODUCTS = {_aten.mm.default, _aten.bmm.default}

# Programs that compute with a sharded weight are refused at one of these operators.
_MULTIPLIES = {*_OF_MATRICES, *_PRODUCTS, _aten.embedding.default}
_MULTIPLIED = (
    "; modules have whole weights when the module itself is called (not its forward()), and after unshard(); for "
    "torch.optim.Muon shard with granularity='tensor', or use MainWeightMuon"
)

_RESHAPED = (
    "; a shard ends inside a row of this view: use view(-1), keep the rows of a stack, or use fully_shard(granularity="
    "'tensor'), with which shards never cut a row of a view"
)

_ASYNC = (
    "torch.distributed.checkpoint.async_save{which}: use torch_impl.save_checkpoint_async, or CheckpointManager, which "
    "write the same format"
)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implements ``RowDTensor.__torch_dispatch__``. Raises RuntimeError for operators that are not supported."""
    sharded = list(_dtensors((args, kwargs)))
    first = next(tensor for tensor in sharded if isinstance(tensor, RowDTensor))
    # Before partial tensors are refused, because these operators are correct on partial tensors too.
    if func in _SAME_TENSOR:
        return wrap_like(first, local_of(first))
    if any(remainder_of(tensor) is not None for tensor in _changed(func, args, kwargs)):
        return _on_main_values(func, args, kwargs)
    if _any_partial(sharded) and func not in _RIGHT_ON_PARTIAL:
        raise RuntimeError(
            f"{func}: the gradient was accumulated without reducing it over the ranks (no_sync, "
            "set_is_last_backward(False) or set_requires_gradient_sync(False)); run the last backward of the step "
            "without these settings before reading the gradient"
        )
    if func in REDUCTIONS:
        return REDUCTIONS[func](func, *args, **kwargs)
    # Of (..., R, 1) and (..., 1, C), computed row by row.
    if func in _PRODUCTS and args[0].shape[-1] == 1:
        return args[0] * args[1]
    if func is _aten.new_empty.default and "device" in kwargs:
        _check_staged(first, args[1])
    if func in _NEW and (made := _new_of(func, *args, **kwargs)) is not NotImplemented:
        return made
    # ``tensor[mask] = value`` is element-wise, but indices would have to be translated to local rows.
    if func is _aten.index_put_.default and len(args) == 3 and _is_mask(args[1]):
        return args[0].masked_fill_(args[1][0], args[2])
    if func in RANDOM and isinstance(args[0], RowDTensor):
        fill_randomly(func, *args, **kwargs)
        count_write(args[0])
        return args[0]
    # A plain scalar is broadcast by the element-wise path.
    if func is _aten.copy_.default and not isinstance(args[1], DTensor) and args[1].ndim > 0:
        return _copy_rows(args[0], args[1])
    if func is _aten.copy_.default:
        _check_rows(args[0], args[1])
    if func in VIEWS and (view := row_view(func, args, kwargs)) is not None:
        return view
    if func in _OF_MATRICES and (matrix := on_whole_matrices(func, args, kwargs)) is not None:
        return matrix
    if _is_elementwise(func):
        return _elementwise(func, args, kwargs)
    # DTensor itself is correct if no rows are cut.
    if all(
        row_placement(tensor.placements) is None and not is_fused(tensor.placements) for tensor in sharded
    ):
        return _as_dtensors(func, args, kwargs)
    raise RuntimeError(
        f"{func} is not supported on {described(first)}, placed as {first.placements}: expected an element-wise "
        "operator, a reduction, or a view that keeps rows whole; use full_tensor() for the whole tensor or to_local() "
        "for this rank's rows; to set all values, copy_() a whole tensor, or set them before sharding"
        + (_MULTIPLIED if func in _MULTIPLIES else _RESHAPED if func in VIEWS else "")
    )


def _check_staged(tensor: Any, size: Sequence[int]) -> None:
    """RuntimeError for tensors that ``dcp.async_save`` would copy wrongly. ``async_save`` begins with an empty tensor.

    It then copies the attributes of a tensor and of its local tensor.
    """
    if remainder_of(tensor) is not None:
        raise RuntimeError(_ASYNC.format(which=" cannot copy the remainders of bfloat16 weights"))
    # Up to torch 2.11 the empty tensor has no dimensions, and the copy keeps this shape.
    if tensor.ndim and not size:
        raise RuntimeError(_ASYNC.format(which=" of this torch cannot copy sharded tensors"))


def _dtensors(tree: Any) -> Iterator[DTensor]:
    # By hand: torch's tree functions would take most of the time of an optimizer's step.
    if isinstance(tree, DTensor):
        yield tree
    elif type(tree) in (list, tuple):
        for item in tree:
            yield from (item,) if isinstance(item, DTensor) else _dtensors(item)
    elif type(tree) is dict:
        for item in tree.values():
            yield from _dtensors(item)


def _any_partial(tensors: Iterable[DTensor]) -> bool:
    # Gradients and moments share the placements object of their parameter, so few objects are checked.
    placed = {id(tensor.placements): tensor for tensor in tensors}
    return any(is_partial(tensor) for tensor in placed.values())


def _is_mask(indices: Any) -> bool:
    return len(indices) == 1 and isinstance(indices[0], DTensor) and indices[0].dtype == torch.bool


@functools.cache
def _is_elementwise(func: Any) -> bool:
    # Random values that ``random`` does not draw would differ between ranks that hold the same rows.
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name = func._schema.name
    # A result that is not a tensor, such as one bool for all elements, would describe this rank's rows only.
    if any(str(returned.type) not in ("Tensor", "List[Tensor]") for returned in func._schema.returns):
        return False
    # Torch does not tag some in-place operators, such as abs_, but tags their functional counterparts.
    base, _, overload = func.name().removeprefix("aten::").partition(".")
    plain = getattr(_aten, base.removesuffix("_"), None) if base.endswith("_") else None
    forms = [func, getattr(plain, overload or "default", None)]
    return any(
        form in _LIKE or torch.Tag.pointwise in getattr(form, "tags", ()) for form in forms
    ) or name.startswith(("aten::_foreach_", "aten::_fused_"))


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [*args, *kwargs.values()]
    lists = [
        value
        for value in values
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value)
    ]
    # A foreach operator: the k-th items of its lists belong together, and may be cut differently from other items.
    if lists:
        aligned = [align(func, operands) for operands in zip(*lists, strict=True)]
        columns = [list(column) for column in zip(*(locals_ for locals_, _ in aligned), strict=True)]
        placings = [placing for _, placing in aligned]
        of_list = {id(value): column for value, column in zip(lists, columns, strict=True)}
        locals_ = [of_list[id(value)] if id(value) in of_list else local_of(value) for value in values]
    else:
        leaves, structure = pytree.tree_flatten(values)
        flat, placing = align(func, leaves)
        locals_, placings = pytree.tree_unflatten(flat, structure), [placing]
    result = func(*locals_[: len(args)], **dict(zip(kwargs, locals_[len(args) :], strict=True)))
    written = _written_arguments(func)
    if written:
        torch.autograd.graph.increment_version([local_of(target) for target in _changed(func, args, kwargs)])
        # An in-place operator returns its operand itself, which the program holds, not another DTensor over its rows.
        return kwargs.get("out", args[0]) if func._schema.returns else None
    if isinstance(result, torch.Tensor):
        return placings[0].wrap(result)
    if isinstance(result, list | tuple):
        placings = placings if lists else placings * len(result)
        return [placing.wrap(local) for placing, local in zip(placings, result, strict=True)]
    return result


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator changes."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[DTensor]:
    """The DTensors that an operator changes."""
    for position, name in _written_arguments(func):
        yield from _dtensors(args[position] if position < len(args) else kwargs.get(name))


def _on_main_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that changes tensors with remainders on their float32 values."""
    copies: dict[int, RowDTensor] = {}

    def lifted(value: Any) -> Any:
        if not isinstance(value, RowDTensor) or remainder_of(value) is None:
            return value
        if id(value) not in copies:
            copies[id(value)] = wrap_like(value, main_values(value))
        return copies[id(value)]

    changed = [target for target in _changed(func, args, kwargs) if remainder_of(target) is not None]
    result = dispatch(func, pytree.tree_map(lifted, args), pytree.tree_map(lifted, kwargs))
    for target in changed:
        set_main_values(target, local_of(copies[id(target)]))
    # An in-place operator returns its operand itself, which the program holds.
    return next((target for target in changed if result is copies[id(target)]), result)


def _copy_rows(target: Any, source: torch.Tensor) -> Any:
    if source.shape != target.shape:
        raise RuntimeError(
            f"copy_: expected a tensor of shape {tuple(target.shape)}, got {tuple(source.shape)}"
        )
    local_of(target).copy_(own_part(target, source))
    count_write(target)
    return target


def _check_rows(target: Any, source: Any) -> None:
    """RuntimeError for a tensor that is cut alike but has other rows, for example from another rank's file."""
    if not (isinstance(target, RowDTensor) and isinstance(source, RowDTensor)):
        return
    own, source_shape = tuple(local_of(target).shape), tuple(local_of(source).shape)
    if own != source_shape and (source.placements, source.shape) == (target.placements, target.shape):
        raise RuntimeError(
            f"copy_ to {described(target)}: expected this rank's rows, of local shape {own}, got the rows of another "
            f"rank, of local shape {source_shape}; each rank must load the file that it saved itself"
        )


def _as_dtensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand an operator on tensors whose rows are not cut to DTensor itself, which may change shapes and placements."""

    # A subclass would be dispatched here again, endlessly.
    def plain_dtensor(value: Any) -> Any:
        if not isinstance(value, RowDTensor):
            return value
        return DTensor.from_local(
            local_of(value),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )

    return func(*pytree.tree_map(plain_dtensor, args), **pytree.tree_map(plain_dtensor, kwargs))


def _new_of(func: Any, tensor: Any, size: Sequence[int], *values: Any, **options: Any) -> Any:
    """``new_zeros`` and similar operators: cut like ``tensor`` if the leading dimensions are equal, else replicated.

    NotImplemented for a tensor-parallel ``tensor`` and another shape.
    """
    size, local, bounds = tuple(size), local_of(tensor), row_bounds_of(tensor)
    if size == tuple(tensor.shape):
        return wrap_like(tensor, func(local, local.shape, *values, **options))
    # Only DTensor can decide how tensor-parallel axes cut another shape.
    if is_tensor_parallel(tensor.placements):
        return NotImplemented
    # Optimizers make row statistics this way, which must be cut like the rows.
    if bounds is None or len(size) < 2 or size[:-1] != tuple(tensor.shape[:-1]) or not size[-1]:
        return wrap_rows(tensor, func(local, size, *values, **options), size, None)
    return wrap_rows(tensor, func(local, (local.shape[0], size[-1]), *values, **options), size, bounds)
