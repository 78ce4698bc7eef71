"""Explains errors of autograd in a backward that comes too late for sharded weights.

The weights may have been freed unnoticed, or gathered again with other values. Autograd then refuses
the saved weights, but it knows only shapes and versions, so a note on the error names the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

_CHANGED = re.compile(
    r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+); expected"
)
OF_PARAMETERS = (
    "torch_impl: expected inputs of torch.autograd.grad that are not sharded parameters, since one "
    "rank computes only a part of their gradient: call backward(inputs=...), which sums the "
    "gradients of the ranks into .grad"
)


class ShardedGroup(Protocol):
    """The interface of a group of parameters for this module."""

    @property
    def unit_name(self) -> str: ...

    @property
    def params(self) -> Sequence[torch.Tensor]: ...

    @property
    def unsharded(self) -> Sequence[torch.Tensor]: ...

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def explain_late_backward(error: RuntimeError, groups: Iterable[ShardedGroup], to_parameters: bool) -> None:
    """Add a note to an error about weights of ``groups``, or about main weights as inputs."""
    message = str(error)
    if to_parameters and "not have been used in the graph" in message:
        error.add_note(OF_PARAMETERS)
    changed = _CHANGED.search(message)
    if changed is None:
        return
    shape, version = [int(size) for size in changed[1].split(",") if size.strip()], int(changed[2])
    names = [
        f"{name!r} of unit {group.unit_name!r}"
        for group in groups
        for name, weight in group.whole_weights()
        # A matrix may be saved as its transpose.
        if weight._version == version and list(weight.shape) in (shape, shape[::-1])
    ]
    if names:
        others = f" or {len(names) - 4} more of this shape" if len(names) > 4 else ""
        error.add_note(
            "torch_impl: expected a weight with the values that the forward of a sharded module has read, "
            f"{' or '.join(names[:4])}{others}, but the weight was freed, or changed with the main "
            "weights, before this backward. Run the backward before the next forward of the "
            "module and before the optimizer's step. In forward, return the tensor from which the "
            "backward starts, directly or in lists, dicts or dataclasses. Or keep weights with "
            "set_reshard_after_forward(False) and set_reshard_after_backward(False). If a step "
            "with create_graph=True follows steps without it, call set_buffer_pool(False) before "
            "the first step."
        )
