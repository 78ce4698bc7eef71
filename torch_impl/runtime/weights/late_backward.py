"""Backwards that sharded weights have to do with, where these are not as autograd knows them.

A backward may come too late: after weights were freed unseen, or gathered again with other values. Autograd then
refuses the saved weights, but knows only shapes and versions, so the error gets a note. After any error modules show
their main weights again. A backward to given inputs may name main weights, in whose place autograd knows whole ones.

Autograd offers no hook for errors and inputs. So the first ``fully_shard`` of a process wraps the function by which
``torch.autograd`` starts a backward.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

_CHANGED = re.compile(
    r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+); expected"
)
_OF_PARAMETERS = (
    "torch_impl: expected inputs of torch.autograd.grad that are no sharded parameters, since one rank computes only a "
    "part of their gradient: call backward(inputs=...), which sums the gradients of the ranks into .grad"
)


class ShardedGroup(Protocol):
    """What is asked of a group of parameters."""

    @property
    def unit_name(self) -> str: ...

    @property
    def params(self) -> Sequence[torch.Tensor]:
        """The sharded parameters."""
        ...

    @property
    def unsharded(self) -> Sequence[torch.Tensor]:
        """The whole parameters."""
        ...

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of parameters, and the tensors with the versions that autograd compares."""
        ...


class Recovering(Protocol):
    """What units below one root share."""

    def recover(self) -> None:
        """Drop what a pass left behind that raised. Nothing while another pass runs."""
        ...


class ShardedUnit(Protocol):
    """What is asked of a unit."""

    @property
    def groups(self) -> Sequence[ShardedGroup]: ...

    @property
    def schedule(self) -> Recovering: ...


_UNITS: weakref.WeakSet[Any] = weakref.WeakSet()


def register(unit: ShardedUnit) -> None:
    """Take ``unit`` into account as long as it lives."""
    _UNITS.add(unit)


@functools.cache
def watch_backwards() -> None:
    """Wrap torch's function, for the whole process; calls after the first do nothing."""
    watching = _watching(torch.autograd.graph._engine_run_backward)
    # The second is a name for the first, which torch.compiler puts back after wrapping both for a while.
    namespaces: tuple[Any, ...] = (torch.autograd.graph, torch.autograd)
    for namespace in namespaces:
        namespace._engine_run_backward = watching


def _groups() -> Iterator[ShardedGroup]:
    for unit in list(_UNITS):
        yield from unit.groups


def _watching(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def call(
        outputs: Any,
        gradients: Any,
        retain_graph: Any,
        create_graph: Any,
        inputs: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        given, wholes = tuple(inputs), _whole_inputs(inputs)
        # Else autograd would refuse whole weights that are not in the graph, too.
        unused = args[0] if args else options.get("allow_unreachable", False)
        every = (*given, *wholes) if unused else given
        try:
            results = run(outputs, gradients, retain_graph, create_graph, every, *args, **options)
        except BaseException as error:
            if isinstance(error, RuntimeError):
                _explain(error, to_parameters=bool(wholes))
            for schedule in {unit.schedule for unit in list(_UNITS)}:
                schedule.recover()
            raise
        # Without results gradients have been accumulated.
        if any(one is not None for one in (results or ())[len(given) :]):
            raise RuntimeError(_OF_PARAMETERS)
        return results and results[: len(given)]

    return call


def _whole_inputs(inputs: Any) -> list[torch.Tensor]:
    """Whole weights in whose place ``inputs`` have main weights."""
    if not any(isinstance(one, DTensor) for one in inputs):
        return []
    known = {
        id(sharded): whole
        for group in _groups()
        for sharded, whole in zip(group.params, group.unsharded, strict=True)
        if whole.requires_grad
    }
    return [known[id(one)] for one in inputs if id(one) in known]


def _explain(error: RuntimeError, to_parameters: bool) -> None:
    message = str(error)
    if to_parameters and "not have been used in the graph" in message:
        error.add_note(_OF_PARAMETERS)
    changed = _CHANGED.search(message)
    if changed is None:
        return
    shape, version = [int(size) for size in changed[1].split(",") if size.strip()], int(changed[2])
    names = [
        f"{name!r} of unit {group.unit_name!r}"
        for group in _groups()
        for name, weight in group.whole_weights()
        # A matrix may be saved as its transpose.
        if weight._version == version and list(weight.shape) in (shape, shape[::-1])
    ]
    if names:
        others = f" or {len(names) - 4} more of this shape" if len(names) > 4 else ""
        error.add_note(
            f"torch_impl: expected a weight as the forward of a sharded module has read it, {' or '.join(names[:4])}"
            f"{others}, but the weight was freed, or changed with the main weights, before this backward came. Run "
            "the backward before the next forward of the module and before the optimizer's step; have forward return "
            "the tensor from which the backward starts, by itself or in lists, dicts or dataclasses; or keep weights "
            "by set_reshard_after_forward(False) and set_reshard_after_backward(False). Where create_graph=True comes "
            "after steps without it, call set_buffer_pool(False) before the first step."
        )
