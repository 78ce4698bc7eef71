"""Outputs of a unit's module that are its weights, or share their memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_impl.runtime.ground.transforms import innermost
from torch_impl.runtime.ground.trees import leaves_of, map_leaves
from torch_impl.runtime.unit.group import ParameterGroup


def shows_weights(output: Any, groups: Sequence[ParameterGroup]) -> bool:
    """Whether ``output`` contains a whole parameter itself, where no hook can signal a backward."""
    own = {id(param) for group in groups for param in group.unsharded}
    return not own.isdisjoint(map(id, leaves_of(output)))


def copy_weights_in(output: Any, groups: Sequence[ParameterGroup], module: str) -> Any:
    """``output`` with copies of tensors that share memory with weights, which a reshard frees.

    RuntimeError if such a tensor is inside an object that cannot be searched; ``module`` names the class in its text.
    """
    sharded = [group for group in groups if group.shard_parameters]
    freed = [tensor for group in sharded for tensor in group.weights.compute_tensors if tensor.numel()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in freed}
    output, left = _copy_aliases(output, storages) if storages else (output, False)
    if left:
        raise RuntimeError(
            f"{module}: an output shares memory with the sharded parameters, inside an object that "
            "is not a tuple, list or dict; return a clone() of it"
        )
    return output


def _copy_aliases(output: Any, storages: Collection[int]) -> tuple[Any, bool]:
    """Replace tensors whose memory is one of ``storages`` (addresses) by copies.

    Also returns whether such tensors remain, in objects that cannot be rebuilt.
    """

    def aliases(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and not _addresses(leaf).isdisjoint(storages)

    output = map_leaves(output, lambda leaf: leaf.clone() if aliases(leaf) else leaf)
    return output, any(map(aliases, leaves_of(output)))


def _addresses(tensor: torch.Tensor) -> set[int]:
    """Addresses of a tensor's memory, or of the tensors that it wraps; empty if unknown."""
    # Plain tensors, the usual outputs, wrap no others.
    if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return set().union(*(_addresses(part) for part in inner if isinstance(part, torch.Tensor)))
    try:
        return {innermost(tensor).untyped_storage().data_ptr()}
    except RuntimeError:  # sparse layouts, subclasses that do not show what they wrap
        return set()
