"""Outputs of a unit's module that are its weights, or lie in their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_impl.runtime.ground import autograd
from torch_impl.runtime.unit.group import ParameterGroup


def shows_weights(output: Any, groups: Sequence[ParameterGroup]) -> bool:
    """Whether ``output`` has one of the whole parameters itself, at which no hook tells of a backward."""
    own = {id(param) for group in groups for param in group.unsharded}
    return not own.isdisjoint(map(id, autograd.leaves_of(output)))


def copy_weights_in(output: Any, groups: Sequence[ParameterGroup], module: str) -> Any:
    """``output`` with copies of what shares memory with weights: it must outlive the memory that a reshard frees.

    RuntimeError where that is inside an object which cannot be searched; ``module`` names the class in its text.
    """
    sharded = [group for group in groups if group.strategy.shard_parameters]
    freed = [tensor for group in sharded for tensor in group.weights.compute_tensors if tensor.numel()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in freed}
    output, left = autograd.copy_aliases(output, storages) if storages else (output, False)
    if left:
        raise RuntimeError(
            f"{module}: an output shares memory with the sharded parameters, inside an object that is no tuple, list "
            "or dict; return a clone() of it"
        )
    return output
