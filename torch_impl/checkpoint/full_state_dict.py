"""Whole state dicts through ``torch.distributed.checkpoint.state_dict`` with ``full_state_dict=True``.

Torch shards a whole tensor as ``torch.chunk`` would. With ``broadcast_from_rank0`` torch shards between broadcasts, so
an error on one rank leaves the others waiting. Torch mistakes tensors without dimensions for numbers.

Torch's functions that do this offer no hook, so the first ``fully_shard`` of a process wraps them: sharded tensors then
take their own rows of whole ones, and all other tensors load as before. No public API can replace the wrappers:

* hooks of ``load_state_dict``, of modules and optimizers, are called only after torch has sharded, or failed to
* a model's ``load_state_dict`` does not see the state of its optimizer, whose scalars become plain tensors
* a unit's memory must exist before values are loaded, or they would be in memory twice; and an error must be raised
  before the ranks communicate, or some ranks would wait for others

This module contains all uses of torch's private names for this purpose.

A strict load gives a model on the meta device its memory, on every rank where the model is on the meta device: values
on the first rank alone suffice. Torch itself assigns everything else that is on the meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from torch_impl.comm.agreement import agree
from torch_impl.dtensor.placement import row_placement
from torch_impl.dtensor.tensor import RowDTensor, distribute
from torch_impl.fsdp_module import FSDPModule
from torch_impl.runtime.unit.unit import Unit


def filling(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``original(state, keys, ...)``, which replaces each pair (sharded tensor, whole tensor) by a tensor."""

    @functools.wraps(original)
    def call(state: dict[str, Any], keys: Sequence[str], *args: Any, **kwargs: Any) -> None:
        others = []
        for key in keys:
            pair = state.get(key)
            # Torch would shard the whole tensor into even rows, or copy the whole tensor into fewer rows.
            if isinstance(pair, tuple) and isinstance(pair[0], RowDTensor):
                _check(key, *pair)
                state[key] = _filled(*pair)
            else:
                others.append(key)
        original(state, others, *args, **kwargs)

    return call


def _filled(tensor: RowDTensor, whole: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if tensor.is_meta:
            # There is no memory to copy to.
            return distribute(whole, tensor.device_mesh, tensor.placements)
        return tensor.copy_(whole)


def _check(key: str, tensor: RowDTensor, whole: torch.Tensor) -> None:
    """RuntimeError for a tensor that cannot be the whole of ``tensor``."""
    if whole.shape != tensor.shape:
        fault = f"one of shape {tuple(whole.shape)}"
    elif whole.is_meta:
        fault = "one on the meta device"
    elif isinstance(whole, DTensor) and (whole.device_mesh, whole.placements) != (
        tensor.device_mesh,
        tensor.placements,
    ):
        fault = (
            f"a DTensor placed as {whole.placements} on {whole.device_mesh}; get the state dict with "
            "full_state_dict=True, too"
        )
    else:
        return
    raise RuntimeError(
        f"{key}: expected a whole tensor of shape {tuple(tensor.shape)} with values, got {fault}"
    )


def checking(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``original(full, state, ...)``, which shards the values of ``full``, equal on all ranks, like ``state``."""

    @functools.wraps(original)
    def call(full: dict[str, Any], state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        for key, whole in full.items():
            tensor = state.get(key)
            if isinstance(tensor, RowDTensor) and isinstance(whole, torch.Tensor) and whole.ndim:
                _check(key, tensor, whole)
        original(full, state, *args, **kwargs)

    return call


def distributing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``original(whole, mesh, placements)``, which is ``distribute_tensor``."""

    @functools.wraps(original)
    def call(
        whole: torch.Tensor,
        mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> Any:
        # DTensor does not know RowShard, and would place the tensor as if all ranks held all rows.
        if mesh is not None and row_placement(placements or ()) is not None:
            if isinstance(whole, RowDTensor):
                return whole
            return distribute(whole, mesh, placements or ())
        return original(whole, mesh, placements, **options)

    return call


def keeping_scalars(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``original(full, state, ...)``, which puts the values of ``full`` into ``state``."""

    @functools.wraps(original)
    def call(full: dict[str, Any], state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        scalars = {
            key: value for key, value in state.items() if isinstance(value, RowDTensor) and not value.ndim
        }
        original(full, state, *args, **kwargs)
        # Torch has replaced the sharded scalar by a plain tensor, but the model owns the sharded scalar.
        for key, scalar in scalars.items():
            if key in state and state[key] is not scalar:
                state[key] = _filled(scalar, state[key])

    return call


def materializing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``original(model, state, info)``, which loads ``state`` into ``model``; ``info`` says if it is whole."""

    @functools.wraps(original)
    def call(model: nn.Module, state: dict[str, Any], info: Any) -> Any:
        whole = info.broadcast_from_rank0 or (info.full_state_dict and state)
        if info.handle_model and whole:
            units = dict.fromkeys(
                module._unit for module in model.modules() if isinstance(module, FSDPModule)
            )
            if any(group.unequal for unit in units for group in unit.groups):
                # The other ranks have nothing to materialize, and would wait for a rank that raises.
                agree(lambda: _materialize(units, state, info))
            else:
                _materialize(units, state, info)
            if units and info.strict:
                _materialize_scalars(model, next(iter(units)).device)
        return original(model, state, info)

    return call


def _materialize(units: Iterable[Unit], state: Mapping[str, Any], info: Any) -> None:
    planned = []
    for unit in units:
        unit.collect_apart()
        if any(group.weights.on_meta for group in unit.groups):
            planned.append(unit)
    # Before any unit has memory, because a forward would take uninitialized memory for values.
    for unit in planned:
        for group in unit.groups:
            for name, param in zip(group.names, group.params, strict=True):
                if param.is_meta and not info.strict:
                    fault = "expected strict=True, so that the state dict gives every weight a value, got strict=False"
                # If the state dict comes from the first rank, torch itself reports what is missing.
                elif param.is_meta and not info.broadcast_from_rank0 and not _has(state, param, info):
                    fault = f"expected a value in the state dict, found none among its {len(state)} keys"
                else:
                    continue
                raise RuntimeError(
                    f"parameter {name!r} is on the meta device: {fault}; call model.to_empty(device=...) first, and "
                    "initialize what the state dict lacks"
                )
    for unit in planned:
        unit.materialize(unit.device)


def _has(state: Mapping[str, Any], param: nn.Parameter, info: Any) -> bool:
    """Whether the state dict has a value under one of the names that torch found for the parameter."""
    names = info.fqn_param_mapping.get(param)
    return names is None or any(name in state for name in names)


def _materialize_scalars(model: nn.Module, device: torch.device) -> None:
    """Give saved scalar buffers on the meta device memory: torch assigns them only together with other tensors."""
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta and not buffer.ndim and id(buffer) in saved:
                setattr(module, name, torch.empty_like(buffer, device=device))


_WRAPPED = (
    (_state_dict_utils, "_distribute_tensors", filling),
    (_state_dict_utils, "distribute_tensor", distributing),
    (state_dict, "_load_model_state_dict", materializing),
    (state_dict, "_broadcast_state_dict", keeping_scalars),
    (state_dict, "_distribute_state_dict", keeping_scalars),
    (state_dict, "_distribute_state_dict", checking),
)


@functools.cache
def accept_full_state_dicts() -> None:
    """Wrap torch's functions, for all models of the process; calls after the first do nothing."""
    for module, name, wrap in _WRAPPED:
        original = getattr(module, name, None)
        # Not every version of torch has all of them.
        if original is not None:
            setattr(module, name, wrap(original))
